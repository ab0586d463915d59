"""PodMonitor and PrometheusRule, where a manifest asks for them."""

from __future__ import annotations

import re
from typing import Any

from plimsoll_api.inferenceservice import InferenceService, MemoryBudget
from plimsoll_api.units import parse_bytes, parse_duration
from plimsoll_operator.render import names

GROUP = "monitoring.coreos.com"
FAST = 0.10
SLOW = 0.25
"""Shares of a leak budget that burn within a tenth and a half of its window: at such a pace it is
spent in the same window. (The multi-window alert of Google's SRE workbook, chapter 5, with its
ranges taken from this budget's own window in place of 30 days.)"""


def pod_monitor(service: InferenceService) -> list[dict[str, Any]]:
    """At most one object: engine and supervisor are scraped by the names of their ports."""
    wanted = service.spec.observability.pod_monitor
    if not wanted.enabled:
        return []
    # Which service a series belongs to is what alerts and dashboards ask first.
    label = f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', names.SERVICE_LABEL)}"
    endpoint = {
        "path": "/metrics",
        "interval": wanted.interval,
        "relabelings": [{"sourceLabels": [label], "targetLabel": "service"}],
    }
    return [
        {
            "apiVersion": f"{GROUP}/v1",
            "kind": "PodMonitor",
            "metadata": {"name": service.metadata.name, "labels": dict(wanted.labels)},
            "spec": {
                "selector": {"matchLabels": names.selector(service.metadata.name)},
                "podMetricsEndpoints": [
                    {"port": "http"} | endpoint,
                    {"port": "metrics"} | endpoint,
                ],
            },
        }
    ]


def prometheus_rule(service: InferenceService) -> list[dict[str, Any]]:
    """At most one object: alerts that depend on this service's own budgets."""
    wanted = service.spec.observability.prometheus_rule
    if not wanted.enabled:
        return []
    meta, memory = service.metadata, service.spec.memory
    rules = [
        rule
        for kind, budget in (("host", memory.host), ("device", memory.device))
        if budget is not None
        for rule in _burning(service, kind, budget)
    ]
    pods = f'namespace="{meta.namespace}",pod=~"{meta.name}-.+"'
    rules.append(
        _alert(
            service,
            "PlimsollRestartBudgetExhausted",
            f"plimsoll_restart_budget_remaining{{{pods}}} == 0",
            "critical",
            "{{ $labels.pod }} may not be restarted any more: its restart budget is spent.",
        )
    )
    return [
        {
            "apiVersion": f"{GROUP}/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": meta.name, "labels": dict(wanted.labels)},
            "spec": {"groups": [{"name": f"{meta.namespace}/{meta.name}", "rules": rules}]},
        }
    ]


def _burning(service: InferenceService, kind: str, budget: MemoryBudget) -> list[dict[str, Any]]:
    meta = service.metadata
    window_s, size = parse_duration(budget.window), parse_bytes(budget.growth_budget)
    selector = f'namespace="{meta.namespace}",pod=~"{meta.name}-.+",kind="{kind}"'
    return [
        _alert(
            service,
            "PlimsollLeakBudgetBurn",
            f"increase(plimsoll_memory_unexplained_growth_bytes_total{{{selector}}}"
            f"[{max(60, round(window_s * part))}s]) > {round(size * share)}",
            severity,
            f"{{{{ $labels.pod }}}} burned {share:.0%} of its {kind} growth budget within "
            f"{part:.0%} of the window.",
        )
        for part, share, severity in ((0.02, FAST, "critical"), (0.10, SLOW, "warning"))
    ]


def _alert(
    service: InferenceService, name: str, expression: str, severity: str, text: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "labels": {"severity": severity, "service": service.metadata.name},
        "annotations": {"summary": text},
    }
