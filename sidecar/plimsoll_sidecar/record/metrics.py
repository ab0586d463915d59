"""Export the supervisor's Prometheus metrics.

An unknown value is absent, not zero. No label contains a request, a PID or an incident.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from plimsoll_api.assessment import HOST_SEGMENTS, Assessment, BudgetState
from plimsoll_api.incident_record import StepOutcome, StepRecord
from plimsoll_api.incidents import OPERATOR_ONLY_KINDS, IncidentKind, IncidentPhase
from plimsoll_api.learned import LEARNED_WINDOWS_H, LearnedMemory
from plimsoll_api.memory_contract import MemoryNeeds
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.names import UNREADY_REASONS
from plimsoll_api.state import Signal
from plimsoll_api.supervision import Action
from plimsoll_api.supervisor_config import ServiceRef
from plimsoll_api.trace import OpenFiles
from plimsoll_sidecar.act.start_gate import GateOutcome
from plimsoll_sidecar.background import SamplingWatchdog
from plimsoll_sidecar.govern.command import Event, EventType
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.collectors import (
    CgroupCollector,
    GrowthCounter,
    OpenFilesCollector,
    ResourceUsageCollector,
    ThreadCollector,
    compute_dead_band_bytes,
)
from plimsoll_sidecar.signals.cgroup import CgroupMemory

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REMEDIATION_STEPS = frozenset(action.value for action in Action)
# An action frees this memory.
MEMORY_KINDS = {
    IncidentKind.HOST_GROWTH: "host",
    IncidentKind.DEVICE_GROWTH: "device",
    IncidentKind.ORPHAN_DEVICE_MEMORY: "device",
    IncidentKind.CAPACITY_LOSS: "device",
}
DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
WAIT_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0)
# The description and the label names, by name without prefix.
GAUGES: dict[str, tuple[str, ...]] = {
    "memory_segment_bytes": ("Size of a memory segment.", "segment", "kind"),
    "memory_unexplained_bytes": ("Memory growth that no ledger explains.", "kind"),
    "memory_baseline_bytes": ("Memory after the warm-up in this epoch.", "kind"),
    "memory_baseline_age_seconds": (
        "Time since the end of the warm-up; only growth since then counts.",
        "kind",
    ),
    "memory_baseline_requests": (
        "Number of requests answered since the end of the warm-up.",
        "kind",
    ),
    "memory_budget_bytes": (
        "Unexplained growth that the leak budget allows within its window.",
        "kind",
    ),
    "memory_budget_window_seconds": ("Window of the leak budget.", "kind"),
    "memory_device_shared": (
        "1 if other pods use the same devices, and only memory of the engine's own allocator "
        "counts.",
    ),
    "memory_budget_consumed_ratio": ("Share of the leak budget that is spent.", "kind"),
    "memory_budget_exhaustion_seconds": (
        "Time until the leak budget is spent; absent while memory does not grow.",
        "kind",
    ),
    "memory_needed_bytes": ("Largest size of healthy memory in this revision.", "kind"),
    "memory_declared_bytes": ("Sum of the bounds in the engine's ledger.", "kind"),
    "memory_declared_unfilled_bytes": (
        "Memory that the declared memory pools may still allocate.",
        "kind",
    ),
    "memory_limit_bytes": ("Memory limit of the container, or size of the devices.", "kind"),
    "memory_learned_seconds": (
        "Time for which healthy memory was observed in this pod and in earlier pods of the "
        "workload.",
        "kind",
    ),
    "memory_learned_growth_bytes": (
        "99th percentile of the growth of healthy memory within a window.",
        "kind",
        "window",
    ),
    "memory_learned_start_bytes": (
        "Largest size of memory after a warm-up in this revision.",
        "kind",
    ),
    "memory_learned_budget_bytes": (
        "Leak budget that the supervisor has learned; absent until it has learned one.",
        "kind",
    ),
    "memory_slow_leak": (
        "1 while there is a slow leak, 0 if there is none; absent while unknown.",
        "kind",
    ),
    "memory_slow_leak_bytes_per_second": (
        "Rate of the slow leak; absent while there is none.",
        "kind",
        "segment",
    ),
    "memory_slow_leak_limit_seconds": (
        "Time until the slow leak reaches the memory limit at its present rate; absent if there "
        "is no slow leak or no known limit.",
        "kind",
    ),
    "pod_info": (
        "Always 1. The pod's role in disaggregated or multi-node serving, and its group of pods; "
        "absent if it has no role.",
        "role",
        "group",
    ),
    "incidents_open": ("Incidents that have not ended.",),
    "signal_age_seconds": (
        "Time since a sample last had the signal: engine, metrics, host, device or shared_memory.",
        "signal",
    ),
    "restart_budget_remaining": ("Restarts that the restart budget still allows.",),
    "restart_budget_exhausted": (
        "1 while the restart budget is exhausted, until a person resets it.",
    ),
    "engine_stalled": ("1 while requests wait and the engine completes no step.",),
    "supervisor_sample_seconds": ("Duration of the newest sample.",),
    "supervisor_journal_writable": ("0 while the supervisor cannot write its journal.",),
    "supervisor_config_valid": (
        "0 while the supervisor has no configuration or does not use the newest configuration.",
    ),
    "supervisor_out_of_service": (
        "1 while the supervisor keeps the pod unready, by reason: a person drained the pod "
        "(manual), an incident drains it (drain), or its engine restarts (restart).",
        "reason",
    ),
    "supervisor_signal_ok": (
        "1 while this signal of the engine is available, 0 while it is not.",
        "signal",
    ),
    "supervisor_signal_missing": (
        "1 while this signal of the engine is missing, by reason; absent while it is available.",
        "signal",
        "reason",
    ),
    "supervisor_publish_backlog": ("Incidents that are not yet published to the API server.",),
}
COUNTERS: dict[str, tuple[str, ...]] = {
    "memory_unexplained_growth_bytes": (
        "Unexplained growth, summed over epochs, for burn rates.",
        "kind",
    ),
    "incidents": ("Incidents opened.", "kind"),
    "incidents_ended": ("Incidents ended.", "kind", "phase", "outcome"),
    "remediations": ("Remediations by action and outcome.", "action", "outcome"),
    "remediation_returned_bytes": (
        "Memory that was freed, by the action that ended the incident.",
        "action",
        "kind",
    ),
    "engine_starts": (
        "Engine starts that the start gate permitted, by outcome: the devices were free, "
        "they were not free in time (timeout), or their use was unknown.",
        "devices",
    ),
    "engine_start_held_seconds": ("Time for which the start gate held the starts of an engine.",),
    "shared_memory_swept_bytes": (
        "Size of deleted files in /dev/shm that a terminated engine had left behind.",
    ),
    "signal_unknown_samples": ("Samples in which the signal was unknown.", "signal"),
    "supervisor_samples": ("Samples taken.",),
    "supervisor_journal_damaged": (
        "Damaged parts of the journal that were moved to the folder set-aside: rows or whole "
        "files.",
        "part",
    ),
}
# Buckets, description and label names, by name without prefix.
HISTOGRAMS: dict[str, tuple[Any, ...]] = {
    "remediation_duration_seconds": (
        DURATION_BUCKETS_S,
        "Duration of an action; for a worker restart, the time for which streams pause.",
        "action",
    ),
    "restart_slot_wait_seconds": (
        WAIT_BUCKETS_S,
        "Time for which incidents waited for a restart slot of the service.",
    ),
}
# Without this call, each series has a second sample with its creation time, which nothing reads.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Metrics of one supervisor, in a registry."""

    def __init__(self, read_cgroup: Callable[[], CgroupMemory] = CgroupMemory) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(CgroupCollector(read_cgroup))
        self._open_files = OpenFilesCollector()
        registry.register(self._open_files)
        self._sampling = SamplingWatchdog()
        registry.register(ThreadCollector(self._sampling))
        registry.register(ResourceUsageCollector())
        self._gauges = {
            name: Gauge(f"plimsoll_{name}", text, labels, registry=registry)
            for name, (text, *labels) in GAUGES.items()
        }
        self._counters = {
            name: Counter(f"plimsoll_{name}", text, labels, registry=registry)
            for name, (text, *labels) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"plimsoll_{name}", text, labels, buckets=buckets, registry=registry)
            for name, (buckets, text, *labels) in HISTOGRAMS.items()
        }
        self._growth_counters = {"host": GrowthCounter(), "device": GrowthCounter()}
        self._shared_device = False
        self._dead_bands = {
            "host": compute_dead_band_bytes(None),
            "device": compute_dead_band_bytes(None),
        }
        self._counted: set[str] = set()
        self._awaiting: dict[str, float] = {}
        self._known_at: dict[str, float] = {}
        self._shown: set[tuple[str, str]] = set()
        self._shown_series: dict[str, frozenset[tuple[str, str]]] = {}
        self._create_zero_counters()
        self.export_journal_state(True)
        self.export_config_state(True)
        self.export_unready_reasons(())

    def _create_zero_counters(self) -> None:
        # Prometheus cannot see an increase in the first value of a series.
        for end in GateOutcome:
            self._counters["engine_starts"].labels(end.value)
        for kind in sorted(set(IncidentKind) - OPERATOR_ONLY_KINDS):
            self._counters["incidents"].labels(kind.value)
        for action in sorted(REMEDIATION_STEPS):
            is_only_requested = action == Action.POD_REPLACE
            ends = (
                (StepOutcome.REQUESTED,)
                if is_only_requested
                else (StepOutcome.SUCCEEDED, StepOutcome.FAILED)
            )
            for outcome in ends:
                self._counters["remediations"].labels(action, outcome.value)
            for memory in ("host", "device"):
                self._counters["remediation_returned_bytes"].labels(action, memory)
        for part in ("row", "file"):
            self._counters["supervisor_journal_damaged"].labels(part)

    def export_role(self, service: ServiceRef) -> None:
        """Export the role of a pod that has one. Call this once."""
        if service.role is not None:
            group = service.group.key if service.group is not None else ""
            self._gauges["pod_info"].labels(service.role.value, group).set(1)

    def export_budgets(self, memory: MemoryPolicy) -> None:
        """Export the leak budgets. Call this at the start and whenever the budgets change."""
        for kind, budget in (("host", memory.host), ("device", memory.device)):
            growth, window_s = (budget.growth_bytes, budget.window_s) if budget else (None, None)
            self._dead_bands[kind] = compute_dead_band_bytes(growth)
            self._set_or_remove("memory_budget_bytes", kind, growth)
            self._set_or_remove("memory_budget_window_seconds", kind, window_s)
        self._gauges["memory_device_shared"].set(int(memory.shared_device))

    def export_learned_budgets(
        self, learned: Mapping[str, LearnedMemory], needs: Mapping[str, MemoryNeeds]
    ) -> None:
        """Export the learned growth and the memory needs of ``host`` and ``device``."""
        gains = {}
        for kind in ("host", "device"):
            history = learned.get(kind)
            self._set_or_remove("memory_learned_seconds", kind, history.seen_s if history else None)
            self._set_or_remove(
                "memory_learned_start_bytes", kind, history.start if history else None
            )
            self._set_or_remove(
                "memory_learned_budget_bytes", kind, history.budget if history else None
            )
            need = needs.get(kind)
            self._set_or_remove("memory_needed_bytes", kind, need.level if need else None)
            self._set_or_remove("memory_declared_bytes", kind, need.pools if need else None)
            self._set_or_remove(
                "memory_declared_unfilled_bytes", kind, need.unfilled if need else None
            )
            self._set_or_remove("memory_limit_bytes", kind, need.limit if need else None)
            for hours, gain in zip(
                LEARNED_WINDOWS_H, history.gains if history else (), strict=False
            ):
                gains[kind, f"{hours}h"] = gain
        self._replace_series("memory_learned_growth_bytes", gains)

    def observe(
        self, assessment: Assessment, known_signals: Mapping[str, bool], duration_s: float
    ) -> None:
        """Export an assessment and count its growth. Call this once for each assessment.

        ``duration_s`` is the time in seconds that the sample took.
        """
        self._sampling.record_sample()
        self._counters["supervisor_samples"].inc()
        self._gauges["supervisor_sample_seconds"].set(duration_s)
        self._observe_signals(known_signals)
        shared = self._shared_device or bool(assessment.shared_device)
        self._gauges["memory_device_shared"].set(int(shared))
        sizes = {
            (segment.value, "host" if segment in HOST_SEGMENTS else "device"): size
            for segment, size in assessment.segments.items()
        }
        self._replace_series("memory_segment_bytes", sizes)
        self._observe_budget("host", assessment.host, assessment.epoch)
        self._observe_budget(
            "device",
            _choose_larger_growth(assessment.device, assessment.reserved),
            assessment.epoch,
        )
        self._observe_slow_leaks(assessment)
        self._gauges["engine_stalled"].set(
            int(any(s.kind is IncidentKind.STALL for s in assessment.suspicions))
        )

    def count_events(self, events: list[Event]) -> None:
        """Count incidents, their waits for a restart slot, and finished actions."""
        for event in events:
            incident = event.incident
            if event.type is EventType.OPENED:
                self._counters["incidents"].labels(incident.kind.value).inc()
            self._count_slot_wait(event)
            self._count_steps(incident)
            if event.type in (EventType.ENDED, EventType.CLEARED):
                self._count_ended_incident(incident)
        # After the loop: all events of a turn share one incident, which may end in that turn.
        for event in events:
            if event.incident.ended:
                prefix = f"{event.incident.name}/"
                self._counted = {key for key in self._counted if not key.startswith(prefix)}

    def skip_counted_steps(self, incidents: Iterable[Incident]) -> None:
        """Do not count the finished steps of ``incidents``: an earlier supervisor did."""
        for incident in incidents:
            if incident.phase is IncidentPhase.AWAITING_SLOT:
                self._awaiting.setdefault(incident.name, incident.phase_since)
            self._counted.update(key for key, _ in _list_finished_actions(incident))

    def export_status(
        self,
        num_open_incidents: int,
        restarts_left: int,
        num_unpublished: int,
        is_budget_exhausted: bool = False,
    ) -> None:
        """Export the numbers of open incidents, remaining restarts and unpublished incidents."""
        self._gauges["incidents_open"].set(num_open_incidents)
        self._gauges["restart_budget_remaining"].set(restarts_left)
        self._gauges["restart_budget_exhausted"].set(int(is_budget_exhausted))
        self._gauges["supervisor_publish_backlog"].set(num_unpublished)

    def export_missing_signals(self, signals: Mapping[str, Signal]) -> None:
        """Export the reason for each signal that the newest sample lacks."""
        values = {(name, signal.reason): 1.0 for name, signal in signals.items() if not signal.ok}
        self._replace_series("supervisor_signal_missing", values)

    def export_open_files(self, files: OpenFiles | None) -> None:
        """Export the number of the engine's open files; None if unknown."""
        self._open_files.newest = files

    def count_starts(self, permitted_starts: Iterable[tuple[str, float]]) -> None:
        """Count the permitted engine starts: their outcome, and the seconds of the hold."""
        for outcome, held_s in permitted_starts:
            self._counters["engine_starts"].labels(outcome).inc()
            self._counters["engine_start_held_seconds"].inc(held_s)

    def count_swept_bytes(self, size_bytes: int) -> None:
        """Count ``size_bytes`` bytes of removed files in ``/dev/shm``."""
        self._counters["shared_memory_swept_bytes"].inc(size_bytes)

    def export_journal_state(self, is_writable: bool) -> None:
        """Export whether the last write to the journal succeeded."""
        self._gauges["supervisor_journal_writable"].set(int(is_writable))

    def count_damaged_part(self, part: str) -> None:
        """Count a damaged part of the journal: ``row`` or ``file``."""
        self._counters["supervisor_journal_damaged"].labels(part).inc()

    def export_config_state(self, is_valid: bool) -> None:
        """Export whether the newest configuration file is in use."""
        self._gauges["supervisor_config_valid"].set(int(is_valid))

    def export_unready_reasons(self, reasons: Collection[str]) -> None:
        """Export the active reasons why the pod is not ready."""
        for reason in UNREADY_REASONS:
            self._set_or_remove("supervisor_out_of_service", reason, int(reason in reasons))

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    # ---- one sample

    def _observe_signals(self, known_signals: Mapping[str, bool]) -> None:
        now = time.monotonic()
        for signal in sorted({*known_signals, *self._known_at}):
            is_known = known_signals.get(signal, False)  # a removed device has no signal
            self._set_or_remove("supervisor_signal_ok", signal, int(is_known))
            if not is_known or signal not in self._known_at:
                self._counters["signal_unknown_samples"].labels(signal).inc(int(not is_known))
            # If the signal was never known_signals, its age counts from the first sample.
            since = self._known_at.setdefault(signal, now)
            if is_known:
                self._known_at[signal] = since = now
            self._set_or_remove("signal_age_seconds", signal, now - since)

    def _observe_budget(self, kind: str, budget: BudgetState | None, epoch: int) -> None:
        state = budget or BudgetState()
        self._set_or_remove("memory_unexplained_bytes", kind, state.unexplained)
        self._set_or_remove("memory_baseline_bytes", kind, state.baseline)
        self._set_or_remove("memory_baseline_age_seconds", kind, state.age_s)
        self._set_or_remove("memory_baseline_requests", kind, state.requests)
        self._set_or_remove("memory_budget_consumed_ratio", kind, state.consumed_ratio)
        self._set_or_remove("memory_budget_exhaustion_seconds", kind, state.exhaustion_s)
        if state.unexplained is not None:
            risen = self._growth_counters[kind].compute_increase(
                state.unexplained, epoch, self._dead_bands[kind]
            )
            self._counters["memory_unexplained_growth_bytes"].labels(kind).inc(risen)

    def _observe_slow_leaks(self, assessment: Assessment) -> None:
        rates = {}
        for kind in ("host", "device"):
            slow = assessment.slow.get(kind)
            self._set_or_remove(
                "memory_slow_leak", kind, None if slow is None else int(slow.slow_leak)
            )
            self._set_or_remove(
                "memory_slow_leak_limit_seconds", kind, slow.limit_s if slow else None
            )
            if slow is not None and slow.bytes_per_s is not None:
                segment = slow.segment.value if slow.segment is not None else ""
                rates[kind, segment] = slow.bytes_per_s
        self._replace_series("memory_slow_leak_bytes_per_second", rates)

    def _set_or_remove(self, name: str, label: str, value: float | None) -> None:
        # A value that stays is set again: objects that live for hours would fragment the heap.
        if value is not None:
            self._shown.add((name, label))
            self._gauges[name].labels(label).set(value)
        elif (name, label) in self._shown:
            self._shown.remove((name, label))
            self._gauges[name].remove(label)

    def _replace_series(self, name: str, values: Mapping[tuple[str, str], float]) -> None:
        # A concurrent scrape sees every series that is in both the previous and the new series.
        gauge, shown = self._gauges[name], self._shown_series.get(name, frozenset())
        for labels, value in values.items():
            gauge.labels(*labels).set(value)
        for labels in shown - values.keys():
            gauge.remove(*labels)
        self._shown_series[name] = frozenset(values)

    # ---- incidents

    def _count_slot_wait(self, event: Event) -> None:
        incident = event.incident
        if incident.phase is IncidentPhase.AWAITING_SLOT:
            self._awaiting.setdefault(incident.name, incident.phase_since)
        elif incident.name in self._awaiting:
            self._histograms["restart_slot_wait_seconds"].observe(
                max(0.0, event.at - self._awaiting.pop(incident.name))
            )

    def _count_steps(self, incident: Incident) -> None:
        for key, step in _list_finished_actions(incident):
            if key in self._counted:
                continue
            self._counted.add(key)
            self._counters["remediations"].labels(step.step, step.outcome.value).inc()
            if step.finished_at is not None:
                self._histograms["remediation_duration_seconds"].labels(step.step).observe(
                    max(0.0, step.finished_at - step.time)
                )

    def _count_ended_incident(self, incident: Incident) -> None:
        outcome = incident.reason.value if incident.reason else ""
        self._counters["incidents_ended"].labels(
            incident.kind.value, incident.phase.value, outcome
        ).inc()
        kind = MEMORY_KINDS.get(incident.kind)
        if incident.returned_bytes and kind is not None:
            self._counters["remediation_returned_bytes"].labels(outcome, kind).inc(
                incident.returned_bytes
            )


def _list_finished_actions(incident: Incident) -> list[tuple[str, StepRecord]]:
    return [
        (f"{incident.name}/{step.operation_id or step.step}", step)
        for step in incident.timeline
        if step.step in REMEDIATION_STEPS and step.outcome is not StepOutcome.BEGUN
    ]


def _choose_larger_growth(
    device: BudgetState | None, reserved: BudgetState | None
) -> BudgetState | None:
    states = [state for state in (device, reserved) if state is not None]
    return max(states, key=lambda state: state.unexplained or 0, default=None)
