"""Explain growth by the engine's ledger, or by a counter of the engine that it follows.

Growth within declared bounds is explained. The rest follows one of the engine's counters, or time.

The model of memory over a window is ``size = base + each x counter + held x requests in flight``,
fitted for each counter by non-negative least squares. The hypothesis is the counter with the
smallest residuals. Its confidence is its likelihood among all counters, for normal residuals with
autocorrelation. If counters moved together, the confidence is low, because the growth may follow
any of them. A joint fit of all counters spread noise over the others, and named the right counter
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
"""Maximum number of owners of one kind. Engines have about ten; further ones explain nothing."""


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """One owner of declared memory, as the checkpoint stores it, in bytes.

    ``bound`` is the largest bound that it declared. ``earlier`` is the memory that it already held
    when it was first seen, which explains no growth.
    """

    bound: int
    earlier: int = 0


class LedgerAccount:
    """Compute the bytes of growth that the ledger's owners of one kind of memory explain.

    An owner may appear late. vLLM's probe sees the key-value cache only once the engine's loop
    runs, and a busy process may report nothing for a while, although its memory exists. A new owner
    therefore explains at most the growth that is still unexplained. The same holds for memory that
    it adds while it is absent, or when its bound rises. While an owner is absent, or declares less
    than its largest bound because one of several ranks does not report, the smallest size that it
    ever had counts.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.owners: dict[str, Owner] = {}
        self._least: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._complete: set[str] = set()

    def resume(self, owners: Mapping[str, Owner] | None) -> None:
        """Continue from the :attr:`owners` of an earlier detector in this epoch.

        None comes from a release that stored no owners, and counted all declared memory.
        """
        if owners is None:
            owners = {name: Owner(owner.bound) for name, owner in self.owners.items()}
        self.owners = {**self.owners, **owners}

    def explain(self, ledger: Sequence[LedgerLine], growth: Callable[[int], int]) -> int:
        """Return the bytes that the owners explain now. The results for one epoch are comparable.

        ``growth`` returns the unexplained growth for a number of explained bytes.
        """
        sizes = list_bounded_owners(ledger, self.kind)
        complete = self._find_complete_owners(sizes)
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
                total += self._find_earlier_bytes(name, size)
            else:
                total += size if name in complete else max(size, self._least.get(name, 0))
        left = max(0, growth(total)) if new else 0
        for name, (size, bound) in sorted(new.items()):
            rise = size - self._find_earlier_bytes(name, size)
            explained = max(0, min(rise, left))
            left, total = left - explained, total + min(rise, explained)
            earlier = self.owners[name].earlier if name in self.owners else 0
            self.owners[name] = Owner(bound, earlier + max(0, rise) - explained)
        for name in complete:
            size = sizes[name][0]
            self._most[name] = max(size, self._most.get(name, size))
        self._complete = complete
        return total

    def _find_complete_owners(self, sizes: Mapping[str, tuple[int, int]]) -> set[str]:
        """Return the owners whose bound did not shrink, and new ones up to :data:`MAX_OWNERS`."""
        new = [name for name in sizes if name not in self.owners]
        complete = {
            name
            for name, (_, bound) in sizes.items()
            if name in self.owners and bound >= self.owners[name].bound
        }
        return complete | set(new[: max(0, MAX_OWNERS - len(self.owners))])

    def _find_earlier_bytes(self, name: str, size: int) -> int:
        """Return the bytes that a new owner held before this ledger, which explain no growth.

        An owner that only an earlier detector saw is assumed to have held as much as it does now.
        """
        return self._most.get(name, size) if name in self.owners else 0


def list_bounded_owners(ledger: Sequence[LedgerLine], kind: str) -> dict[str, tuple[int, int]]:
    """Return the size and the bound of each owner of ``kind``, in bytes, by name.

    The size is limited to the bound. An owner without a bound explains nothing, because it cannot
    be distinguished from a leak.
    """
    return {
        line.owner: (max(0, min(line.bytes, line.bound)), line.bound)
        for line in ledger
        if line.kind == kind and line.bound is not None
    }


def describe_exceeded_bounds(ledger: Sequence[LedgerLine], kind: str) -> list[str]:
    """Return a sentence for each owner that holds more than its declared bound."""
    return [
        f"owner {line.owner} holds {line.bytes} bytes, more than its declared bound of {line.bound}"
        for line in ledger
        if line.kind == kind and line.bound is not None and line.bytes > line.bound
    ]


