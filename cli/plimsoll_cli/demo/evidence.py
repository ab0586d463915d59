"""From what was recorded to figures. Pure: incidents, trace and replies in, numbers out.

Memory is read from the trace with the detector's own choice of fields. The baseline is measured
while the fresh service is idle, before the first request; the memory after the cure while it is
idle again, in the new epoch, after the last request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from plimsoll_api.incident_record import IncidentRecord, Reason, StepOutcome
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.trace import Sample
from plimsoll_cli.demo.streams import End, Reply
from plimsoll_cli.figures import percentile
from plimsoll_cli.local import traces

RETURNED_WITHIN = 0.1
"""Memory is back when at most this share of the growth is left above the baseline. It may be below:
a worker that was forked again lacks some megabytes of the first one."""
RESTART = Reason.WORKER_RESTART.value


@dataclass(frozen=True)
class Point:
    """Host memory of the replica at ``at`` (Unix seconds)."""

    at: float
    bytes: int


@dataclass(frozen=True)
class Odds:
    """The chance that host memory leaks, as the supervisor gave it at ``at`` (Unix seconds)."""

    at: float
    chance: float


@dataclass(frozen=True)
class Times:
    """Unix seconds: between which samples the replica was idle before and after the traffic."""

    idle_from: float
    traffic_from: float
    traffic_to: float
    idle_to: float


@dataclass(frozen=True)
class DeviceBytes:
    """What torch holds on the devices, exact, idle before and after; None where unknown."""

    before: int | None = None
    after: int | None = None


@dataclass(frozen=True)
class Observed:
    """Everything that the demo saw."""

    incidents: Sequence[IncidentRecord]
    memory: Sequence[Point]
    replies: Sequence[Reply]
    texts_different: int
    streams: int
    times: Times
    device: DeviceBytes = DeviceBytes()
    budget_bytes: int | None = None
    odds: Sequence[Odds] = ()


def memory_of(samples: Sequence[Sample], started_at: float) -> list[Point]:
    """Return the replica's host memory over time, as the detector sees it."""
    return [Point(started_at + t, size) for t, size in traces.host_memory(samples)]


def cured(incidents: Sequence[IncidentRecord]) -> IncidentRecord | None:
    """Find the first incident that a worker restart resolved."""
    found = [
        i
        for i in incidents
        if i.phase is IncidentPhase.RESOLVED and i.reason is Reason.WORKER_RESTART
    ]
    return min(found, key=lambda incident: incident.opened_at, default=None)


def restarts(incidents: Sequence[IncidentRecord]) -> list[tuple[float, float]]:
    """Begin and end of each worker restart that was carried out, Unix seconds."""
    return [
        (step.time, step.finished_at)
        for incident in incidents
        for step in incident.timeline
        if step.step == RESTART
        and step.outcome is StepOutcome.SUCCEEDED
        and step.finished_at is not None
    ]


def pauses(replies: Sequence[Reply], windows: Sequence[tuple[float, float]]) -> list[float]:
    """Return the longest gap between two chunks of each reply that a restart met, in seconds."""
    return [
        max(end - begin for begin, end in met)
        for window in windows
        for reply in replies
        if (met := gaps_in(reply, window))
    ]


def gaps_in(reply: Reply, window: tuple[float, float]) -> list[tuple[float, float]]:
    """Return begin and end of the gaps between chunks that overlap ``window``.

    There are none if the reply was not under way when the window began.
    """
    begin, end = window
    if not reply.sent_at <= begin <= reply.ended_at:
        return []
    pairs = zip(reply.chunks, reply.chunks[1:], strict=False)
    return [(a, b) for a, b in pairs if a <= end and b >= begin]


def idle_bytes(memory: Sequence[Point], begin: float, end: float) -> int | None:
    """Return the median of the samples between two times; None if there are none."""
    sizes = [point.bytes for point in memory if begin <= point.at <= end]
    return round(median(sizes)) if sizes else None


