"""Explain growth by the memory that the engine declares, or by one of its counters.

A joint fit of all counters found the right one less often, because it assigned noise to the others.
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
"""Maximum number of owners of one kind that can explain growth. Engines have about ten."""


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory that one owner declares, in bytes; ``earlier`` is the part that explains no growth."""

    bound: int
    earlier: int = 0


class LedgerAccount:
    """Compute how much growth the owners of one kind of memory explain, in bytes.

    Memory of an owner that appears late, as vLLM's KV cache does, need not be new: it explains at
    most the growth that no other owner explains. An owner that declares nothing, or less than its
    largest bound (a rank does not report), counts with its last size.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.owners: dict[str, Owner] = {}
        self._sizes: dict[str, int] = {}

    def resume(self, owners: Mapping[str, Owner]) -> None:
        """Continue from the :attr:`owners` of an earlier detector."""
        self.owners |= owners

    def explain(self, ledger: Sequence[LedgerLine], compute_growth: Callable[[int], int]) -> int:
        """Return how many bytes the owners explain; comparable only within one epoch.

        ``compute_growth`` returns the unexplained growth for a given number of explained bytes.
        """
        late: dict[str, tuple[int, int]] = {}
        for name, (size, bound) in get_bounded_owners(ledger, self.kind).items():
            known = self.owners.get(name)
            if known is None and len(self.owners.keys() | late.keys()) >= MAX_OWNERS:
                continue
            if known is None or bound > known.bound:
                late[name] = size, bound
            if known is not None and (bound == known.bound or name not in self._sizes):
                self._sizes[name] = size
        total = sum(self._sizes.values()) - sum(owner.earlier for owner in self.owners.values())
        left = max(0, compute_growth(total)) if late else 0
        for name, (size, bound) in sorted(late.items()):
            rise = size - self._sizes.get(name, 0)
            explained = max(0, min(rise, left))
            left, total = left - explained, total + min(rise, explained)
            earlier = self.owners[name].earlier if name in self.owners else 0
            self.owners[name] = Owner(bound, earlier + max(0, rise) - explained)
            self._sizes[name] = size
        return total


def get_bounded_owners(ledger: Sequence[LedgerLine], kind: str) -> dict[str, tuple[int, int]]:
    """Return size and bound in bytes of each owner of ``kind`` that has a bound, by name."""
    # Without a bound, an owner cannot be distinguished from a leak.
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
_COUNTERS = {
    "requests": ("requests_total", "request"),
    "aborts": ("aborted_total", "aborted request"),
    "errors": ("errors_total", "failed request"),
    "images": ("images_total", "image"),
    "audios": ("audios_total", "audio clip"),
    "prompt_tokens": ("prompt_tokens_total", "prompt token"),
    "generated_tokens": ("generation_tokens_total", "generated token"),
    "distinct_prompts": ("distinct_prompts_total", "distinct prompt"),
    "adapters": ("adapters_total", "adapter load"),
}
COUNTER_FIELDS = {trigger: field for trigger, (field, _) in _COUNTERS.items()}
"""Field of :class:`SampleLoad` with the counter of each possible trigger."""
COUNTER_UNITS = {trigger: noun for trigger, (_, noun) in _COUNTERS.items()}
"""Noun for one event of each trigger, for messages."""
COUNTER_UNITS[TIME_TRIGGER] = "hour, independent of load"
COUNTERS = (*COUNTER_FIELDS, TIME_TRIGGER)
ROWS_PER_E_FOLD = 48
"""Number of rows for samples whose ages differ by a factor of e."""
MAX_UNMERGED_ROWS = 64
"""Number of new rows after which older rows are merged."""
VALUES_PER_ROW = 4 + len(COUNTERS)
INITIAL_ROWS = 768
"""Number of rows that are allocated at first. A year needs about 710."""
MIN_TRIGGER_POINTS = 16
"""Minimum number of points for a fit. Fewer points cannot distinguish ten counters."""
REFRESH_WINDOW_SHARE = 1 / 16
"""Growth of the window, as a share of its length, after which the trigger is computed again."""
MAX_AUTOCORRELATION = 0.95
MIN_STATED_CONFIDENCE = 0.5
"""Minimum confidence at which the evidence states a hypothesis."""
MAX_ROLES = 16
"""Maximum number of roles with a trigger finder of 84 KiB each. Engines have a few roles."""
_HOUR_S = 3600.0
Column = list[float]


@dataclass(frozen=True, slots=True)
class MeanSample:
    """Mean of ``weight`` samples around ``t``.

    ``size`` is the memory in bytes without declared memory, and ``counters`` the values of
    :data:`COUNTERS` (NaN if unknown).
    """

    t: float
    weight: float
    size: float
    counters: Sequence[float]


class TriggerFinder:
    """Find the counter that a suspected growth follows, from the samples of one epoch.

    Older rows are means over longer periods. One array holds a year, because many small allocations
    would fragment the heap.
    """

    def __init__(self) -> None:
        # Each row: start, weight, t, size, counters.
        self._rows = array("d")
        self._count, self._limit = 0, MAX_UNMERGED_ROWS
        self._since, self._computed_at = math.inf, -math.inf
        self._trigger: Trigger | None = None

    def add(self, t: float, size: int, load: SampleLoad) -> None:
        """Add a sample. ``size`` is the memory in bytes, without declared memory."""
        values = [getattr(load, field) for field in COUNTER_FIELDS.values()]
        counters = [math.nan if value is None else float(value) for value in values]
        if not self._rows:
            self._rows = array("d", bytes(8 * VALUES_PER_ROW * INITIAL_ROWS))
        # The array grows if this is beyond its end.
        self._set_row(self._count, array("d", (t, 1.0, t, size, *counters, t / _HOUR_S)))
        self._count += 1
        if self._count >= self._limit:
            self._merge(t)
            self._limit = self._count + MAX_UNMERGED_ROWS

    def find_trigger(self, since: float, now: float) -> Trigger | None:
        """Return the counter that growth from ``since`` to ``now`` follows; None if unknown."""
        window_s = self._computed_at - self._since
        if since != self._since or now - self._computed_at >= REFRESH_WINDOW_SHARE * window_s:
            self._since, self._computed_at = since, now
            self._trigger = find_trigger(self.list_rows_since(since))
        return self._trigger

    def list_rows_since(self, t: float) -> list[MeanSample]:
        """Return the rows that start at ``t`` or later, oldest first."""
        return [
            MeanSample(row[2], row[1], row[3], row[4:])
            for row in map(self._get_row, range(self._count))
            if row[0] >= t
        ]

    def _get_row(self, index: int) -> array[float]:
        return self._rows[index * VALUES_PER_ROW : (index + 1) * VALUES_PER_ROW]

    def _set_row(self, index: int, row: array[float]) -> None:
        self._rows[index * VALUES_PER_ROW : (index + 1) * VALUES_PER_ROW] = row

    def _merge(self, now: float) -> None:
        count = 0
        for row in map(self._get_row, range(self._count)):
            last = self._get_row(count - 1) if count else None
            if last is not None and row[2] - last[0] <= (now - row[2]) / ROWS_PER_E_FOLD:
                self._set_row(count - 1, _average_rows(last, row))
            else:
                self._set_row(count, row)
                count += 1
        self._count = count


def _average_rows(earlier: array[float], later: array[float]) -> array[float]:
    weight = earlier[1] + later[1]
    share = later[1] / weight
    mean = [a + (b - a) * share for a, b in zip(earlier[2:], later[2:], strict=True)]
    return array("d", (earlier[0], weight, *mean))


class ProcessTriggers:
    """Find the triggers of the engine's processes, by role.

    The size of a process is its memory in use if it reports that, because a trim frees unused
    memory.
    """

    def __init__(self) -> None:
        self._watches: dict[tuple[str, bool], TriggerFinder] = {}

    def add(self, t: float, processes: Iterable[RoleRss], load: SampleLoad) -> None:
        """Add a sample. Roles with a process of unknown size are skipped."""
        roles: dict[str, list[RoleRss]] = {}
        for one in processes:
            roles.setdefault(one.role, []).append(one)
        for role, members in roles.items():
            used = [one.in_use for one in members if one.in_use is not None]
            accounted = len(used) == len(members)
            sizes = used if accounted else [one.anonymous or 0 for one in members]
            key, is_known = (role, accounted), accounted or all(one.rss_anon for one in members)
            if is_known and (key in self._watches or len(self._watches) < MAX_ROLES):
                watch = self._watches.setdefault(key, TriggerFinder())
                watch.add(t, sum(sizes), load)

    def find(self, role: str | None) -> TriggerFinder | None:
        """Return the trigger finder for ``role``; None if there is none."""
        if role is None:
            return None
        return self._watches.get((role, True)) or self._watches.get((role, False))


def describe_trigger(trigger: Trigger) -> str | None:
    """Return a short description of ``trigger``; None if its confidence is too low."""
    if trigger.confidence < MIN_STATED_CONFIDENCE:
        return None
    size, unit = format_bytes(trigger.bytes_each), COUNTER_UNITS[trigger.counter]
    return f"about {size} per {unit} (hypothesis, confidence {trigger.confidence:.0%})"


def find_trigger(points: Sequence[MeanSample]) -> Trigger | None:
    """Return the counter that the growth over ``points`` follows best; None if there is none.

    Fits ``size = base + each * counter``. The confidence is the share of the best counter in the
    likelihoods of all that rose.
    """
    if len(points) < MIN_TRIGGER_POINTS:
        return None
    weights = [p.weight for p in points]
    sizes = _center_values([p.size for p in points], weights)
    fits: dict[str, _Fit] = {}
    for name, values in zip(COUNTERS, zip(*(p.counters for p in points), strict=True), strict=True):
        if values[-1] > values[0] and not any(map(math.isnan, values)):
            fit = _fit_sizes(sizes, _center_values(values, weights))
            if fit.bytes_per_count > 0.0:
                fits[name] = fit
    if not fits:
        return None
    best = min(fits, key=lambda name: fits[name].squares)
    least, power = fits[best].squares, _count_independent_points(fits[best]) / 2.0
    # The likelihoods of all counters, as multiples of the largest one.
    ratios = (
        1.0 if fit.squares <= least else float((least / fit.squares) ** power)
        for fit in fits.values()
    )
    return Trigger(best, fits[best].bytes_per_count, round(1.0 / sum(ratios), 3))


@dataclass(frozen=True, slots=True)
class _Fit:
    bytes_per_count: float
    residuals: Column
    squares: float


def _fit_sizes(sizes: Column, counts: Column) -> _Fit:
    squares = _dot(counts, counts)
    each = max(0.0, _dot(counts, sizes) / squares) if squares > 0.0 else 0.0
    residuals = [size - each * count for size, count in zip(sizes, counts, strict=True)]
    return _Fit(each, residuals, _dot(residuals, residuals))


def _count_independent_points(fit: _Fit) -> float:
    """Return the effective number of independent residuals, n (1 - r) / (1 + r)."""
    count = len(fit.residuals)
    if fit.squares <= 0.0:
        return float(count)
    r = sum(a * b for a, b in pairwise(fit.residuals)) / fit.squares
    r = min(MAX_AUTOCORRELATION, max(0.0, r))
    return count * (1.0 - r) / (1.0 + r)


def _center_values(values: Sequence[float], weights: Sequence[float]) -> Column:
    mean = _dot(values, weights) / sum(weights)
    return [(v - mean) * math.sqrt(w) for v, w in zip(values, weights, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(p * q for p, q in zip(a, b, strict=True))