TIME_TRIGGER = "time"
COUNTER_FIELDS = {
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
COUNTER_UNITS = {
    "requests": "request",
    "aborts": "aborted request",
    "errors": "failed request",
    "images": "image",
    "audios": "audio clip",
    "prompt_tokens": "prompt token",
    "generated_tokens": "generated token",
    "distinct_prompts": "distinct prompt",
    "adapters": "adapter load",
    TIME_TRIGGER: "hour, independent of load",
}
"""One event of each trigger, in words."""
COUNTERS = (*COUNTER_FIELDS, TIME_TRIGGER)
ROWS_PER_E_FOLD = 48
UNMERGED_ROWS = 64
"""Rows that are collected before the older ones are merged."""
ROW_VALUES = 5 + len(COUNTERS)
YEAR_ROWS = 768
"""Rows for a year, which needs about 710. Each e-fold of the time adds :data:`ROWS_PER_E_FOLD`."""
MIN_POINTS = 16
"""Minimum number of averages: fewer say too little about ten counters."""
REFRESH_SHARE = 1 / 16
MAX_CORRELATION = 0.95
MIN_STATED_CONFIDENCE = 0.5
"""A hypothesis that is more likely wrong than right is not stated."""
MAX_PROCESSES = 16
"""Maximum number of roles with a trigger finder, which takes 92 KiB. Engines have a few roles."""
_HOUR_S = 3600.0
Column = list[float]


@dataclass(frozen=True, slots=True)
class MeanSample:
    """Mean of ``weight`` samples around the time ``t``.

    ``size`` is the memory without declared memory, in bytes. ``counters`` are those of
    :data:`COUNTERS`, NaN if unknown. An unknown ``load`` is None.
    """

    t: float
    weight: float
    size: float
    load: float | None
    counters: Sequence[float]


class SampleHistory:
    """History of one kind of memory within one epoch, as means over growing periods.

    The number of rows grows with the logarithm of the time. One array holds the rows of a year and
    is allocated with the first sample: many small allocations would fragment the heap over time.
    """

    def __init__(self) -> None:
        # Each row: start, weight, t, size, load, counters.
        self._rows = array("d")
        self._count, self._limit = 0, UNMERGED_ROWS

    def add(self, t: float, size: int, in_flight: int | None, load: SampleLoad) -> None:
        """Add a sample: ``size`` in bytes, and the engine's load at the same time."""
        values = [getattr(load, field) for field in COUNTER_FIELDS.values()]
        counters = [math.nan if value is None else float(value) for value in values]
        requests = math.nan if in_flight is None else in_flight
        if not self._rows:
            self._rows = array("d", bytes(8 * ROW_VALUES * YEAR_ROWS))
        # The array grows if this is beyond its end.
        self._set_row(self._count, array("d", (t, 1.0, t, size, requests, *counters, t / _HOUR_S)))
        self._count += 1
        if self._count >= self._limit:
            self._merge(t)
            self._limit = self._count + UNMERGED_ROWS

    def list_since(self, t: float) -> list[MeanSample]:
        """Return the means that start at ``t`` or later, oldest first."""
        return [
            MeanSample(row[2], row[1], row[3], None if math.isnan(row[4]) else row[4], row[5:])
            for row in map(self._get_row, range(self._count))
            if row[0] >= t
        ]

    def _get_row(self, number: int) -> array[float]:
        return self._rows[number * ROW_VALUES : (number + 1) * ROW_VALUES]

    def _set_row(self, number: int, row: array[float]) -> None:
        self._rows[number * ROW_VALUES : (number + 1) * ROW_VALUES] = row

    def _merge(self, now: float) -> None:
        count = 0
        for row in map(self._get_row, range(self._count)):
            last = self._get_row(count - 1) if count else None
            if last is not None and row[2] - last[0] <= (now - row[2]) / ROWS_PER_E_FOLD:
                self._set_row(count - 1, _average(last, row))
            else:
                self._set_row(count, row)
                count += 1
        self._count = count


def _average(earlier: array[float], later: array[float]) -> array[float]:
    weight = earlier[1] + later[1]
    share = later[1] / weight
    mean = [a + (b - a) * share for a, b in zip(earlier[2:], later[2:], strict=True)]
    return array("d", (earlier[0], weight, *mean))


class TriggerFinder:
    """Find the counter that a suspected growth follows, and cache the result.

    The result is computed again when the window has become longer by :data:`REFRESH_SHARE`, or
    starts at another time.
    """

    def __init__(self) -> None:
        self._footprints = SampleHistory()
        self._since, self._computed_at = math.inf, -math.inf
        self._trigger: Trigger | None = None

    def add(self, t: float, size: int, in_flight: int | None, load: SampleLoad) -> None:
        """Add a sample: memory without declared memory in bytes, and the load at the same time."""
        self._footprints.add(t, size, in_flight, load)

    def find_trigger(self, since: float, now: float) -> Trigger | None:
        """Return the counter that the growth from ``since`` to ``now`` follows; None if unknown."""
        window_s = self._computed_at - self._since
        if since != self._since or now - self._computed_at >= REFRESH_SHARE * window_s:
            self._since, self._computed_at = since, now
            self._trigger = find_trigger(self._footprints.list_since(since))
        return self._trigger


class ProcessTriggers:
    """Find the triggers of the engine's processes, by role.

    The size of a process is the memory in use in its allocators: memory that they keep unused is no
    growth, and a trim frees it. If the process does not report that, the size is its anonymous
    memory.
    """

    def __init__(self) -> None:
        self._watches: dict[tuple[str, bool], TriggerFinder] = {}

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
                watch = self._watches.setdefault(key, TriggerFinder())
                watch.add(t, sum(sizes), in_flight, load)

    def find(self, role: str | None) -> TriggerFinder | None:
        """Return the finder for ``role``; None if the role is unknown."""
        if role is None:
            return None
        return self._watches.get((role, True)) or self._watches.get((role, False))


def describe_trigger(hypothesis: Trigger) -> str | None:
    """Describe the hypothesis in a few words; None if its confidence is too low."""
    if hypothesis.confidence < MIN_STATED_CONFIDENCE:
        return None
    size, unit = format_bytes(hypothesis.bytes_each), COUNTER_UNITS[hypothesis.counter]
    return f"about {size} per {unit} (hypothesis, confidence {hypothesis.confidence:.0%})"


def find_trigger(points: Sequence[MeanSample]) -> Trigger | None:
    """Return the counter that the growth over ``points`` follows; None if none explains it.

    A counter that did not increase, or that is unknown for a point, is not considered.
    """
    if len(points) < MIN_POINTS:
        return None
    window = _Window(points)
    fits = {
        name: window.fit(number)
        for number, name in enumerate(COUNTERS)
        if _has_increased(points, number)
    }
    growing = {name: fit for name, fit in fits.items() if fit.each > 0.0}
    if not growing:
        return None
    best = min(growing, key=lambda name: growing[name].squares)
    independent_points = growing[best].count_independent_points()
    odds = sum(
        _likelihood_ratio(growing[best], other, independent_points) for other in growing.values()
    )
    return Trigger(best, growing[best].each, round(1.0 / odds, 3))


def _has_increased(points: Sequence[MeanSample], number: int) -> bool:
    values = [p.counters[number] for p in points]
    return not any(map(math.isnan, values)) and values[-1] > values[0]


def _likelihood_ratio(best: _Fit, other: _Fit, independent_points: float) -> float:
    """Return the ratio of the maximum likelihoods of ``other`` and ``best``."""
    if other.squares <= best.squares:
        return 1.0
    return float((best.squares / other.squares) ** (independent_points / 2.0))


@dataclass(frozen=True, slots=True)
class _Fit:
    """A fit: the bytes for each count, the residuals, and the sum of their squares."""

    each: float
    residuals: Column
    squares: float

    def count_independent_points(self) -> float:
        """Return the number of independent residuals, n (1 - r) / (1 + r)."""
        if self.squares <= 0.0:
            return float(len(self.residuals))
        r = sum(a * b for a, b in pairwise(self.residuals)) / self.squares
        r = min(MAX_CORRELATION, max(0.0, r))
        return len(self.residuals) * (1.0 - r) / (1.0 + r)


class _Window:
    """The points of one window as centred columns, multiplied by the root of their weights."""

    def __init__(self, points: Sequence[MeanSample]) -> None:
        self._points = points
        self._weights = [p.weight for p in points]
        self._sizes = self._center([p.size for p in points])
        loads = [p.load for p in points if p.load is not None]
        self._load = self._center(loads if len(loads) == len(points) else [0.0] * len(points))

    def fit(self, number: int) -> _Fit:
        """Return the best non-negative factors of a counter and of the requests in flight."""
        x, load, y = (
            self._center([p.counters[number] for p in self._points]),
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

    def _center(self, values: Sequence[float]) -> Column:
        mean = _dot(values, self._weights) / sum(self._weights)
        return [(v - mean) * math.sqrt(w) for v, w in zip(values, self._weights, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))
