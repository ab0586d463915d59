"""Find new demand, which is higher than ever before in the epoch, and explain growth by it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from plimsoll_api.trace import SampleLoad
from plimsoll_sidecar.detect.baseline import (
    LOAD_CLASS_SETTLE_S,
    MAX_SETTLED_RISE_BYTES,
    Baseline,
)
from plimsoll_sidecar.detect.growth import Point, measure_unexplained_growth

NEW_DEMAND_FACTOR, NEW_DEMAND_EXTRA_REQUESTS, NEW_DEMAND_TOKEN_FACTOR = 1.05, 2, 1.3
"""Excess of new demand over the earlier maximum: of requests by the factor and by the extra
requests, of mean prompt tokens by the last factor."""
DEMAND_MEAN_WINDOW_S, MAX_DEMAND_PAGES, MIN_ARRIVED_REQUESTS = 15.0, 64, 10
MAX_NEW_DEMAND_S, NEW_DEMAND_WINDOW_S = 300.0, 3600.0
"""Maximum time per hour for which new demand explains growth, so that a load that rises for hours
hides no leak."""


class _Page(NamedTuple):
    t: float
    load: SampleLoad
    inflight: int | None


class DemandWatch:
    """Highest demand on an engine in its epoch, as means over :data:`DEMAND_MEAN_WINDOW_S`."""

    def __init__(self) -> None:
        self._most: dict[str, float] = {}
        self._new_until = -math.inf
        self._new_s = 0.0
        self._updated_at: float | None = None
        self._pages: deque[_Page] = deque(maxlen=MAX_DEMAND_PAGES)

    def update(self, t: float, page: SampleLoad | None) -> bool:
        """Add a page of metrics (None without one), and return whether demand is new."""
        if page is not None:
            self._pages.append(_Page(t, page, count_inflight(page)))
            while len(self._pages) > 2 and t - self._pages[1].t >= DEMAND_MEAN_WINDOW_S:
                self._pages.popleft()
            if t - self._pages[0].t >= DEMAND_MEAN_WINDOW_S:
                factor, extra = NEW_DEMAND_FACTOR, NEW_DEMAND_EXTRA_REQUESTS
                requests = _compute_mean([page.inflight for page in self._pages])
                waiting = _compute_mean([page.load.waiting for page in self._pages])
                tokens = self._compute_prompt_tokens()
                self._raise_maximum("requests", requests, t, factor, extra)
                self._raise_maximum("waiting", waiting, t, factor, extra)
                self._raise_maximum("prompt", tokens, t, NEW_DEMAND_TOKEN_FACTOR)
            self._raise_maximum("images", page.images_total and 1, t)
        new = t < self._new_until and self._new_s < MAX_NEW_DEMAND_S
        elapsed = t - (t if self._updated_at is None else self._updated_at)
        self._updated_at = t
        earned = elapsed * MAX_NEW_DEMAND_S / NEW_DEMAND_WINDOW_S
        self._new_s = max(0.0, self._new_s - earned) + (elapsed if new else 0.0)
        return new

    def _raise_maximum(
        self, name: str, value: float | None, t: float, factor: float = 1.0, margin: float = 0.0
    ) -> None:
        if value is None:
            return
        most = self._most.setdefault(name, value)
        if value > max(factor * most, most + margin):
            self._most[name], self._new_until = value, t + LOAD_CLASS_SETTLE_S

    def _compute_prompt_tokens(self) -> float | None:
        first, last = self._pages[0], self._pages[-1]
        tokens = _compute_increase(first.load.prompt_tokens_total, last.load.prompt_tokens_total)
        completed = _compute_increase(first.load.requests_total, last.load.requests_total)
        if tokens is None or completed is None:
            return None
        arrived = completed + (last.inflight or 0) - (first.inflight or 0)
        return tokens / arrived if arrived >= MIN_ARRIVED_REQUESTS else None


class NewDemand:
    """Growth while demand is new.

    The demand explains growth up to the highest memory in this time, because allocators keep memory
    out of proportion to demand; a leak from before that continues is not explained.
    """

    def __init__(self, floor: Point, pace_bytes_per_s: float) -> None:
        self._first = self._highest = floor
        self._pace_bytes_per_s = pace_bytes_per_s

    def add(self, floor: Point) -> None:
        """Add ``floor``, the point with the lowest memory of the last seconds."""
        highest = self._highest
        busiest = max((highest, floor), key=lambda p: -1 if p.load is None else p.load)
        larger = floor if floor.bytes > highest.bytes else highest
        self._highest = replace(larger, load=busiest.load)

    def finish(self, baseline: Baseline, floor: Point) -> int:
        """Add the growth that the new demand explains to the bases, and return it in bytes."""
        rose = max(0, measure_unexplained_growth(self._first, floor))
        leaked = min(rose, int(self._pace_bytes_per_s * (floor.t - self._first.t)))
        most = max(rose, measure_unexplained_growth(self._first, self._highest))
        if most - leaked <= MAX_SETTLED_RISE_BYTES:
            return 0
        baseline.replace_bases(max(0, baseline.growth) + leaked, self._highest, floor)
        return rose - leaked


def count_inflight(load: SampleLoad) -> int | None:
    """Return the larger of the frontend's and the engine's count of requests; None if unknown."""
    gauges = [value for value in (load.running, load.waiting) if value is not None]
    counts = [sum(gauges)] if gauges else []
    if load.inflight is not None:
        counts.append(load.inflight)
    return max(counts, default=None)


def _compute_increase(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else later - earlier


def _compute_mean(values: Iterable[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return fmean(known_values) if known_values else None
