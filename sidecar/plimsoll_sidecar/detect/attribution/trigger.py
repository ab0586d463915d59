"""What a growth follows: which of the engine's counters, or plain time.

Memory over a window is taken for ``size = base + each x counter + held x requests in flight``, with
neither factor below zero: non-negative least squares, once for each counter. The counter that
leaves the least is the hypothesis. Its confidence is its likelihood among all of them, for normal
residuals of which neighbours are alike: counters that moved together cannot be told apart, and then
this says so by being unsure. (One joint fit of all counters shares noise out among those that
matter little, and named the right one less often.)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from plimsoll_api.assessment import Trigger
from plimsoll_api.trace import SampleLoad
from plimsoll_api.units import format_bytes

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


UNITS = {
    "requests": "request",
    "aborts": "aborted request",
    "errors": "failed request",
    "images": "image",
    "audios": "audio clip",
    "prompt_tokens": "prompt token",
    "generated_tokens": "generated token",
    "distinct_prompts": "distinct prompt",
    "adapters": "adapter load",
    TIME: "hour, independent of load",
}
"""One event of each trigger, in words."""
MIN_POINTS = 16
"""Fewer averages than this over the window say nothing about ten counters."""
REFRESH_SHARE = 1 / 16
MAX_ALIKE = 0.95
MIN_STATED_CONFIDENCE = 0.5
"""A hypothesis that is more likely wrong than right gets no sentence."""

Column = list[float]


class TriggerWatch:
    """The trigger of a growth that stands.

    It is asked for after every sample and computed now and then: whenever the window has become
    longer by a sixteenth, or begins elsewhere.
    """

    def __init__(self) -> None:
        self._footprints = Footprints()
        self._since, self._at = math.inf, -math.inf
        self._found: Trigger | None = None

    def add(self, t: float, size: int, in_flight: int | None, load: SampleLoad) -> None:
        """Take in one sample: memory without what the ledger declares, and the load with it."""
        self._footprints.add(t, size, in_flight, load)

    def over(self, since: float, now: float) -> Trigger | None:
        """Return the trigger of the growth between these two times, in seconds."""
        fresh = since == self._since and now - self._at < REFRESH_SHARE * (self._at - since)
        if not fresh:
            self._since, self._at = since, now
            self._found = trigger(self._footprints.since(since))
        return self._found


def sentence(found: Trigger) -> str | None:
    """Return the hypothesis in words; None where it is too weak to be told."""
    if found.confidence < MIN_STATED_CONFIDENCE:
        return None
    size, unit = format_bytes(found.bytes_each), UNITS[found.counter]
    return f"about {size} per {unit} (hypothesis, confidence {found.confidence:.0%})"


def trigger(points: Sequence[Footprint]) -> Trigger | None:
    """Return what the growth over ``points`` follows; None where nothing explains it.

    A counter that is unknown somewhere in the window, or that did not move, is no candidate.
    """
    if len(points) < MIN_POINTS:
        return None
    window = _Window(points)
    fits = {
        name: window.fit(number) for number, name in enumerate(COUNTERS) if _moved(points, number)
    }
    growing = {name: fit for name, fit in fits.items() if fit.each > 0.0}
    if not growing:
        return None
    best = min(growing, key=lambda name: growing[name].squares)
    effective = growing[best].effective_points()
    odds = sum(_likelihood(growing[best], other, effective) for other in growing.values())
    return Trigger(best, growing[best].each, round(1.0 / odds, 3))


def _moved(points: Sequence[Footprint], number: int) -> bool:
    values = [p.counters[number] for p in points]
    return not any(map(math.isnan, values)) and values[-1] > values[0]


def _likelihood(best: _Fit, other: _Fit, effective: float) -> float:
    """Return the ratio of the maximum likelihoods of normal residuals, 1 for the best itself."""
    if other.squares <= best.squares:
        return 1.0
    return float((best.squares / other.squares) ** (effective / 2.0))


@dataclass(frozen=True, slots=True)
class _Fit:
    """``each`` is the counter's factor, ``squares`` the sum of the squared residuals."""

    each: float
    residuals: Column
    squares: float

    def effective_points(self) -> float:
        """Residuals that are like their neighbour count as fewer: n (1 - r) / (1 + r)."""
        if self.squares <= 0.0:
            return float(len(self.residuals))
        alike = sum(a * b for a, b in pairwise(self.residuals)) / self.squares
        alike = min(MAX_ALIKE, max(0.0, alike))
        return len(self.residuals) * (1.0 - alike) / (1.0 + alike)


class _Window:
    """The points of one window as centred columns, each row scaled by the root of its weight."""

    def __init__(self, points: Sequence[Footprint]) -> None:
        self._points = points
        self._weights = [p.weight for p in points]
        self._sizes = self._centred([p.size for p in points])
        loads = [p.load for p in points if p.load is not None]
        known = len(loads) == len(points)
        self._load = self._centred(loads if known else [0.0] * len(points))

    def fit(self, number: int) -> _Fit:
        """Return the best non-negative factors of one counter and of the requests in flight."""
        x, load, y = (
            self._centred([p.counters[number] for p in self._points]),
            self._load,
            self._sizes,
        )
        xx, ll, xl, xy, ly = _dot(x, x), _dot(load, load), _dot(x, load), _dot(x, y), _dot(load, y)
        determinant = xx * ll - xl * xl
        each, held = max(0.0, xy / xx) if xx > 0.0 else 0.0, 0.0
        if determinant > 1e-9 * xx * ll:
            both = (ll * xy - xl * ly) / determinant, (xx * ly - xl * xy) / determinant
            if min(both) >= 0.0:
                each, held = both
            elif both[0] < 0.0:
                each, held = 0.0, max(0.0, ly / ll)
        rest = [c - each * a - held * b for a, b, c in zip(x, load, y, strict=True)]
        return _Fit(each, rest, _dot(rest, rest))

    def _centred(self, values: Sequence[float]) -> Column:
        mean = _dot(values, self._weights) / sum(self._weights)
        return [(v - mean) * math.sqrt(w) for v, w in zip(values, self._weights, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))
