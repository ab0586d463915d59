"""A foreign engine's load, from its metrics page, read every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from plimsoll_api.admin import Load
from plimsoll_sidecar.act.adapter import EngineError
from plimsoll_sidecar.act.dialect import Dialect
from plimsoll_sidecar.act.http import Server
from plimsoll_sidecar.signals.prometheus import reader

SCRAPE_S = 5.0
ANSWER_S = 2.0


class ForeignLoad:
    """The newest page's figures. A page that could not be read is no information, not zero.

    ``restarts`` counts the times that a counter fell, which only a new beginning explains.
    """

    def __init__(
        self, server: Server, dialect: Dialect, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server, self._dialect, self._clock = server, dialect, clock
        self._read = reader({name for names in dialect.metrics.values() for name in names})
        self._next = 0.0
        self._at: float | None = None
        self._load: Load | None = None
        self._before: dict[str, float] = {}
        self.restarts = 0

    def newest(self) -> tuple[Load, float] | None:
        """The load and its age in seconds; None where the newest page said nothing."""
        now = self._clock()
        if self._dialect.metrics and now >= self._next:
            self._next = now + SCRAPE_S
            self._scrape(now)
        if self._load is None or self._at is None:
            return None
        return self._load, now - self._at

    def forget(self) -> None:
        """Another process serves now: its counters are compared with nothing before."""
        self._load, self._at, self._before, self._next = None, None, {}, 0.0
        self.restarts = 0

    def expire(self) -> None:
        """The next call reads the page."""
        self._next = 0.0

    def _scrape(self, now: float) -> None:
        self._load = self._at = None
        try:
            status, page = self._server.call("GET", "/metrics", ANSWER_S)
        except EngineError:
            return
        if status != 200:
            return
        sums = self._read(page)
        if any(v < self._before.get(n, 0.0) for n, v in sums.items() if _is_counter(n)):
            self.restarts += 1
        self._before = sums
        self._load, self._at = load_of(sums, self._dialect), now


def load_of(sums: dict[str, float], dialect: Dialect) -> Load | None:
    """The load that the sums say; None where the page names no work at all.

    A figure of several names needs all of them; a selection of a known metric that has no line yet
    is unknown, as everything else that is absent.
    """
    known: dict[str, float] = {}
    for figure, names in dialect.metrics.items():
        if all(name in sums for name in names):
            known[figure] = sum(sums[name] for name in names)
    if "running" not in known:
        return None
    usage = known.pop("kv_usage_ratio", None)
    load = Load(**{name: int(value) for name, value in known.items()})
    load.kv_usage_ratio = usage
    if dialect.steps_are_progress and load.steps_total is None:
        load.prompt_tokens_total = load.generation_tokens_total = None
    return load


def _is_counter(name: str) -> bool:
    return name.partition("{")[0].endswith(("_total", "_count"))
