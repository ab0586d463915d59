"""Every service at a glance: budgets that burn, open incidents, memory that came back."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import (
    BYTES,
    COUNT,
    HALF,
    SECONDS,
    SHARE,
    THIRD,
    bars,
    board,
    lines,
    number,
)  # fmt: skip

AT = 'namespace=~"$namespace"'
BY = "namespace, service"


def fleet() -> Dashboard:
    worst = f"max by ({BY}, kind) (plimsoll_memory_budget_consumed_ratio{{{AT}}})"
    grown = f"increase(plimsoll_memory_unexplained_growth_bytes_total{{{AT}}}[$__range])"
    restarts = (
        f'plimsoll_remediations_total{{{AT},action=~"WorkerRestart|EngineRestart|PodReplace"}}'
    )
    return (
        board("fleet", "Fleet", "All supervised services.", "namespace")
        .with_panel(number("Services", COUNT, "Services with a reachable supervisor.",
                           f"count(count by ({BY}) (plimsoll_supervisor_samples_total{{{AT}}}))"))
        .with_panel(number("Replicas", COUNT, "Reachable supervisors.",
                           f"count(plimsoll_supervisor_samples_total{{{AT}}})"))
        .with_panel(number("Open incidents", COUNT, "Incidents that have not ended.",
                           f"sum(plimsoll_incidents_open{{{AT}}})"))
        .with_panel(number("Hard stops", COUNT, "Replicas whose restart budget is spent.",
                           f"sum(plimsoll_restart_budget_exhausted{{{AT}}})"))
        .with_panel(number("Stalled", COUNT, "Engines with waiting requests that complete no step.",
                           f"sum(plimsoll_engine_stalled{{{AT}}})"))
        .with_panel(number("Returned", BYTES, "Memory that remediations returned in this range.",
                           "sum(increase(plimsoll_remediation_returned_bytes_total"
                           f"{{{AT}}}[$__range]))"))
        .with_panel(bars("Leak budget, worst first", SHARE,
                         "For each service, the replica that spent most of its budget.",
                         (f"sort_desc({worst})", "{{namespace}}/{{service}} {{kind}}")))
        .with_panel(bars("Replicas with no restarts left", SHARE,
                         "Share of replicas whose restart budget is spent.",
                         (f"avg by ({BY}) (plimsoll_restart_budget_remaining{{{AT}}} == bool 0)",
                          "{{namespace}}/{{service}}")))
        .with_panel(lines("Unexplained memory", BYTES, "Growth that no ledger explains.",
                          (f"sum by ({BY}, kind) (plimsoll_memory_unexplained_bytes{{{AT}}})",
                           "{{namespace}}/{{service}} {{kind}}")))
        .with_panel(lines("Time to exhaustion", SECONDS,
                          "For the replica that spends its budget first. Absent if none grows.",
                          (f"min by ({BY}, kind) "
                           f"(plimsoll_memory_budget_exhaustion_seconds{{{AT}}})",
                           "{{namespace}}/{{service}} {{kind}}")))
        .with_panel(lines("Incidents opened", COUNT, "By kind.",
                          ("sum by (namespace, service, kind) "
                           f"(increase(plimsoll_incidents_total{{{AT}}}[$__rate_interval]))",
                           "{{service}} {{kind}}"), width=THIRD))
        .with_panel(lines("Restarts", COUNT, "Restarts by action and outcome.",
                          (f"sum by ({BY}, action, outcome) "
                           f"(increase({restarts}[$__rate_interval]))",
                           "{{service}} {{action}} {{outcome}}"), width=THIRD))
        .with_panel(lines("Growth in this range", BYTES, "Unexplained growth, summed over epochs.",
                          (f"sum by ({BY}, kind) ({grown})", "{{service}} {{kind}}"),
                          width=THIRD))
        .with_panel(lines("Open incidents", COUNT, "By service.",
                          (f"sum by ({BY}) (plimsoll_incidents_open{{{AT}}})",
                           "{{namespace}}/{{service}}"), width=HALF))
        .with_panel(lines("Cost of supervision", BYTES, "Resident memory of all supervisors.",
                          (f"sum by (process) "
                           f"(plimsoll_supervisor_resident_memory_bytes{{{AT}}})",
                           "{{process}}"), width=HALF, stacked=True))
        .with_panel(lines("Signal age", SECONDS, "Age of the oldest signal of each kind.",
                          (f"max by ({BY}, signal) (plimsoll_signal_age_seconds{{{AT}}})",
                           "{{service}} {{signal}}"), width=HALF))
        .with_panel(lines("Signals unseen", COUNT,
                          "Replicas whose supervisor does not see its engine, its metrics or its"
                          " memory, by reason.",
                          (f"sum by ({BY}, signal, reason)"
                           f" (plimsoll_supervisor_signal_missing{{{AT}}})"
                           f" or sum by ({BY}, signal)"
                           f" (plimsoll_supervisor_signal_ok{{{AT}}} == bool 0)",
                           "{{service}} {{signal}} {{reason}}"), width=HALF))
        .with_panel(lines("Out of service", COUNT,
                          "Replicas that a person (manual) or an incident (drain) drained, or whose"
                          " engine restarts.",
                          (f"sum by ({BY}, reason) (plimsoll_supervisor_out_of_service{{{AT}}})",
                           "{{service}} {{reason}}"), width=HALF))
    )  # fmt: skip
