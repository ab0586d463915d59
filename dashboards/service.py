"""One service: its memory by segment, its budget, its load, and the remediations."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.annotations import remediations
from dashboards.panels import (
    BYTES,
    COUNT,
    HALF,
    SECONDS,
    SHARE,
    THIRD,
    WIDE,
    bars,
    board,
    lines,
)  # fmt: skip

AT = 'namespace=~"$namespace",service=~"$service",pod=~"$pod"'


def service() -> Dashboard:
    made = board(
        "service",
        "Service",
        "Memory, load and remediations of one service.",
        "namespace",
        "service",
        "pod",
    )
    for kind, name in (("host", "Host"), ("device", "Device")):
        made.with_panel(_segments(kind, name)).with_panel(_growth(kind, name))
    return (
        made.with_panel(bars("Leak budget", SHARE, "Spent share of the budget, by replica.",
                             (f"plimsoll_memory_budget_consumed_ratio{{{AT}}}",
                              "{{pod}} {{kind}}"), width=THIRD))
        .with_panel(lines("Leak budget over time", SHARE, "1 is the whole budget.",
                          (f"plimsoll_memory_budget_consumed_ratio{{{AT}}}", "{{pod}} {{kind}}"),
                          width=THIRD))
        .with_panel(lines("Time to exhaustion", SECONDS, "Absent while nothing grows.",
                          (f"plimsoll_memory_budget_exhaustion_seconds{{{AT}}}",
                           "{{pod}} {{kind}}"), width=THIRD))
        .with_panel(lines("Slow leaks", BYTES, "Growth in an hour of memory that grows without an"
                          " end. Absent while there is none.",
                          (f"plimsoll_memory_slow_leak_bytes_per_second{{{AT}}} * 3600",
                           "{{pod}} {{kind}} {{segment}}"), width=HALF))
        .with_panel(lines("Time to the memory limit", SECONDS,
                          "At the rate of the slow leak. Absent where no limit is known.",
                          (f"plimsoll_memory_slow_leak_limit_seconds{{{AT}}}",
                           "{{pod}} {{kind}}"),
                          (f"max by (kind) (plimsoll_memory_slow_leak{{{AT}}})",
                           "{{kind}}: 1 while it leaks"), width=HALF))
        .with_panel(lines("Growth since the warm-up", BYTES,
                          "Unexplained growth in an hour, on average since the warm-up: replicas "
                          "of one revision under one load are alike.",
                          (f"plimsoll_memory_unexplained_bytes{{{AT}}} / "
                           f"plimsoll_memory_baseline_age_seconds{{{AT}}} * 3600",
                           "{{pod}} {{kind}}"), width=HALF))
        .with_panel(lines("Requests since the warm-up", COUNT, "A second, on average.",
                          (f"plimsoll_memory_baseline_requests{{{AT}}} / "
                           f"plimsoll_memory_baseline_age_seconds{{{AT}}}",
                           "{{pod}} {{kind}}"), width=HALF))
        .with_panel(lines("Learned growth", BYTES, "What healthy replicas gain within each window, "
                          "what a start takes, and the leak budget that follows.",
                          (f"plimsoll_memory_learned_growth_bytes{{{AT}}}",
                           "{{pod}} {{kind}} in {{window}}"),
                          (f"plimsoll_memory_learned_start_bytes{{{AT}}}",
                           "{{pod}} {{kind}} after a start"),
                          (f"plimsoll_memory_learned_budget_bytes{{{AT}}}",
                           "{{pod}} {{kind}} budget"), width=THIRD))
        .with_panel(lines("Needs", BYTES, "The most that a healthy replica held, what its declared "
                          "pools may take in all and may still take, and its limit.",
                          (f"plimsoll_memory_needed_bytes{{{AT}}}", "{{pod}} {{kind}}"),
                          (f"plimsoll_memory_declared_bytes{{{AT}}}", "{{pod}} {{kind}} pools"),
                          (f"plimsoll_memory_declared_unfilled_bytes{{{AT}}}",
                           "{{pod}} {{kind}} not full yet"),
                          (f"plimsoll_memory_limit_bytes{{{AT}}}", "{{pod}} {{kind}} limit"),
                          width=THIRD))
        .with_panel(lines("Learning", SECONDS, "For how long healthy memory was observed.",
                          (f"plimsoll_memory_learned_seconds{{{AT}}}", "{{pod}} {{kind}}"),
                          width=THIRD))
        .with_panel(lines("Requests", COUNT, "Load of the engine.",
                          (f"sum(plimsoll_engine_num_requests_running{{{AT}}})", "running"),
                          (f"sum(plimsoll_engine_num_requests_waiting{{{AT}}})", "waiting"),
                          (f"sum(plimsoll_engine_num_requests_inflight{{{AT}}})", "in flight")))
        .with_panel(lines("Remediations", COUNT, "By action and outcome.",
                          ("sum by (action, outcome) "
                           f"(increase(plimsoll_remediations_total{{{AT}}}[$__rate_interval]))",
                           "{{action}} {{outcome}}")))
        .with_panel(lines("Returned", BYTES, "Memory that came back, by the incident's action.",
                          ("sum by (action, kind) "
                           f"(plimsoll_remediation_returned_bytes_total{{{AT}}})",
                           "{{action}} {{kind}}"), width=THIRD))
        .with_panel(lines("Restart pause", SECONDS,
                          "Mean duration of an action; for a worker restart, the streams' pause.",
                          ("sum by (action) "
                           f"(plimsoll_remediation_duration_seconds_sum{{{AT}}})"
                           " / sum by (action) "
                           f"(plimsoll_remediation_duration_seconds_count{{{AT}}})",
                           "{{action}}"), width=THIRD))
        .with_panel(lines("Restarts left", COUNT, "Rest of the restart budget, by replica.",
                          (f"plimsoll_restart_budget_remaining{{{AT}}}", "{{pod}}"), width=THIRD))
        .with_panel(lines("Incidents ended", COUNT, "By phase and outcome.",
                          ("sum by (kind, phase, outcome) "
                           f"(plimsoll_incidents_ended_total{{{AT}}})",
                           "{{kind}} {{phase}} {{outcome}}"), width=THIRD))
        .with_panel(lines("Wait for the restart slot", SECONDS, "Mean wait of an incident.",
                          (f"sum(plimsoll_restart_slot_wait_seconds_sum{{{AT}}}) / "
                           f"(sum(plimsoll_restart_slot_wait_seconds_count{{{AT}}}) > 0)", "mean"),
                          width=THIRD))
        .with_panel(lines("Unknown signals", SHARE,
                          "Share of samples without the signal. On a shared device, only the "
                          "engine's own allocator counts.",
                          ("sum by (signal) (rate(plimsoll_signal_unknown_samples_total"
                           f"{{{AT}}}[$__rate_interval])) / ignoring(signal) group_left "
                           f"sum(rate(plimsoll_supervisor_samples_total{{{AT}}}"
                           "[$__rate_interval]))", "{{signal}}"),
                          (f"max(plimsoll_memory_device_shared{{{AT}}})", "device shared"),
                          width=THIRD))
        .with_panel(lines("Control group", BYTES, "Memory that the kernel charges to the engine.",
                          (f"max by (kind) (plimsoll_cgroup_memory_bytes{{{AT}}})", "{{kind}}"),
                          width=THIRD))
        .with_panel(lines("Limit and waiting", SHARE,
                          "Share of the memory limit that cannot be reclaimed; share of time in "
                          "which some or all tasks stalled for memory (PSI).",
                          (f"max(plimsoll_cgroup_memory_limit_ratio{{{AT}}})", "limit in use"),
                          ("max by (share) (rate(plimsoll_cgroup_memory_stalled_seconds_total"
                           f"{{{AT}}}[$__rate_interval]))", "{{share}}"), width=THIRD))
        .with_panel(lines("Kernel events", COUNT, "Throttling, out of memory, killed processes.",
                          ("sum by (event) (increase(plimsoll_cgroup_memory_events_total"
                           f"{{{AT}}}[$__rate_interval]))", "{{event}}"), width=THIRD))
        .with_panel(lines("Open files", SHARE,
                          "Share of its limit that the engine's process nearest to it has open.",
                          (f"plimsoll_engine_open_fds{{{AT}}} / plimsoll_engine_max_fds{{{AT}}}",
                           "{{pod}}"), width=HALF))
        .with_panel(lines("Shared memory: swept", BYTES,
                          "Deleted files in /dev/shm, which terminated engines had left.",
                          (f"plimsoll_shared_memory_swept_bytes_total{{{AT}}}", "{{pod}}"),
                          width=HALF))
        .with_panel(lines("Start gate", COUNT,
                          "Starts of an engine by the state of its devices, and for how many "
                          "seconds they were held.",
                          (f"sum by (devices) (increase(plimsoll_engine_starts_total{{{AT}}}"
                           "[$__range]))", "{{devices}}"),
                          (f"sum(increase(plimsoll_engine_start_held_seconds_total{{{AT}}}"
                           "[$__range]))", "seconds held"), width=HALF))
        .with_panel(lines("Roles", COUNT,
                          "Pods by their role in disaggregated or multi-node serving.",
                          (f"sum by (role) (plimsoll_pod_info{{{AT}}})", "{{role}}"),
                          width=HALF))
        .with_panel(lines("Supervisor: memory", BYTES, "Memory of each supervisor.",
                          (f"plimsoll_supervisor_resident_memory_bytes{{{AT}}}",
                           "{{pod}} {{process}}"), width=THIRD))
        .with_panel(lines("Supervisor: CPU", COUNT, "Cores that each supervisor uses.",
                          (f"rate(plimsoll_supervisor_cpu_seconds_total{{{AT}}}"
                           "[$__rate_interval])", "{{pod}}"), width=THIRD))
        .with_panel(lines("Supervisor: parts", COUNT,
                          "Supervisors in which this part works, of those that have it.",
                          (f"sum by (part) (plimsoll_supervisor_part_ok{{{AT}}})", "{{part}}"),
                          width=THIRD))
        .annotation(remediations(AT))
    )  # fmt: skip


def _segments(kind: str, name: str) -> timeseries.Panel:
    at = f'{AT},kind="{kind}"'
    level = (
        f"max(plimsoll_memory_baseline_bytes{{{at}}}) + max(plimsoll_memory_budget_bytes{{{at}}})"
    )
    return lines(
        f"{name} memory by segment",
        BYTES,
        "Largest value of each segment over the replicas, with the baseline and the budget above.",
        (f"max by (segment) (plimsoll_memory_segment_bytes{{{at}}})", "{{segment}}"),
        (f"max(plimsoll_memory_baseline_bytes{{{at}}})", "baseline"),
        (level, "budget"),
        width=WIDE,
        stacked=True,
    )


def _growth(kind: str, name: str) -> timeseries.Panel:
    """The leak alone: next to a baseline of gigabytes, some hundred megabytes are hard to see."""
    at = f'{AT},kind="{kind}"'
    return lines(
        f"{name} growth that nothing explains",
        BYTES,
        "Unexplained growth of each replica, and its budget.",
        (f"plimsoll_memory_unexplained_bytes{{{at}}}", "{{pod}}"),
        (f"max(plimsoll_memory_budget_bytes{{{at}}})", "budget"),
        width=THIRD,
    )
