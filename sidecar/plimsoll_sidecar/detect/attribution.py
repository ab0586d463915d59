"""What explains a growth: the engine's ledger, or a counter that it follows.

Growth inside bounds that the ledger declares is explained. The rest follows one of the engine's
counters, or plain time.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from plimsoll_api.assessment import Trigger
from plimsoll_api.trace import LedgerLine, SampleLoad
from plimsoll_api.units import format_bytes

MAX_OWNERS = 64
"""Owners of one kind that are followed. Engines have about ten; later ones explain nothing."""


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """One owner, as it is kept.

    Bytes: ``bound`` is the largest that it declared, and ``earlier`` what of its memory was there
    before it was seen: this explains no growth.
    """

    bound: int
    earlier: int = 0


class Account:
    """What the owners of one kind explain, from one ledger to the next.

    An owner may be declared late: vLLM's probe sees the key-value cache only once the engine's loop
    runs, and a busy process may say nothing for a while. Its memory was there all the while. So an
    owner that appears explains no more than the growth that nothing explains by then, and the same
    holds for what it adds while it is away, or when its bound rises. While it is away, or declares
    less than its largest bound (one of several ranks is silent), the least that it ever held
    counts.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.owners: dict[str, Owner] = {}
        self._least: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._whole: set[str] = set()

    def resume(self, owners: Mapping[str, Owner] | None) -> None:
        """Go on from what :attr:`owners` gave in this epoch.

        None is an account of a release that kept none, in which all that was declared counted.
        """
        if owners is None:
            owners = {name: Owner(one.bound) for name, one in self.owners.items()}
        self.owners = {**self.owners, **owners}

    def declared(self, ledger: Sequence[LedgerLine], grown: Callable[[int], int]) -> int:
        """Return the bytes that the owners explain, comparable with every other answer.

        ``grown`` says what nothing explains of the growth so far, where so many bytes are declared.
        """
        sizes = bounded(ledger, self.kind)
        whole = self._whole_of(sizes)
        for name in whole:
            size = sizes[name][0]
            self._least[name] = min(size, self._least.get(name, size))
        fresh = {name: sizes[name] for name in whole if self._is_fresh(name, sizes[name][1])}
        known = sum(
            self._before(name, sizes[name][0])
            if name in fresh
            else self._held(name, sizes.get(name, (0, 0))[0], name in whole)
            for name in self.owners
        )
        total = known - sum(one.earlier for one in self.owners.values())
        left = max(0, grown(total)) if fresh else 0
        for name, (size, bound) in sorted(fresh.items()):
            rise = size - self._before(name, size)
            explained = max(0, min(rise, left))
            left, total = left - explained, total + min(rise, explained)
            earlier = self.owners[name].earlier if name in self.owners else 0
            self.owners[name] = Owner(bound, earlier + max(0, rise) - explained)
        for name in whole:
            size = sizes[name][0]
            self._most[name] = max(size, self._most.get(name, size))
        self._whole = whole
        return total

    def _whole_of(self, sizes: Mapping[str, tuple[int, int]]) -> set[str]:
        """Return the owners whose bound has not shrunk, and new ones while there is room.

        New ones come in the order of the ledger.
        """
        known = {
            n
            for n, (_, bound) in sizes.items()
            if n in self.owners and bound >= self.owners[n].bound
        }
        fresh = [name for name in sizes if name not in self.owners]
        return known | set(fresh[: max(0, MAX_OWNERS - len(self.owners))])

    def _is_fresh(self, name: str, bound: int) -> bool:
        """Whether it is here for the first time, or again, or has another bound."""
        return name not in self._whole or bound > self.owners[name].bound

    def _before(self, name: str, size: int) -> int:
        """Return what counted of a fresh owner before.

        One that a predecessor of this detector knew held as much then as it does now.
        """
        return self._most.get(name, size) if name in self.owners else 0

    def _held(self, name: str, size: int, whole: bool) -> int:
        return size if whole else max(size, self._least.get(name, 0))


def bounded(ledger: Sequence[LedgerLine], kind: str) -> dict[str, tuple[int, int]]:
    """Bytes, up to the bound, and the bound of each owner of ``kind``.

    An owner without a bound explains nothing: whoever cannot say how much it will ever hold cannot
    be told from a leak.
    """
    return {
        line.owner: (max(0, min(line.bytes, line.bound)), line.bound)
        for line in ledger
        if line.kind == kind and line.bound is not None
    }


def out_of_bounds(ledger: Sequence[LedgerLine], kind: str) -> list[str]:
    """One line of evidence for each owner that holds more than it declared."""
    return [
        f"owner {line.owner} holds {line.bytes} bytes, more than its declared bound of {line.bound}"
        for line in ledger
        if line.kind == kind and line.bound is not None and line.bytes > line.bound
    ]


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
ROW = 5 + len(COUNTERS)
CAPACITY = 768
"""Rows: ``RESOLUTION`` for each e-fold of the time, and the slack. A year needs some 710."""
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
    """The history of one kind of memory within one epoch.

    Its rows are one array of the size that a year needs, taken with the first sample: their number
    grows with the logarithm of the time, and small pieces would leave holes in the heap for years.
    """

    def __init__(self) -> None:
        # Each row: begin, weight, t, size, load, counters.
        self._rows = array("d")
        self._count, self._limit = 0, SLACK

    def add(self, t: float, size: int, in_flight: int | None, load: SampleLoad) -> None:
        """Take in one sample: ``size`` in bytes, and the engine's load of the same moment."""
        values = [getattr(load, field) for field in FIELDS.values()]
        counters = [math.nan if value is None else float(value) for value in values]
        row = (t, 1.0, t, size, math.nan if in_flight is None else in_flight, *counters, t / _HOUR)
        if not self._rows:
            self._rows = array("d", bytes(8 * ROW * CAPACITY))
        # Beyond its end, the array grows.
        self._rows[self._count * ROW : (self._count + 1) * ROW] = array("d", row)
        self._count += 1
        if self._count >= self._limit:
            self._merge(t)
            self._limit = self._count + SLACK

    def since(self, t: float) -> list[Footprint]:
        """Return the averages that begin at ``t`` or later, oldest first."""
        rows = (self._row(number) for number in range(self._count))
        return [
            Footprint(
                t=row[2],
                weight=row[1],
                size=row[3],
                load=None if math.isnan(row[4]) else row[4],
                counters=row[5:],
            )
            for row in rows
            if row[0] >= t
        ]

    def _row(self, number: int) -> array[float]:
        return self._rows[number * ROW : (number + 1) * ROW]

    def _merge(self, now: float) -> None:
        kept = 0
        for number in range(self._count):
            row = self._row(number)
            if kept:
                last = self._row(kept - 1)
                if row[2] - last[0] <= (now - row[2]) / RESOLUTION:
                    self._rows[(kept - 1) * ROW : kept * ROW] = _average(last, row)
                    continue
            self._rows[kept * ROW : (kept + 1) * ROW] = row
            kept += 1
        self._count = kept


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
