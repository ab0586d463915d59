"""Explanations of growth: the engine's ledger, or a counter that the growth follows.

Growth within declared bounds is explained. The rest follows one of the engine's counters, or time.

The model of memory over a window is ``size = base + each x counter + held x requests in flight``,
fitted for each counter by non-negative least squares. The counter with the smallest residuals is
the hypothesis. Its confidence is its likelihood among all counters, for normal residuals with
autocorrelation. Counters that moved together cannot be told apart, and the confidence is then low.
A joint fit of all counters spreads noise over those that matter little, and named the right one
less often.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from plimsoll_api.assessment import Trigger
from plimsoll_api.trace import LedgerLine, RoleRss, SampleLoad
from plimsoll_api.units import format_bytes

MAX_OWNERS = 64
"""Owners of one kind. Engines have about ten; later ones explain nothing."""


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """One owner of declared memory, as the checkpoint stores it, in bytes.

    ``bound`` is the largest that it declared. ``earlier`` is the part of its memory that it held
    before it was first seen, which explains no growth.
    """

    bound: int
    earlier: int = 0


class Account:
    """The memory that the owners of one kind explain, from one ledger to the next.

    An owner may appear late. vLLM's probe sees the key-value cache only once the engine's loop
    runs, and a busy process may report nothing for a while, though its memory exists. So a new
    owner explains at most the growth that is still unexplained. The same holds for memory that it
    adds while it is absent, or when its bound rises. While an owner is absent or declares less than
    its largest bound (one of several ranks is silent), the minimum that it ever held counts.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.owners: dict[str, Owner] = {}
        self._least: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._complete: set[str] = set()

    def resume(self, owners: Mapping[str, Owner] | None) -> None:
        """Continue from the :attr:`owners` of an earlier detector in this epoch.

        None comes from a release that stored none: all declared memory counted then.
        """
        if owners is None:
            owners = {name: Owner(owner.bound) for name, owner in self.owners.items()}
        self.owners = {**self.owners, **owners}

    def declared(self, ledger: Sequence[LedgerLine], growth: Callable[[int], int]) -> int:
        """Return the bytes that the owners explain, comparable with all other results.

        ``growth`` returns the unexplained growth for a number of explained bytes.
        """
        sizes = bounded(ledger, self.kind)
        complete = self._complete_owners(sizes)
        for name in complete:
            size = sizes[name][0]
            self._least[name] = min(size, self._least.get(name, size))
        new = {
            name: sizes[name]
            for name in complete
            if name not in self._complete or sizes[name][1] > self.owners[name].bound
        }
        total = -sum(owner.earlier for owner in self.owners.values())
        for name in self.owners:
            size = sizes.get(name, (0, 0))[0]
            if name in new:
                total += self._before(name, size)
            else:
                total += size if name in complete else max(size, self._least.get(name, 0))
        left = max(0, growth(total)) if new else 0
        for name, (size, bound) in sorted(new.items()):
            rise = size - self._before(name, size)
            explained = max(0, min(rise, left))
            left, total = left - explained, total + min(rise, explained)
            earlier = self.owners[name].earlier if name in self.owners else 0
            self.owners[name] = Owner(bound, earlier + max(0, rise) - explained)
        for name in complete:
            size = sizes[name][0]
            self._most[name] = max(size, self._most.get(name, size))
        self._complete = complete
        return total

    def _complete_owners(self, sizes: Mapping[str, tuple[int, int]]) -> set[str]:
        """Return the owners whose bound has not shrunk, and new ones up to :data:`MAX_OWNERS`."""
        new = [name for name in sizes if name not in self.owners]
        complete = {
            name
            for name, (_, bound) in sizes.items()
            if name in self.owners and bound >= self.owners[name].bound
        }
        return complete | set(new[: max(0, MAX_OWNERS - len(self.owners))])

    def _before(self, name: str, size: int) -> int:
        """Return the bytes of a new owner that counted before.

        An owner that only an earlier detector saw held as much then as it does now.
        """
        return self._most.get(name, size) if name in self.owners else 0


def bounded(ledger: Sequence[LedgerLine], kind: str) -> dict[str, tuple[int, int]]:
    """Return the bytes, up to the bound, and the bound of each owner of ``kind``.

    An owner without a bound explains nothing: it cannot be distinguished from a leak.
    """
    return {
        line.owner: (max(0, min(line.bytes, line.bound)), line.bound)
        for line in ledger
        if line.kind == kind and line.bound is not None
    }


