"""Alert rules, as a plain rules file and as a PrometheusRule.

Burn rate = increase(growth over a range) / budget x window / range: at 1 the budget is spent
exactly within its window. The multi-window form is the Site Reliability Workbook's (chapter 5):
a long range that matters and a short one that says it still goes on. Its 14.4 and 6 assume a
window of 30 days; here a factor is what spends ``share`` of the budget within ``window / part``,
so factor = share x part, and the ranges follow from the window. PromQL needs literal ranges, so
there is one rule for each class of windows, and a budget belongs to the class at or below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

RUNBOOKS = "https://plimsoll.dev/runbooks"
WINDOWS_S = (3600, 6 * 3600, 24 * 3600, 7 * 86_400, 30 * 86_400)
"""The classes: 1 h, 6 h, 1 d, 7 d, 30 d."""
SHORT_PART = 12
LEAST_RANGE_S = 120
LEAST_LONG_S = 360
"""A range must hold several scrapes of 15 to 30 s."""


@dataclass(frozen=True)
class Burn:
    """Spending ``share`` of the budget within a ``part``-th of its window."""

    name: str
    share: float
    part: int
    severity: str


FAST = Burn("LeakBudgetBurnFast", share=0.2, part=24, severity="critical")
SLOW = Burn("LeakBudgetBurnSlow", share=0.3, part=4, severity="warning")


def burn_rate(range_s: int, window: str) -> str:
    """How many times faster than allowed the budget is spent: each service's worst replica.

    ``window`` chooses the budgets by their window in seconds, for example ``">= 3600 < 21600"``.
    """
    grown = f"increase(plimsoll_memory_unexplained_growth_bytes_total[{_range(range_s)}])"
    return (
        "max by (namespace, service, kind) (\n"
        f"  {grown} / plimsoll_memory_budget_bytes\n"
        f"  * (plimsoll_memory_budget_window_seconds {window}) / {range_s}\n"
        ")"
    )


def burn(rule: Burn, index: int) -> dict[str, Any]:
    """The rule for the budgets whose window is in the ``index``-th class."""
    window = WINDOWS_S[index]
    least = "> 0" if index == 0 else f">= {window}"
    most = f" < {WINDOWS_S[index + 1]}" if index + 1 < len(WINDOWS_S) else ""
    long_s = max(window // rule.part, LEAST_LONG_S)
    short_s = max(long_s // SHORT_PART, LEAST_RANGE_S)
    # A shortest range that had to be made longer keeps the share, so its factor is smaller.
    factor = round(rule.share * window / long_s, 2)
    chosen = least + most
    expression = (
        f"{burn_rate(long_s, chosen)} > {factor}\nand {burn_rate(short_s, chosen)} > {factor}"
    )
    return _alert(
        f"Plimsoll{rule.name}",
        expression,
        rule.severity,
        "Leak budget of {{ $labels.service }} burns {{ $value | humanize }} times too fast",
        f"A replica gained unexplained {{{{ $labels.kind }}}} memory more than {factor} times"
        f" faster than its budget allows, over {_range(long_s)} and still over"
        f" {_range(short_s)}.",
        labels={"window": _range(window)},
    )


def rules() -> list[dict[str, Any]]:
    """Every alert."""
    burns = [burn(rule, index) for rule in (FAST, SLOW) for index in range(len(WINDOWS_S))]
    return [*burns, *_supervisor(), *_operator()]


def _supervisor() -> list[dict[str, Any]]:
    return [
        _alert(
            "PlimsollBudgetExhaustionPredicted",
            "plimsoll_memory_budget_exhaustion_seconds < 1800\n"
            "and plimsoll_memory_budget_consumed_ratio > 0.25",
            "warning",
            "Leak budget of {{ $labels.service }} is spent in {{ $value | humanizeDuration }}",
            "{{ $labels.pod }} grows, and by its trend the {{ $labels.kind }} budget is spent"
            " within half an hour. The supervisor acts by its ladder if its mode is Recover.",
            wait="2m",
        ),
        _alert(
            "PlimsollIncidentUnresolved",
            # A counter that appears with 1 has no increase: its first value is one too.
            "sum by (namespace, service, pod, kind, outcome) (\n"
            '  increase(plimsoll_incidents_ended_total{phase="Unresolved"}[1h]) > 0\n'
            '  or (plimsoll_incidents_ended_total{phase="Unresolved"}\n'
            "      unless plimsoll_incidents_ended_total offset 1h)\n"
            ")",
            "critical",
            "An incident of {{ $labels.service }} ended unresolved: {{ $labels.outcome }}",
            "{{ $labels.pod }}: {{ $labels.kind }} could not be cured. What was tried is in the"
            " LeakIncident; plimsoll explain tells its story.",
        ),
        _alert(
            "PlimsollRestartBudgetExhausted",
            "plimsoll_restart_budget_exhausted == 1",
            "critical",
            "The supervisor of {{ $labels.pod }} restarts nothing any more",
            "The restart budget is spent: leaks and stalls of {{ $labels.service }} are only"
            " recorded until a person resets it.",
        ),
        _alert(
            "PlimsollEngineStalled",
            "plimsoll_engine_stalled == 1",
            "critical",
            "The engine of {{ $labels.pod }} has work and makes no step",
            "Its health endpoint may say that all is well. The supervisor saves stacks and"
            " restarts the worker if its mode is Recover and its restart budget allows it.",
            wait="1m",
        ),
        _alert(
            "PlimsollSupervisorBlind",
            'plimsoll_signal_age_seconds{signal=~"engine|host"} > 120',
            "warning",
            "The supervisor of {{ $labels.pod }} does not see its {{ $labels.signal }}",
            "The signal has been unknown for {{ $value | humanizeDuration }}: a leak would not be"
            " seen, and nothing is done on what is not known.",
            wait="3m",
        ),
    ]  # fmt: skip


def _operator() -> list[dict[str, Any]]:
    return [
        _alert(
            "PlimsollOperatorWatchStale",
            # A quiet cluster sends no events; a list that knows more than the watch is proof.
            "max by (namespace, pod) (plimsoll_operator_canary_age_seconds) > 120\n"
            "or sum by (namespace, pod) (increase(plimsoll_operator_watch_missed_total[15m])) > 0",
            "warning",
            "The operator does not hear from the API server",
            "Its canary read failed for two minutes, or a full list showed changes of which no"
            " watch had told. Supervisors go on without it; status and PodReplace wait.",
            wait="2m",
            dashboard="operator",
        )
    ]


def _alert(
    name: str,
    expression: str,
    severity: str,
    summary: str,
    text: str,
    wait: str = "",
    dashboard: str = "service",
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    query = "?var-namespace={{ $labels.namespace }}&var-service={{ $labels.service }}"
    return {
        "alert": name,
        "expr": expression,
        **({"for": wait} if wait else {}),
        "labels": {"severity": severity, **(labels or {})},
        "annotations": {
            "summary": summary,
            "description": text,
            "runbook_url": f"{RUNBOOKS}/{name}",
            "dashboard": f"/d/plimsoll-{dashboard}" + (query if dashboard == "service" else ""),
        },
    }


def groups() -> list[dict[str, Any]]:
    return [{"name": "plimsoll", "rules": rules()}]


def rules_file() -> str:
    """For ``rule_files`` of a plain Prometheus."""
    return _yaml({"groups": groups()})


def prometheus_rule() -> str:
    """For prometheus-operator."""
    return _yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {
                "name": "plimsoll",
                "labels": {"app.kubernetes.io/name": "plimsoll"},
            },
            "spec": {"groups": groups()},
        }
    )


def _range(seconds: int) -> str:
    """Seconds as PromQL writes them."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


class _Dumper(yaml.SafeDumper):
    """Writes expressions of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _yaml(value: object) -> str:
    head = "# Generated by python -m dashboards.generate\n"
    return head + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)
