"""What the engine's newest good answer said, kept for a while when the next ones fail."""

from __future__ import annotations

import math
from collections import deque

from plimsoll_api.trace import LedgerLine, Sample
from plimsoll_sidecar.detect.stalls.stall import work

LOAD_MEMORY_S = 30.0
"""A failed scrape leaves load and ledger as they were for this long; then they are unknown."""
PAGES_S = 30.0
"""A page shows one moment of a load that changes within milliseconds, between no request and all:
what the engine serves is the most that the pages of this time show."""


class LastScrape:
    """``load`` is requests in flight and ``requests`` those ever answered; None is unknown."""

    def __init__(self) -> None:
        self.ledger: list[LedgerLine] = []
        self.load: int | None = None
        self.ready: bool | None = None
        self.requests: int | None = None
        self._known_at = -math.inf
        self._loads: deque[tuple[float, int]] = deque()

    def update(self, sample: Sample) -> None:
        """Take in a sample; what a failed scrape leaves is forgotten when it is too old."""
        if sample.scrape_ok:
            self._known_at, self.ready = sample.t, sample.ready
            self.load, self.requests = self._load(sample), sample.load.requests_total
            if sample.ledger is not None:
                self.ledger = sample.ledger
        elif sample.t - self._known_at > LOAD_MEMORY_S:
            self.load = None

    def _load(self, sample: Sample) -> int | None:
        load = work(sample.load)
        if load is None or sample.load_age_s is None:
            return load
        while self._loads and sample.t - self._loads[0][0] > PAGES_S:
            self._loads.popleft()
        while self._loads and self._loads[-1][1] <= load:
            self._loads.pop()
        self._loads.append((sample.t, load))
        return self._loads[0][1]