def exceeded_bounds(ledger: Sequence[LedgerLine], kind: str) -> list[str]:
    """Return a sentence for each owner that holds more than it declared."""
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
"""Possible triggers of growth, and the counter of :class:`SampleLoad` for each."""
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
COUNTERS = (*FIELDS, TIME)
RESOLUTION = 48
SLACK = 64
"""Rows that are collected before the older ones are merged."""
ROW = 5 + len(COUNTERS)
CAPACITY = 768
"""Rows: :data:`RESOLUTION` for each e-fold of the time, and the slack. A year needs about 710."""
MIN_POINTS = 16
"""Fewer averages than this say too little about ten counters."""
REFRESH_SHARE = 1 / 16
MAX_CORRELATION = 0.95
MIN_STATED_CONFIDENCE = 0.5
"""A hypothesis that is more likely wrong than right is not stated."""
MAX_PROCESSES = 16
"""Watches of roles. Each takes 92 KiB, and an engine has a handful of roles."""
_HOUR_S = 3600.0
Column = list[float]


@dataclass(frozen=True, slots=True)
class Footprint:
    """An average of ``weight`` samples around ``t``.

    ``size`` is the memory without declared memory, in bytes. ``counters`` are those of
    :data:`COUNTERS`, NaN if unknown. An unknown ``load`` is None.
    """

    t: float
    weight: float
    size: float
    load: float | None
    counters: Sequence[float]


class Footprints:
    """The history of one kind of memory within one epoch.

    The number of rows grows with the logarithm of the time. All rows are in one array of the size
    for a year, allocated with the first sample: small pieces would fragment the heap for years.
    """

    def __init__(self) -> None:
        # Each row: start, weight, t, size, load, counters.
        self._rows = array("d")
        self._count, self._limit = 0, SLACK

    def add(self, t: float, size: int, in_flight: int | None, load: SampleLoad) -> None:
        """Add a sample: ``size`` in bytes, and the engine's load at the same time."""
        values = [getattr(load, field) for field in FIELDS.values()]
        counters = [math.nan if value is None else float(value) for value in values]
        requests = math.nan if in_flight is None else in_flight
        if not self._rows:
            self._rows = array("d", bytes(8 * ROW * CAPACITY))
        # The array grows if this is beyond its end.
        self._set(self._count, array("d", (t, 1.0, t, size, requests, *counters, t / _HOUR_S)))
        self._count += 1
        if self._count >= self._limit:
            self._merge(t)
            self._limit = self._count + SLACK

    def since(self, t: float) -> list[Footprint]:
        """Return the averages that start at ``t`` or later, oldest first."""
        return [
            Footprint(row[2], row[1], row[3], None if math.isnan(row[4]) else row[4], row[5:])
            for row in map(self._row, range(self._count))
            if row[0] >= t
        ]

    def _row(self, number: int) -> array[float]:
        return self._rows[number * ROW : (number + 1) * ROW]

    def _set(self, number: int, row: array[float]) -> None:
        self._rows[number * ROW : (number + 1) * ROW] = row

    def _merge(self, now: float) -> None:
        count = 0
        for row in map(self._row, range(self._count)):
            last = self._row(count - 1) if count else None
            if last is not None and row[2] - last[0] <= (now - row[2]) / RESOLUTION:
                self._set(count - 1, _average(last, row))
            else:
                self._set(count, row)
                count += 1
        self._count = count


def _average(earlier: array[float], later: array[float]) -> array[float]:
    weight = earlier[1] + later[1]
    share = later[1] / weight
    mean = [a + (b - a) * share for a, b in zip(earlier[2:], later[2:], strict=True)]
    return array("d", (earlier[0], weight, *mean))


class TriggerWatch:
    """The trigger of a suspected growth.

    It is computed again once the window is longer by :data:`REFRESH_SHARE`, or starts elsewhere.
    """

    def __init__(self) -> None:
        self._footprints = Footprints()
        self._since, self._computed_at = math.inf, -math.inf
        self._trigger: Trigger | None = None

    def add(self, t: float, size: int, in_flight: int | None, load: SampleLoad) -> None:
        """Add a sample: memory without declared memory in bytes, and the load at the same time."""
        self._footprints.add(t, size, in_flight, load)

    def trigger(self, since: float, now: float) -> Trigger | None:
        """Return the trigger of the growth between these two times, in seconds."""
        window_s = self._computed_at - self._since
        if since != self._since or now - self._computed_at >= REFRESH_SHARE * window_s:
            self._since, self._computed_at = since, now
            self._trigger = trigger(self._footprints.since(since))
        return self._trigger


