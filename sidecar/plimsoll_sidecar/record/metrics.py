"""The supervisor's Prometheus metrics. A value that is unknown is an absent series, never zero."""

from __future__ import annotations

import time

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from plimsoll_sidecar.detect.assessment import HOST_SEGMENTS, Assessment, BudgetState
from plimsoll_sidecar.govern.command import Event, Happening
from plimsoll_sidecar.govern.incident import Incident, StepOutcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REMEDIATIONS = frozenset({"Trim", "WorkerRestart", "EngineRestart", "PodReplace"})


class Metrics:
    """One registry for one supervisor. ``observe`` is called once for each assessment."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

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
        self._consumed = gauge(
            "memory_budget_consumed_ratio", "Share of the leak budget that is spent.", "kind"
        )
        self._exhaustion = gauge(
            "memory_budget_exhaustion_seconds", "Time until the leak budget is spent.", "kind"
        )
        self._growth = counter(
            "memory_unexplained_growth_bytes",
            "Unexplained growth, summed over epochs: what burn rates are made of.",
            "kind",
        )
        self._incidents = counter("incidents", "Incidents opened.", "kind")
        self._open = gauge("incidents_open", "Incidents that have not ended.")
        self._remediations = counter(
            "remediations", "Remediations by action and outcome.", "action", "outcome"
        )
        self._returned = counter(
            "remediation_returned_bytes", "Memory that remediations gave back."
        )
        self._signal_age = gauge(
            "signal_age_seconds", "Age of the newest sample with an answer of the engine."
        )
        self._left = gauge("restart_budget_remaining", "Restarts that are still allowed.")
        self._stalled = gauge("engine_stalled", "1 while work waits and no step is made.")
        self._rss = gauge("supervisor_resident_memory_bytes", "Resident memory.", "process")
        self._cpu = gauge("supervisor_cpu_seconds", "Processor time of the supervisor.")
        self._samples = counter("supervisor_samples", "Samples taken.")
        self._sample_s = gauge("supervisor_sample_seconds", "Duration of the newest sample.")
        self._journal_ok = gauge("supervisor_journal_writable", "0 while it cannot be written.")
        self._config_ok = gauge(
            "supervisor_config_valid", "0 while the newest configuration is not in use."
        )
        self._backlog = gauge("supervisor_publish_backlog", "Incidents on their way to the API.")
        self._last: dict[str, int] = {}
        self._counted: set[str] = set()
        self._answered_at: float | None = None
        self._process = psutil.Process()
        self.journal(True)
        self.config(True)

    def observe(self, assessment: Assessment, answered: bool, duration_s: float) -> None:
        """Shows an assessment and counts its growth."""
        self._samples.inc()
        self._sample_s.set(duration_s)
        if answered:
            self._answered_at = time.monotonic()
        if self._answered_at is not None:
            self._signal_age.set(time.monotonic() - self._answered_at)
        self._segment.clear()
        for segment, size in assessment.segments.items():
            kind = "host" if segment in HOST_SEGMENTS else "device"
            self._segment.labels(segment.value, kind).set(size)
        self._budget("host", assessment.host)
        self._budget("device", assessment.device)
        stalled = any(s.kind.value == "Stall" for s in assessment.suspicions)
        self._stalled.set(int(stalled))
        self._rss.labels("supervisor").set(self._process.memory_info().rss)
        parent = self._process.parent()
        if parent is not None:
            try:
                self._rss.labels("launcher").set(parent.memory_info().rss)
            except psutil.Error:
                self._rss.clear()
        times = self._process.cpu_times()
        self._cpu.set(times.user + times.system)

    def _budget(self, kind: str, budget: BudgetState | None) -> None:
        state = budget or BudgetState()
        for gauge, value in (
            (self._unexplained, state.unexplained),
            (self._baseline, state.baseline),
            (self._consumed, state.consumed_ratio),
            (self._exhaustion, state.exhaustion_s),
        ):
            if value is None:
                _absent(gauge, kind)
            else:
                gauge.labels(kind).set(value)
        if state.unexplained is not None:
            before = self._last.get(kind)
            self._growth.labels(kind).inc(
                max(0, state.unexplained - before) if before is not None else 0
            )
            self._last[kind] = state.unexplained

    def happened(self, events: list[Event]) -> None:
        """Counts incidents and the remediations that ended."""
        for event in events:
            if event.happening is Happening.OPENED:
                self._incidents.labels(event.incident.kind.value).inc()
            self._count_steps(event.incident)
            if event.incident.ended and event.incident.returned_bytes:
                self._returned.inc(event.incident.returned_bytes)

    def _count_steps(self, incident: Incident) -> None:
        for step in incident.timeline:
            if step.step not in REMEDIATIONS or step.outcome is StepOutcome.BEGUN:
                continue
            key = f"{incident.name}/{step.operation_id or step.step}"
            if key not in self._counted:
                self._counted.add(key)
                self._remediations.labels(step.step, step.outcome.value).inc()
        if incident.ended:
            prefix = f"{incident.name}/"
            self._counted = {key for key in self._counted if not key.startswith(prefix)}

    def standing(self, open_incidents: int, restarts_left: int, backlog: int) -> None:
        self._open.set(open_incidents)
        self._left.set(restarts_left)
        self._backlog.set(backlog)

    def journal(self, writable: bool) -> None:
        self._journal_ok.set(int(writable))

    def config(self, valid: bool) -> None:
        self._config_ok.set(int(valid))

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _absent(gauge: Gauge, kind: str) -> None:
    try:
        gauge.remove(kind)
    except KeyError:
        return
