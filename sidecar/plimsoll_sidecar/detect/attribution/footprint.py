"""Memory and the engine's counters over time, kept small however long an epoch lasts.

A history whose resolution fades with age: what happened ``a`` seconds ago is kept in averages over
at most ``a / RESOLUTION`` seconds. Size and counters are averaged together, so that memory that is
a sum of its triggers stays that same sum.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll_api.trace import SampleLoad

TIME = "time"
FIELDS = {
    "requests": "requests_total",
    "aborts": "aborted_total",
    "errors": "errors_total",
    "images": "images_total",
    "audios": "audios_total",
    "prompt_tokens": "prompt_tokens_total",
    "generated_tokens": "generation_tokens_total",
    "distinct_prompts": "distinct_prompts_total",
    "adapters": "adapters_total",
}
"""What may trigger a growth, by the counter of the engine's load that says how often it was."""
COUNTERS = (*FIELDS, TIME)
RESOLUTION = 48
SLACK = 64
"""Points that gather before the older ones are merged."""
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """An average over some samples (``weight`` of them) around ``t``.

    ``size`` is memory without what the ledger declares, in bytes. ``counters`` are those of
    :data:`COUNTERS`; one that was unknown is NaN, and an unknown ``load`` is None.
    """

    t: float
    weight: float
    size: float
    load: float | None
    counters: Sequence[float]


class Footprints:
    """The history of one kind of memory within one epoch."""

    def __init__(self) -> None:
        # Each row: begin, weight, t, size, load, counters; arrays take a third of what tuples do.
        self._rows: list[array[float]] = []
        self._limit = SLACK

    def add(self, t: float, size: int, in_flight: int | None, load: SampleLoad) -> None:
        """Take in one sample: ``size`` in bytes, and the engine's load of the same moment."""
        values = [getattr(load, field) for field in FIELDS.values()]
        counters = [math.nan if value is None else float(value) for value in values]
        row = (t, 1.0, t, size, math.nan if in_flight is None else in_flight, *counters, t / _HOUR)
        self._rows.append(array("d", row))
        if len(self._rows) >= self._limit:
            self._merge(t)
            self._limit = len(self._rows) + SLACK

    def since(self, t: float) -> list[Footprint]:
        """Return the averages that begin at ``t`` or later, oldest first."""
        return [
            Footprint(
                t=row[2],
                weight=row[1],
                size=row[3],
                load=None if math.isnan(row[4]) else row[4],
                counters=row[5:],
            )
            for row in self._rows
            if row[0] >= t
        ]

    def _merge(self, now: float) -> None:
        kept: list[array[float]] = []
        for row in self._rows:
            if kept and row[2] - kept[-1][0] <= (now - row[2]) / RESOLUTION:
                kept[-1] = _average(kept[-1], row)
            else:
                kept.append(row)
        self._rows = kept


def _average(earlier: array[float], later: array[float]) -> array[float]:
    one, other = earlier[1], later[1]
    share = other / (one + other)
    mean = [a + (b - a) * share for a, b in zip(earlier[2:], later[2:], strict=True)]
    return array("d", (earlier[0], one + other, *mean))
