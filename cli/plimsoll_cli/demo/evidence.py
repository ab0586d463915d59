"""Compute the results of the demo from incidents, trace and replies, without I/O.

Host memory is computed from the trace as in the detector. The memory of the idle engine after the
last request is compared with that before the first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from plimsoll_api.incident_record import IncidentRecord, Reason, StepOutcome
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.trace import Sample
from plimsoll_cli.demo.streams import Reply, ReplyState
from plimsoll_cli.figures import compute_percentile
from plimsoll_cli.local import traces

MAX_REMAINING_GROWTH_SHARE = 0.1
WORKER_RESTART_STEP = Reason.WORKER_RESTART.value


@dataclass(frozen=True)
class MemorySample:
    """Host memory of the replica at the Unix time ``at``."""

    at: float
    bytes: int


@dataclass(frozen=True)
class LeakProbability:
    """Probability that host memory leaks, at the Unix time ``at``."""

    at: float
    probability: float


@dataclass(frozen=True)
class PhaseTimes:
    """Start and end of the traffic, and of the idle phases before and after it, in Unix seconds."""

    idle_from: float
    traffic_from: float
    traffic_to: float
    idle_to: float


@dataclass(frozen=True)
class DeviceBytes:
    """PyTorch's device memory in bytes before and after the traffic; None if unknown."""

    before: int | None = None
    after: int | None = None


@dataclass(frozen=True)
class Observations:
    """Everything that was observed during a demo."""

    incidents: Sequence[IncidentRecord]
    memory: Sequence[MemorySample]
    replies: Sequence[Reply]
    texts_different: int
    streams: int
    times: PhaseTimes
    device: DeviceBytes = DeviceBytes()
    budget_bytes: int | None = None
    probabilities: Sequence[LeakProbability] = ()


def compute_host_memory(samples: Sequence[Sample], started_at: float) -> list[MemorySample]:
    """Return the replica's host memory over time, computed as in the detector."""
    return [MemorySample(started_at + t, size) for t, size in traces.compute_host_memory(samples)]


def find_cured_incident(incidents: Sequence[IncidentRecord]) -> IncidentRecord | None:
    """Return the first incident that a worker restart resolved; None if there is none."""
    found = [
        i
        for i in incidents
        if i.phase is IncidentPhase.RESOLVED and i.reason is Reason.WORKER_RESTART
    ]
    return min(found, key=lambda incident: incident.opened_at, default=None)


def find_restarts(incidents: Sequence[IncidentRecord]) -> list[tuple[float, float]]:
    """Return the start and end of each successful worker restart, in Unix seconds."""
    return [
        (step.time, step.finished_at)
        for incident in incidents
        for step in incident.timeline
        if step.step == WORKER_RESTART_STEP
        and step.outcome is StepOutcome.SUCCEEDED
        and step.finished_at is not None
    ]


def find_pauses(replies: Sequence[Reply], windows: Sequence[tuple[float, float]]) -> list[float]:
    """Return the longest pause in seconds of each reply that a restart interrupted.

    ``windows`` are the start and end of each restart. A reply occurs once for each restart.
    """
    return [
        max(end - begin for begin, end in met)
        for window in windows
        for reply in replies
        if (met := find_overlapping_gaps(reply, window))
    ]


def find_overlapping_gaps(reply: Reply, window: tuple[float, float]) -> list[tuple[float, float]]:
    """Return the start and end of each gap between chunks that overlaps ``window``.

    The list is empty if the reply was not running at the start of ``window``.
    """
    begin, end = window
    if not reply.sent_at <= begin <= reply.ended_at:
        return []
    pairs = zip(reply.chunks, reply.chunks[1:], strict=False)
    return [(a, b) for a, b in pairs if a <= end and b >= begin]


def compute_idle_bytes(memory: Sequence[MemorySample], begin: float, end: float) -> int | None:
    """Return the median of the samples from ``begin`` to ``end`` in bytes; None without samples."""
    sizes = [point.bytes for point in memory if begin <= point.at <= end]
    return round(median(sizes)) if sizes else None


