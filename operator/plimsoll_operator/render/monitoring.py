"""Render the PodMonitor, the PrometheusRule, and the burn-rate alerts on leak budgets.

Burn rate = increase(growth over a range) / budget x window / range. At a rate of 1, the budget
lasts exactly one window. The alerts use a long and a short range, as in the Site Reliability
Workbook (chapter 5). Their factor is the rate that spends ``share`` of the budget within ``window /
window_divisor``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import SERVICE_LABEL
from plimsoll_api.units import format_duration, parse_duration
from plimsoll_operator.render import names

RUNBOOKS_URL = "https://plimsoll.dev/runbooks"
WINDOWS_S = (3600, 6 * 3600, 24 * 3600, 7 * 86_400, 30 * 86_400)
"""Window classes. A budget belongs to the largest class that does not exceed its window, because
PromQL requires literal ranges."""
SHORT_RANGE_DIVISOR = 12
MIN_RANGE_S = 240
"""Minimum of the short range, so that it survives a failed scrape at an interval of a minute."""
MIN_LONG_RANGE_S = 360
"""Minimum of the long range, so that it contains several scrapes."""


@dataclass(frozen=True)
class BurnAlert:
    """Alert on a burn rate that spends ``share`` of a budget within window / ``window_divisor``."""

    name: str
    share: float
    window_divisor: int
    severity: str


FAST_BURN = BurnAlert("LeakBudgetBurnFast", share=0.2, window_divisor=24, severity="critical")
SLOW_BURN = BurnAlert("LeakBudgetBurnSlow", share=0.3, window_divisor=4, severity="warning")


def make_burn_rate_expression(range_s: int, matchers: str = "", window: str = "") -> str:
    """Return the PromQL expression for the burn rate of each service's worst replica.

    ``matchers`` are label matchers in braces. ``window`` is a condition on the budget's window, for
    example ``" >= 3600 < 21600"``.
    """
    growth = f"plimsoll_memory_unexplained_growth_bytes_total{matchers}"
    return (
        "max by (cluster, namespace, service, kind) (\n"
        f"  increase({growth}[{format_range(range_s)}]) / plimsoll_memory_budget_bytes{matchers}\n"
        f"  * (plimsoll_memory_budget_window_seconds{matchers}{window}) / {range_s}\n"
        ")"
    )


def make_burn_rule(
    rule: BurnAlert, window_s: int, matchers: str = "", window: str = ""
) -> dict[str, Any]:
    """Return the alerting rule for budgets with a window of ``window_s`` seconds.

    A service's own alert and the cluster's alert have equal labels, so Alertmanager deduplicates
    them.
    """
    long_s = max(window_s // rule.window_divisor, MIN_LONG_RANGE_S)
    short_s = max(long_s // SHORT_RANGE_DIVISOR, MIN_RANGE_S)
    # If the range was raised to the minimum, the share stays the same and the factor is smaller.
    factor = round(rule.share * window_s / long_s, 2)
    long, short = (
        make_burn_rate_expression(range_s, matchers, window) for range_s in (long_s, short_s)
    )
    window_class = max((one for one in WINDOWS_S if one <= window_s), default=WINDOWS_S[0])
    return make_alert(
        f"Plimsoll{rule.name}",
        f"{long} > {factor}\nand {short} > {factor}",
        rule.severity,
        "Leak budget of {{ $labels.service }} burns {{ $value | humanize }} times too fast",
        f"A replica gained unexplained {{{{ $labels.kind }}}} memory more than {factor} times"
        f" faster than its budget allows, over {format_range(long_s)} and still over"
        f" {format_range(short_s)}.",
        labels={"window": format_range(window_class)},
    )


def make_alert(
    name: str,
    expression: str,
    severity: str,
    summary: str,
    text: str,
    wait: str = "",
    dashboard: str = "service",
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return an alerting rule that fires once its condition held for ``wait``, such as ``10m``."""
    query = "?var-namespace={{ $labels.namespace }}&var-service={{ $labels.service }}"
    return {
        "alert": name,
        "expr": expression,
        **({"for": wait} if wait else {}),
        "labels": {"severity": severity, **(labels or {})},
        "annotations": {
            "summary": summary,
            "description": text,
            "runbook_url": f"{RUNBOOKS_URL}/{name}.md",
            "dashboard": f"/d/plimsoll-{dashboard}" + (query if dashboard == "service" else ""),
        },
    }


def format_range(seconds: int) -> str:
    """Format seconds as a PromQL range."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


MONITORING_API_GROUP = "monitoring.coreos.com"


def make_pod_monitor(service: InferenceService) -> list[dict[str, Any]]:
    """Return the PodMonitor for the engine and the supervisor; empty if it is disabled."""
    wanted = service.spec.observability.pod_monitor
    if not wanted.enabled:
        return []
    # Alerts and dashboards select series by service.
    label = f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', SERVICE_LABEL)}"
    endpoint = {
        "path": "/metrics",
        # The Prometheus operator's CRD takes neither fractions nor units in another order.
        "interval": format_duration(max(0.001, parse_duration(wanted.interval))),
        "relabelings": [{"sourceLabels": [label], "targetLabel": "service"}],
    }
    return [
        {
            "apiVersion": f"{MONITORING_API_GROUP}/v1",
            "kind": "PodMonitor",
            "metadata": {"name": service.metadata.name, "labels": dict(wanted.labels)},
            "spec": {
                "selector": {"matchLabels": names.make_selector(service.metadata.name)},
                "podMetricsEndpoints": [
                    {"port": "http"} | endpoint | _make_scheme(service),
                    {"port": "metrics"} | endpoint,
                ],
            },
        }
    ]


# Like the kubelet, Prometheus connects to a pod's address, which no certificate contains.
def _make_scheme(service: InferenceService) -> dict[str, Any]:
    if service.spec.engine.url_scheme == "http":
        return {}
    return {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}


def make_prometheus_rule(service: InferenceService) -> list[dict[str, Any]]:
    """Return the PrometheusRule with alerts on this service's budgets; empty if it is disabled."""
    wanted = service.spec.observability.prometheus_rule
    if not wanted.enabled:
        return []
    meta, memory = service.metadata, service.spec.memory
    rules = [
        make_burn_rule(rule, round(budget.window_s), _make_matchers(service, kind))
        for kind, budget in (("host", memory.host), ("device", memory.device))
        if budget is not None
        for rule in (FAST_BURN, SLOW_BURN)
    ]
    return [
        {
            "apiVersion": f"{MONITORING_API_GROUP}/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": meta.name, "labels": dict(wanted.labels)},
            "spec": {"groups": [{"name": f"{meta.namespace}/{meta.name}", "rules": rules}]},
        }
    ]


def _make_matchers(service: InferenceService, kind: str) -> str:
    meta = service.metadata
    return f'{{namespace="{meta.namespace}",service="{meta.name}",kind="{kind}"}}'