def figures(seen: Observed) -> dict[str, float | int | None]:
    """Compute the figures of the report; None where something could not be measured."""
    incident = cured(seen.incidents)
    windows = restarts(seen.incidents)
    met = pauses(seen.replies, windows)
    times = seen.times
    values: dict[str, float | int | None] = {
        "incidents_resolved_count": sum(i.phase is IncidentPhase.RESOLVED for i in seen.incidents),
        "worker_restarts_count": len(windows),
        "streams_count": seen.streams,
        "streams_broken_count": sum(reply.end is End.BROKEN for reply in seen.replies),
        "requests_count": sum(reply.end is not End.RUNNING for reply in seen.replies),
        "requests_failed_count": sum(reply.end is End.FAILED for reply in seen.replies),
        "texts_different_count": seen.texts_different,
        "streams_carried_count": len(met),
        "pause_p50_s": percentile(met, 0.5),
        "pause_p99_s": percentile(met, 0.99),
        "memory_baseline_bytes": idle_bytes(seen.memory, times.idle_from, times.traffic_from),
        "memory_after_bytes": idle_bytes(seen.memory, times.traffic_to, times.idle_to),
        "device_baseline_bytes": seen.device.before,
        "device_after_bytes": seen.device.after,
    }
    if incident is not None:
        values["growth_bytes"] = _growth(incident, values["memory_baseline_bytes"])
        values["returned_bytes"] = incident.returned_bytes
        before, base = incident.before_bytes, incident.baseline_bytes
        if seen.budget_bytes and before is not None and base is not None:
            values["budget_spent_at_restart_ratio"] = (before - base) / seen.budget_bytes
        if incident.ended_at is not None:
            values["detect_to_resolved_s"] = incident.ended_at - incident.opened_at
            if incident.confirmed_at is not None:
                values["detect_to_confirmed_s"] = incident.confirmed_at - incident.opened_at
            crossed = _crossing(seen, incident)
            if crossed is not None:
                values["crossing_to_resolved_s"] = incident.ended_at - crossed
    return values


def _crossing(seen: Observed, incident: IncidentRecord) -> float | None:
    """When memory first stood above the incident's baseline by more than the leak budget."""
    if incident.baseline_bytes is None or seen.budget_bytes is None:
        return None
    line = incident.baseline_bytes + seen.budget_bytes
    return next((point.at for point in seen.memory if point.bytes > line), None)


def _growth(incident: IncidentRecord, idle: int | float | None) -> int | None:
    """Memory at the begin of the restart, by the incident's evidence, less the idle baseline."""
    if incident.before_bytes is None or idle is None:
        return None
    return incident.before_bytes - int(idle)


def missing(values: dict[str, float | int | None]) -> list[str]:
    """List what keeps the demo from success, one line each; empty if it succeeded."""
    lines = []
    if not values["worker_restarts_count"] or "returned_bytes" not in values:
        lines.append("no incident was resolved by a worker restart")
    for key, what in (
        ("streams_broken_count", "streams broke"),
        ("requests_failed_count", "requests failed"),
        ("texts_different_count", "texts differ from the uninterrupted run"),
    ):
        if values[key]:
            lines.append(f"{values[key]} {what}")
    growth, base = values.get("growth_bytes"), values["memory_baseline_bytes"]
    after = values["memory_after_bytes"]
    if base is None or after is None:
        lines.append("the memory before or after could not be measured")
    elif growth is not None and after - base > RETURNED_WITHIN * growth:
        lines.append(
            f"memory is {after - base} bytes above the baseline, more than"
            f" {RETURNED_WITHIN:.0%} of the growth of {growth} bytes"
        )
    before, now = values["device_baseline_bytes"], values["device_after_bytes"]
    if before is not None and now is not None and before != now:
        lines.append(f"device memory is {now} bytes and was {before} before")
    return lines
