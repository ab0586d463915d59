"""Alerts on leak budgets that burn too fast.

This is the one source of the rules for a whole cluster (``dashboards/``) and of those that one
service asks for.

Burn rate = increase(growth over a range) / budget x window / range: at 1 the budget is spent
exactly within its window. The multi-window form is the Site Reliability Workbook's (chapter 5): a
long range that matters and a short one that says it still goes on. Its 14.4 and 6 assume a window
of 30 days; here a factor is what spends ``share`` of the budget within ``window / part``, so factor
= share x part, and the ranges follow from the window. PromQL needs literal ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUNBOOKS = "https://plimsoll.dev/runbooks"
"""Where ``docs/runbooks/`` is published: an alert's page is ``NAME.md`` below it."""
WINDOWS_S = (3600, 6 * 3600, 24 * 3600, 7 * 86_400, 30 * 86_400)
"""Classes of windows: 1 h, 6 h, 1 d, 7 d, 30 d. A budget belongs to the one at or below its own."""
SHORT_PART = 12
MIN_RANGE_S = 120
MIN_LONG_RANGE_S = 360
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


def burn_rate(range_s: int, matchers: str = "", window: str = "") -> str:
    """How many times faster than allowed the budget is spent: each service's worst replica.

    ``matchers`` are label matchers in braces, ``window`` chooses the budgets by their window in
    seconds, for example ``" >= 3600 < 21600"``.
    """
    growth = f"plimsoll_memory_unexplained_growth_bytes_total{matchers}"
    return (
        "max by (namespace, service, kind) (\n"
        f"  increase({growth}[{as_range(range_s)}]) / plimsoll_memory_budget_bytes{matchers}\n"
        f"  * (plimsoll_memory_budget_window_seconds{matchers}{window}) / {range_s}\n"
        ")"
    )


def burn(rule: Burn, window_s: int, matchers: str = "", window: str = "") -> dict[str, Any]:
    """Write the rule with ranges for a window of ``window_s`` seconds.

    Its ``window`` label is the class of the window, so that a service's own rule and the cluster's
    give one alert: Alertmanager takes equal labels for the same.
    """
    long_s = max(window_s // rule.part, MIN_LONG_RANGE_S)
    short_s = max(long_s // SHORT_PART, MIN_RANGE_S)
    # A shortest range that had to be made longer keeps the share, so its factor is smaller.
    factor = round(rule.share * window_s / long_s, 2)
    long, short = (burn_rate(range_s, matchers, window) for range_s in (long_s, short_s))
    of_class = max((one for one in WINDOWS_S if one <= window_s), default=WINDOWS_S[0])
    return alert(
        f"Plimsoll{rule.name}",
        f"{long} > {factor}\nand {short} > {factor}",
        rule.severity,
        "Leak budget of {{ $labels.service }} burns {{ $value | humanize }} times too fast",
        f"A replica gained unexplained {{{{ $labels.kind }}}} memory more than {factor} times"
        f" faster than its budget allows, over {as_range(long_s)} and still over"
        f" {as_range(short_s)}.",
        labels={"window": as_range(of_class)},
    )


def alert(
    name: str,
    expression: str,
    severity: str,
    summary: str,
    text: str,
    wait: str = "",
    dashboard: str = "service",
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """One rule of a rules file; it fires when it held for ``wait`` (a PromQL range)."""
    query = "?var-namespace={{ $labels.namespace }}&var-service={{ $labels.service }}"
    return {
        "alert": name,
        "expr": expression,
        **({"for": wait} if wait else {}),
        "labels": {"severity": severity, **(labels or {})},
        "annotations": {
            "summary": summary,
            "description": text,
            "runbook_url": f"{RUNBOOKS}/{name}.md",
            "dashboard": f"/d/plimsoll-{dashboard}" + (query if dashboard == "service" else ""),
        },
    }


def as_range(seconds: int) -> str:
    """Seconds as PromQL writes them."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
