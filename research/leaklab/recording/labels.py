"""The labels of a recording: what was injected into it, as the injector counted it. Pure.

A recording's first sample is taken when its header is written, which tells the time of day.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from leaklab.recording.run import Fault, Injection, Run
from plimsoll_api.assessment import DEVICE_SEGMENTS
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.times import parse_rfc3339
from plimsoll_api.trace import Header, Sample


class Leak(msgspec.Struct):
    """One leak; times are the trace's. ``counted_bytes`` is all that was leaked."""

    start_t: float
    end_t: float
    kind: str
    segment: str
    rate_bytes_per_s: float
    mechanism: str
    counted_bytes: int


class Labels(msgspec.Struct):
    """``negative`` where nothing is wrong with the run."""

    leaks: list[Leak]
    negative: bool
    note: str


def labels(run: Run, header: Header, samples: Sequence[Sample], counted: Iterable[str]) -> Labels:
    """Return the labels of a recording. ``counted`` are the injector's lines.

    ValueError where a leak was to be injected and none was counted.
    """
    if not run.leaks:
        return Labels([], True, note(run))
    if isinstance(run.cause, Fault):
        points = _of_status(run.cause, samples)
    else:
        began = parse_rfc3339(header.started_at) - samples[0].t
        rows = [json.loads(line) for line in counted if line.strip()]
        points = [(float(row["at"]) - began, int(row["bytes"])) for row in rows]
    last = samples[-1].t
    points = [(t, size) for t, size in points if t <= last]
    if not points or points[-1][1] <= 0:
        raise ValueError(f"{run.name}: nothing was leaked while it was recorded")
    end, size = points[-1]
    start = max((t for t, taken in points if taken == 0), default=points[0][0])
    assert run.cause is not None
    segment = run.cause.segment
    assert segment is not None
    kind = IncidentKind.DEVICE_GROWTH if segment in DEVICE_SEGMENTS else IncidentKind.HOST_GROWTH
    leak = Leak(
        round(start, 1), round(end, 1), kind.value, segment.value,
        round(size / max(end - start, 1.0), 1), run.mechanism, size,
    )  # fmt: skip
    return Labels([leak], False, note(run))


def _of_status(fault: Fault, samples: Iterable[Sample]) -> list[tuple[float, int]]:
    """Times and bytes of a fault of our engine, by the engine's own counter of its cause."""
    known = [(s.t, getattr(s.load, fault.counter)) for s in samples]
    counts = [(t, int(count)) for t, count in known if count is not None]
    return [(t, (count - counts[0][1]) * fault.bytes) for t, count in counts]


def note(run: Run) -> str:
    """What was done, in words."""
    cause: Any = run.cause
    if cause is None:
        return f"healthy: {run.mechanism}"
    if isinstance(cause, Fault):
        return f"the engine's fault {cause.text}" + ("" if run.leaks else ": it is healthy")
    assert isinstance(cause, Injection)
    where = "the frontend" if cause.frontend else "the worker" if cause.worker else "the core"
    if not run.leaks:
        most = "" if cause.bound is None else f", and holds at most {cause.bound} bytes"
        return f"{run.mechanism} in {where}: it is healthy{most}"
    unit = cause.driver.removesuffix("s")
    beside = f", beside {cause.beside}" if cause.beside else ""
    return f"{run.mechanism} in {where}: {cause.bytes} bytes per {unit}, {cause.shape}{beside}"


def plain(made: Labels) -> dict[str, Any]:
    """Return the labels as JSON takes them."""
    found: dict[str, Any] = msgspec.to_builtins(made)
    return found