class ProcessTriggers:
    """The triggers of the processes of an engine, by role.

    The size of a process is what its allocators have in use, if it reports that: memory that they
    keep is no growth, and a trim frees it. Otherwise it is its anonymous memory.
    """

    def __init__(self) -> None:
        self._watches: dict[tuple[str, bool], TriggerWatch] = {}

    def add(
        self, t: float, processes: Iterable[RoleRss], in_flight: int | None, load: SampleLoad
    ) -> None:
        """Add a sample. A role with an unreadable process is left out."""
        roles: dict[str, list[RoleRss]] = {}
        for one in processes:
            roles.setdefault(one.role, []).append(one)
        for role, members in roles.items():
            used = [one.in_use for one in members if one.in_use is not None]
            accounted = len(used) == len(members)
            sizes = used if accounted else [one.anonymous or 0 for one in members]
            key, is_known = (role, accounted), accounted or all(one.rss_anon for one in members)
            if is_known and (key in self._watches or len(self._watches) < MAX_PROCESSES):
                watch = self._watches.setdefault(key, TriggerWatch())
                watch.add(t, sum(sizes), in_flight, load)

    def of(self, role: str | None) -> TriggerWatch | None:
        """Return the watch of a ``role``; None if it is not known."""
        if role is None:
            return None
        return self._watches.get((role, True)) or self._watches.get((role, False))


def sentence(hypothesis: Trigger) -> str | None:
    """Return the hypothesis in words, or None if it is too weak to state."""
    if hypothesis.confidence < MIN_STATED_CONFIDENCE:
        return None
    size, unit = format_bytes(hypothesis.bytes_each), UNITS[hypothesis.counter]
    return f"about {size} per {unit} (hypothesis, confidence {hypothesis.confidence:.0%})"


def trigger(points: Sequence[Footprint]) -> Trigger | None:
    """Return the counter that the growth over ``points`` follows, or None if none explains it.

    A counter that did not move, or is unknown somewhere in the window, is no candidate.
    """
    if len(points) < MIN_POINTS:
        return None
    window = _Window(points)
    fits = {
        name: window.fit(number)
        for number, name in enumerate(COUNTERS)
        if _has_moved(points, number)
    }
    growing = {name: fit for name, fit in fits.items() if fit.each > 0.0}
    if not growing:
        return None
    best = min(growing, key=lambda name: growing[name].squares)
    effective = growing[best].effective_points()
    odds = sum(_likelihood(growing[best], other, effective) for other in growing.values())
    return Trigger(best, growing[best].each, round(1.0 / odds, 3))


def _has_moved(points: Sequence[Footprint], number: int) -> bool:
    values = [p.counters[number] for p in points]
    return not any(map(math.isnan, values)) and values[-1] > values[0]


def _likelihood(best: _Fit, other: _Fit, effective: float) -> float:
    """Return the ratio of the maximum likelihoods of normal residuals; 1 for the best itself."""
    if other.squares <= best.squares:
        return 1.0
    return float((best.squares / other.squares) ** (effective / 2.0))


@dataclass(frozen=True, slots=True)
class _Fit:
    """A fit: the counter's factor, the residuals, and the sum of their squares."""

    each: float
    residuals: Column
    squares: float

    def effective_points(self) -> float:
        """Return the number of independent residuals, n (1 - r) / (1 + r)."""
        if self.squares <= 0.0:
            return float(len(self.residuals))
        r = sum(a * b for a, b in pairwise(self.residuals)) / self.squares
        r = min(MAX_CORRELATION, max(0.0, r))
        return len(self.residuals) * (1.0 - r) / (1.0 + r)


class _Window:
    """The points of one window as centred columns, scaled by the root of their weights."""

    def __init__(self, points: Sequence[Footprint]) -> None:
        self._points = points
        self._weights = [p.weight for p in points]
        self._sizes = self._centred([p.size for p in points])
        loads = [p.load for p in points if p.load is not None]
        self._load = self._centred(loads if len(loads) == len(points) else [0.0] * len(points))

    def fit(self, number: int) -> _Fit:
        """Return the best non-negative factors of a counter and of the requests in flight."""
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
        residuals = [c - each * a - held * b for a, b, c in zip(x, load, y, strict=True)]
        return _Fit(each, residuals, _dot(residuals, residuals))

    def _centred(self, values: Sequence[float]) -> Column:
        mean = _dot(values, self._weights) / sum(self._weights)
        return [(v - mean) * math.sqrt(w) for v, w in zip(values, self._weights, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))
