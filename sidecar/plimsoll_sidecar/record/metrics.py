"""The supervisor's Prometheus metrics. A value that is unknown is an absent series, never zero.

Namespace, pod and service are labels of the scrape's target; no series names a request, a process
id or an incident.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from plimsoll_api.assessment import HOST_SEGMENTS, Assessment, BudgetState
from plimsoll_api.incident_record import StepOutcome
from plimsoll_api.incidents import OPERATOR_ONLY, IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.names import UNREADY_REASONS
from plimsoll_api.supervision import Action
from plimsoll_api.trace import OpenFiles
from plimsoll_sidecar.govern.command import Event, EventType
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.ratchet import Ratchet, band_of
from plimsoll_sidecar.record.sample_metrics import GroupMetrics, OpenFilesMetrics, PartsMetrics
from plimsoll_sidecar.signals.process.cgroup import CgroupMemory
from plimsoll_sidecar.signals.process.resident_memory import resident

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REMEDIATIONS = frozenset(action.value for action in Action)
MEMORY_OF = {
    IncidentKind.HOST_GROWTH: "host",
    IncidentKind.DEVICE_GROWTH: "device",
    IncidentKind.ORPHAN_DEVICE_MEMORY: "device",
    IncidentKind.CAPACITY_LOSS: "device",
}
"""Which memory an incident's bytes are of."""
TOOK_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
WAITED_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0)
# A sample a series that nothing reads.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One registry for one supervisor.

    ``observe`` is called once for each assessment, ``group`` gives the newest reading of the
    engine's control group.
    """

    def __init__(self, group: Callable[[], CgroupMemory] = CgroupMemory) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(GroupMetrics(group))
        self._open_files = OpenFilesMetrics()
        registry.register(self._open_files)
        registry.register(PartsMetrics())

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"plimsoll_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"plimsoll_{name}", text, labels, registry=registry)

        self._segment = gauge(
            "memory_segment_bytes", "Size of a memory segment.", "segment", "kind"
        )
        self._unexplained = gauge(
            "memory_unexplained_bytes", "Growth that no ledger explains.", "kind"
        )
        self._baseline = gauge(
            "memory_baseline_bytes", "Memory after warm-up in this epoch.", "kind"
        )
        self._baseline_age = gauge(
            "memory_baseline_age_seconds",
            "Time since the warm-up, from whose end growth counts.",
            "kind",
        )
        self._baseline_requests = gauge(
            "memory_baseline_requests", "Requests answered since the warm-up.", "kind"
        )
        self._budget_bytes = gauge(
            "memory_budget_bytes",
            "Unexplained growth that the leak budget allows within its window.",
            "kind",
        )
        self._window = gauge("memory_budget_window_seconds", "Window of the leak budget.", "kind")
        self._shared = gauge(
            "memory_device_shared",
            "1 where other pods use the same devices: only the engine's own allocator is judged.",
        )
        self._consumed = gauge(
            "memory_budget_consumed_ratio", "Share of the leak budget that is spent.", "kind"
        )
        self._exhaustion = gauge(
            "memory_budget_exhaustion_seconds",
            "Time until the leak budget is spent; absent while nothing grows.",
            "kind",
        )
        self._growth = counter(
            "memory_unexplained_growth_bytes",
            "Unexplained growth, summed over epochs, for burn rates.",
            "kind",
        )
        self._slow_leak = gauge(
            "memory_slow_leak",
            "1 while memory grows for hours without an end, 0 while not; absent until known.",
            "kind",
        )
        self._slow_rate = gauge(
            "memory_slow_leak_bytes_per_second",
            "Rate of the slow leak; absent while there is none.",
            "kind", "segment",
        )  # fmt: skip
        self._slow_limit = gauge(
            "memory_slow_leak_limit_seconds",
            "Time until the slow leak reaches the memory limit, at its present rate; "
            "absent while there is none, or no limit is known.",
            "kind",
        )
        self._incidents = counter("incidents", "Incidents opened.", "kind")
        self._ended = counter("incidents_ended", "Incidents ended.", "kind", "phase", "outcome")
        self._open = gauge("incidents_open", "Incidents that have not ended.")
        self._remediations = counter(
            "remediations", "Remediations by action and outcome.", "action", "outcome"
        )
        self._took = Histogram(
            "plimsoll_remediation_duration_seconds",
            "Duration of an action; for a worker restart, the pause of the streams.",
            ["action"], buckets=TOOK_S, registry=registry,
        )  # fmt: skip
        self._returned = counter(
            "remediation_returned_bytes", "Memory that came back, by the action "
                                          "that ended the incident.",
            "action", "kind",
        )  # fmt: skip
        self._swept = counter(
            "shared_memory_swept_bytes",
            "Size of deleted files in /dev/shm, which a terminated engine had left.",
        )
        self._waited = Histogram(
            "plimsoll_restart_slot_wait_seconds",
            "Time that incidents waited for the service's restart slot.",
            buckets=WAITED_S, registry=registry,
        )  # fmt: skip
        self._signal_age = gauge(
            "signal_age_seconds",
            "Time since the signal was last known: engine, host, device, shared_memory.",
            "signal",
        )  # fmt: skip
        self._unknown = counter(
            "signal_unknown_samples", "Samples in which the signal was unknown.", "signal"
        )
        self._left = gauge(
            "restart_budget_remaining", "Restarts that the restart budget still allows."
        )
        self._exhausted = gauge(
            "restart_budget_exhausted",
            "1 while the restart budget is spent, until a person resets it.",
        )
        self._stalled = gauge("engine_stalled", "1 while requests wait and no step completes.")
        self._rss = gauge("supervisor_resident_memory_bytes", "Resident memory.", "process")
        self._cpu = counter("supervisor_cpu_seconds", "CPU time of the supervisor.")
        self._samples = counter("supervisor_samples", "Samples taken.")
        self._sample_s = gauge("supervisor_sample_seconds", "Duration of the newest sample.")
        self._journal_ok = gauge(
            "supervisor_journal_writable", "0 while the supervisor cannot write its journal."
        )
        self._journal_damage = counter(
            "supervisor_journal_damaged",
            "Unreadable parts of the journal that were set aside: rows or whole files.",
            "part",
        )
        self._config_ok = gauge(
            "supervisor_config_valid",
            "0 while the supervisor has no configuration, or does not use the newest one.",
        )
        self._out_of_service = gauge(
            "supervisor_out_of_service",
            "1 while the supervisor keeps the pod unready: a person drained it (manual), "
            "an incident drains it (drain), or its engine restarts (restart).",
            "reason",
        )
        self._backlog = gauge(
            "supervisor_publish_backlog", "Incidents that wait to be published to the API server."
        )
        self._ratchets = {"host": Ratchet(), "device": Ratchet()}
        self._bands = {"host": band_of(None), "device": band_of(None)}
        self._counted: set[str] = set()
        self._awaiting: dict[str, float] = {}
        self._known_at: dict[str, float] = {}
        self._cpu_seen = 0.0
        self._begin_at_zero()
        self.journal(True)
        self.config(True)
        self.out_of_service(())

    def _begin_at_zero(self) -> None:
        """Make counters at zero: one that appears with its first event has no increase."""
        for kind in set(IncidentKind) - OPERATOR_ONLY:
            self._incidents.labels(kind.value)
        for action in sorted(REMEDIATIONS):
            asked = action == Action.POD_REPLACE
            ends = (
                (StepOutcome.REQUESTED,) if asked else (StepOutcome.SUCCEEDED, StepOutcome.FAILED)
            )
            for outcome in ends:
                self._remediations.labels(action, outcome.value)
            for memory in ("host", "device"):
                self._returned.labels(action, memory)
        for part in ("row", "file"):
            self._journal_damage.labels(part)

    def budgets(self, memory: MemoryPolicy) -> None:
        """Show the budgets in force: at the start, and after a change of the configuration."""
        for kind, budget in (("host", memory.host), ("device", memory.device)):
            self._bands[kind] = band_of(budget.growth_bytes if budget else None)
            _set(self._budget_bytes, kind, budget.growth_bytes if budget else None)
            _set(self._window, kind, budget.window_s if budget else None)
        self._shared.set(int(memory.shared_device))

    def observe(self, assessment: Assessment, known: Mapping[str, bool], duration_s: float) -> None:
        """Show an assessment, count its growth, and show which signals its sample had."""
        self._samples.inc()
        self._sample_s.set(duration_s)
        self._signals(known)
        self._segment.clear()
        for segment, size in assessment.segments.items():
            kind = "host" if segment in HOST_SEGMENTS else "device"
            self._segment.labels(segment.value, kind).set(size)
        self._budget("host", assessment.host, assessment.epoch)
        self._budget("device", _larger(assessment.device, assessment.reserved), assessment.epoch)
        self._slow(assessment)
        self._stalled.set(int(any(s.kind is IncidentKind.STALL for s in assessment.suspicions)))
        self._own_cost()

    def happened(self, events: list[Event]) -> None:
        """Count incidents, their waits for a slot, and the remediations that ended."""
        for event in events:
            incident = event.incident
            if event.type is EventType.OPENED:
                self._incidents.labels(incident.kind.value).inc()
            self._count_wait(event)
            self._count_steps(incident)
            if event.type in (EventType.ENDED, EventType.CLEARED):
                self._count_end(incident)

    def standing(
        self, open_incidents: int, restarts_left: int, backlog: int, exhausted: bool = False
    ) -> None:
        """Show what stands open now.

        Incidents, restarts left, and incidents that Kubernetes does not have yet.
        """
        self._open.set(open_incidents)
        self._left.set(restarts_left)
        self._exhausted.set(int(exhausted))
        self._backlog.set(backlog)

    def open_files(self, files: OpenFiles | None) -> None:
        """Show the newest reading of the engine's open files; None is unknown."""
        self._open_files.newest = files

    def swept(self, size: int) -> None:
        """``size`` bytes of a terminated engine's shared memory were deleted."""
        self._swept.inc(size)

    def journal(self, writable: bool) -> None:
        """Show whether the last write to the journal succeeded."""
        self._journal_ok.set(int(writable))

    def journal_damaged(self, part: str) -> None:
        """``row`` or ``file``."""
        self._journal_damage.labels(part).inc()

    def config(self, valid: bool) -> None:
        """Show whether the newest configuration file is in use."""
        self._config_ok.set(int(valid))

    def out_of_service(self, reasons: Collection[str]) -> None:
        """Show for which reasons the pod is kept unready."""
        for reason in UNREADY_REASONS:
            self._out_of_service.labels(reason).set(int(reason in reasons))

    def text(self) -> bytes:
        """Everything in Prometheus' text format, for ``/metrics``."""
        return generate_latest(self.registry)

    # ---- one sample

    def _signals(self, known: Mapping[str, bool]) -> None:
        now = time.monotonic()
        for signal in {*known, *self._known_at}:
            is_known = known.get(signal, False)  # a device that went away is not known any more
            self._unknown.labels(signal).inc(int(not is_known))
            # Never known: its age counts from the first sample that looked for it.
            since = self._known_at.setdefault(signal, now)
            if is_known:
                self._known_at[signal] = since = now
            self._signal_age.labels(signal).set(now - since)

    def _budget(self, kind: str, budget: BudgetState | None, epoch: int) -> None:
        state = budget or BudgetState()
        _set(self._unexplained, kind, state.unexplained)
        _set(self._baseline, kind, state.baseline)
        _set(self._baseline_age, kind, state.age_s)
        _set(self._baseline_requests, kind, state.requests)
        _set(self._consumed, kind, state.consumed_ratio)
        _set(self._exhaustion, kind, state.exhaustion_s)
        if state.unexplained is not None:
            risen = self._ratchets[kind].rise(state.unexplained, epoch, self._bands[kind])
            self._growth.labels(kind).inc(risen)

    def _slow(self, assessment: Assessment) -> None:
        self._slow_rate.clear()
        for kind in ("host", "device"):
            slow = assessment.slow.get(kind)
            _set(self._slow_leak, kind, None if slow is None else int(slow.slow_leak))
            _set(self._slow_limit, kind, None if slow is None else slow.limit_s)
            if slow is not None and slow.bytes_per_s is not None:
                segment = slow.segment.value if slow.segment is not None else ""
                self._slow_rate.labels(kind, segment).set(slow.bytes_per_s)

    def _own_cost(self) -> None:
        for process, pid in (("supervisor", os.getpid()), ("launcher", os.getppid())):
            size = resident(pid)
            _set(self._rss, process, size.total if size is not None else None)
        spent = time.process_time()
        self._cpu.inc(max(0.0, spent - self._cpu_seen))
        self._cpu_seen = spent

    # ---- incidents

    def _count_wait(self, event: Event) -> None:
        incident = event.incident
        if incident.phase is IncidentPhase.AWAITING_SLOT:
            self._awaiting.setdefault(incident.name, incident.phase_since)
        elif incident.name in self._awaiting:
            self._waited.observe(max(0.0, event.at - self._awaiting.pop(incident.name)))

    def _count_steps(self, incident: Incident) -> None:
        for step in incident.timeline:
            if step.step not in REMEDIATIONS or step.outcome is StepOutcome.BEGUN:
                continue
            key = f"{incident.name}/{step.operation_id or step.step}"
            if key in self._counted:
                continue
            self._counted.add(key)
            self._remediations.labels(step.step, step.outcome.value).inc()
            if step.finished_at is not None:
                self._took.labels(step.step).observe(max(0.0, step.finished_at - step.time))
        if incident.ended:
            prefix = f"{incident.name}/"
            self._counted = {key for key in self._counted if not key.startswith(prefix)}

    def _count_end(self, incident: Incident) -> None:
        outcome = incident.reason.value if incident.reason else ""
        self._ended.labels(incident.kind.value, incident.phase.value, outcome).inc()
        kind = MEMORY_OF.get(incident.kind)
        if incident.returned_bytes and kind is not None:
            self._returned.labels(outcome, kind).inc(incident.returned_bytes)


def _larger(device: BudgetState | None, reserved: BudgetState | None) -> BudgetState | None:
    """Return the one that grew more: memory in use, or with what the allocator keeps unused."""
    known = [one for one in (device, reserved) if one is not None]
    return max(known, key=lambda one: one.unexplained or 0, default=None)


def _set(gauge: Gauge, kind: str, value: float | None) -> None:
    if value is not None:
        gauge.labels(kind).set(value)
        return
    try:
        gauge.remove(kind)
    except KeyError:
        return
