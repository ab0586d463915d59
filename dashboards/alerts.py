"""Alert rules, as a plain rules file and as a PrometheusRule.

Those on leak budgets are :mod:`plimsoll_operator.render.burn`'s: PromQL needs literal ranges, so
there is one rule for each class of windows.
"""

from __future__ import annotations

from typing import Any

import yaml

from plimsoll_operator.render.burn import FAST, RUNBOOKS, SLOW, WINDOWS_S, Burn, burn
from plimsoll_operator.render.burn import alert as _alert


def _of_class(rule: Burn, index: int) -> dict[str, Any]:
    """The rule for the budgets whose window is in the ``index``-th class."""
    window = WINDOWS_S[index]
    least = "> 0" if index == 0 else f">= {window}"
    most = f" < {WINDOWS_S[index + 1]}" if index + 1 < len(WINDOWS_S) else ""
    return burn(rule, window, window=f" {least}{most}")


def rules() -> list[dict[str, Any]]:
    """Every alert."""
    burns = [_of_class(rule, index) for rule in (FAST, SLOW) for index in range(len(WINDOWS_S))]
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
        ),
        _alert(
            "PlimsollSuspectRevision",
            "max by (inferenceservice) (plimsoll_operator_suspect_revisions) == 1",
            "warning",
            "Most replicas of {{ $labels.inferenceservice }} have the same leak",
            "Its present revision is bad, not a replica: status.suspectRevision says which leak,"
            " since when and what changed. A roll-out that is under way is held or rolled back, as"
            " rollout.onLeak says.",
            dashboard="operator",
        ),
    ]


def groups() -> list[dict[str, Any]]:
    return [{"name": "plimsoll", "rules": rules()}]


def rules_file(runbooks: str = RUNBOOKS) -> str:
    """For ``rule_files`` of a plain Prometheus; ``runbooks`` is where the pages are published."""
    return _yaml({"groups": groups()}).replace(f"{RUNBOOKS}/", f"{runbooks}/")


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


class _Dumper(yaml.SafeDumper):
    """Writes expressions of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _yaml(value: object) -> str:
    head = "# Generated by python -m dashboards.generate\n"
    return head + yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)