def compute_results(observed: Observations) -> dict[str, float | int | None]:
    """Return the results of the demo by name; unknown results are None."""
    incident = find_cured_incident(observed.incidents)
    windows = find_restarts(observed.incidents)
    met = find_pauses(observed.replies, windows)
    times = observed.times
    values: dict[str, float | int | None] = {
        "incidents_resolved_count": sum(
            i.phase is IncidentPhase.RESOLVED for i in observed.incidents
        ),
        "worker_restarts_count": len(windows),
        "streams_count": observed.streams,
        "streams_broken_count": sum(reply.state is ReplyState.BROKEN for reply in observed.replies),
        "requests_count": sum(reply.state is not ReplyState.RUNNING for reply in observed.replies),
        "requests_failed_count": sum(
            reply.state is ReplyState.FAILED for reply in observed.replies
        ),
        "texts_different_count": observed.texts_different,
        "streams_carried_count": len(met),
        "pause_p50_s": compute_percentile(met, 0.5),
        "pause_p99_s": compute_percentile(met, 0.99),
        "memory_baseline_bytes": compute_idle_bytes(
            observed.memory, times.idle_from, times.traffic_from
        ),
        "memory_after_bytes": compute_idle_bytes(observed.memory, times.traffic_to, times.idle_to),
        "device_baseline_bytes": observed.device.before,
        "device_after_bytes": observed.device.after,
    }
    if incident is not None:
        values["growth_bytes"] = _compute_growth(incident, values["memory_baseline_bytes"])
        values["returned_bytes"] = incident.returned_bytes
        before, base = incident.before_bytes, incident.baseline_bytes
        if before is not None and base is not None:
            values["judged_growth_bytes"] = before - base
            if observed.budget_bytes:
                values["budget_spent_at_restart_ratio"] = (before - base) / observed.budget_bytes
        if incident.ended_at is not None:
            values["detect_to_resolved_s"] = incident.ended_at - incident.opened_at
            if incident.confirmed_at is not None:
                values["detect_to_confirmed_s"] = incident.confirmed_at - incident.opened_at
            crossed = _find_budget_exceeded_time(observed, incident)
            if crossed is not None:
                values["crossing_to_resolved_s"] = incident.ended_at - crossed
    return values


def _find_budget_exceeded_time(observed: Observations, incident: IncidentRecord) -> float | None:
    if incident.baseline_bytes is None or observed.budget_bytes is None:
        return None
    line = incident.baseline_bytes + observed.budget_bytes
    return next((point.at for point in observed.memory if point.bytes > line), None)


# From the idle baseline to the restart; None if unknown.
def _compute_growth(incident: IncidentRecord, idle_bytes: int | float | None) -> int | None:
    if incident.before_bytes is None or idle_bytes is None:
        return None
    return incident.before_bytes - int(idle_bytes)


def find_failures(values: dict[str, float | int | None]) -> list[str]:
    """Return the reasons why the demo failed; empty if it succeeded."""
    lines = []
    if not values["worker_restarts_count"] or "returned_bytes" not in values:
        lines.append("no worker restart resolved an incident")
    for key, what in (
        ("streams_broken_count", "streams broke"),
        ("requests_failed_count", "requests failed"),
        ("texts_different_count", "replies differ from the text of the run without the leak"),
    ):
        if values[key]:
            lines.append(f"{values[key]} {what}")
    growth, base = values.get("growth_bytes"), values["memory_baseline_bytes"]
    after = values["memory_after_bytes"]
    if base is None or after is None:
        lines.append("memory could not be measured before or after the traffic")
    elif growth is not None and after - base > MAX_REMAINING_GROWTH_SHARE * growth:
        lines.append(
            f"after the traffic, memory is {after - base} bytes above the baseline, which is more"
            f" than {MAX_REMAINING_GROWTH_SHARE:.0%} of the growth of {growth} bytes"
        )
    before, now = values["device_baseline_bytes"], values["device_after_bytes"]
    if before is not None and now is not None and before != now:
        lines.append(
            f"device memory is {now} bytes after the traffic, but was {before} bytes before it"
        )
    return lines
