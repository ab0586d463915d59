"""An external engine's load: its metrics page, counts of requests where they enter, and pauses.

Both known engines write their gauges in the process that makes the steps. If it hangs while idle,
the gauges stay at zero when requests come. So requests are also counted where they enter: by the
server's own counter, if it has one, and by connections that wait for an answer.

In its development mode, vLLM says at ``/is_paused`` whether somebody paused it. SGLang does not:
its ``/ready`` answers 503 while it is paused, but also after a failed health check, for example of
an engine that hangs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from plimsoll_api.admin import Load
from plimsoll_api.decoding import Malformed, decode
from plimsoll_sidecar.act.adapters.external_profile import EngineProfile
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.metrics_page import summed

SCRAPE_S = 2.0
SILENT_S = 1.0
"""The next page is read so soon while work waits and nothing moves."""
ANSWER_S = 2.0
PAUSE_ANSWER_S = 1.0
"""The server may pass the question on to a process that hangs."""
AGAIN_S = 10.0
"""Pause before a server that did not answer properly is asked again."""
NOT_FOUND = 404


class ExternalLoad:
    """The newest page's figures. A page that could not be read is no information, not zero.

    ``restarts`` counts the times that a counter fell, which only a new beginning explains.
    ``waiting`` says how many connections wait for an answer, None where nobody can tell.
    """

    def __init__(
        self,
        server: HttpClient,
        profile: EngineProfile,
        clock: Callable[[], float] = time.monotonic,
        waiting: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._server, self._profile, self._clock = server, profile, clock
        self._waiting = waiting
        self._read = summed(profile.names)
        self._aborts = Aborts(profile)
        self._pause = PauseReader(server, profile.paused, clock)
        self._next = 0.0
        self._at: float | None = None
        self._load: Load | None = None
        self._before: dict[str, float] = {}
        self._moved: tuple[int | None, ...] | None = None
        self._entered = self._known = 0
        self.restarts = 0

    def newest(self) -> tuple[Load, float] | None:
        """Return the load and its age in seconds; None where the newest page said nothing."""
        now = self._clock()
        if self._profile.metrics and now >= self._next:
            self._next = now + SCRAPE_S
            self._scrape(now)
        if self._load is None or self._at is None:
            return None
        return self._load, now - self._at

    def forget(self) -> None:
        """Another process serves now: its counters are compared with nothing before."""
        self._load, self._at, self._before, self._next = None, None, {}, 0.0
        self._moved, self._entered, self._known, self.restarts = None, 0, 0, 0
        self._aborts = Aborts(self._profile)
        self._pause.forget()

    def expire(self) -> None:
        """Have the next call read the page."""
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
            self._aborts = Aborts(self._profile)
        self._before = sums
        self._load, self._at = load_of(sums, self._profile), now
        if self._load is not None:
            self._load.aborted_total = self._aborts.total(self._load, sums)
            self._enter(self._load, sums, now)

    def _enter(self, load: Load, sums: dict[str, float], now: float) -> None:
        """Add requests that came in since the engine last moved to those that it knew of then.

        Those that were counted at its last move are not: a server that loses one from its count
        would seem at work for ever. An engine may take a request in before it moves, so that what
        it knows of by now counts instead where that is more, and never as well.
        """
        known = (load.running or 0) + (load.waiting or 0)
        moved = (load.steps_total, load.prompt_tokens_total, load.generation_tokens_total)
        entered = self._at_the_door(sums)
        if entered is not None:
            if moved != self._moved:
                self._entered, self._known = entered, known
            self._entered = min(self._entered, entered)
            known = max(known, min(entered, self._known + entered - self._entered))
        load.inflight = max(known, self._waiting() or 0)
        if moved == self._moved and load.inflight:
            self._next = now + SILENT_S
            load.paused = self._pause.read()
        self._moved = moved

    def _at_the_door(self, sums: dict[str, float]) -> int | None:
        """Return the server's own count of requests that it has not answered."""
        if self._profile.entered:
            if not all(name in sums for name in self._profile.entered):
                return None
            ours = sum(sums.get(name, 0.0) for name in self._profile.entered_not)
            return max(0, int(sum(sums[name] for name in self._profile.entered) - ours))
        if self._profile.load_path is None:
            return None
        try:
            status, body = self._server.call("GET", self._profile.load_path, ANSWER_S)
            entered = decode(body, _Entered).server_load
        except (EngineError, Malformed):
            return None
        return max(0, entered) if status == 200 else None


class _Entered(msgspec.Struct):
    """vLLM's answer to ``/load``: zero where ``--enable-server-load-tracking`` is not given."""

    server_load: int


def load_of(sums: dict[str, float], profile: EngineProfile) -> Load | None:
    """Return the load that the sums say; None where the page names no work at all.

    A figure of several names needs all of them; a selection of a known metric that has no line yet
    is unknown, as everything else that is absent.
    """
    known: dict[str, float] = {}
    for figure, names in profile.metrics.items():
        if all(name in sums for name in names):
            known[figure] = sum(sums[name] for name in names)
    if "running" not in known:
        return None
    usage = known.pop("kv_usage_ratio", None)
    counts: dict[str, Any] = {name: int(value) for name, value in known.items()}
    load = Load(**counts)
    load.kv_usage_ratio = usage
    steps = (names for names in profile.steps if all(name in sums for name in names))
    counted = next(steps, None)
    load.steps_total = None if counted is None else int(sum(sums[name] for name in counted))
    if profile.steps_are_progress and load.steps_total is None:
        load.prompt_tokens_total = load.generation_tokens_total = None
    return load


def _is_counter(name: str) -> bool:
    return name.partition("{")[0].endswith(("_total", "_count"))


class Aborts:
    """The aborted requests of one process, as a count that only grows."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self._least = 0.0
        self._before = math.inf

    def total(self, load: Load, sums: Mapping[str, float]) -> int | None:
        """Return aborts so far, by the sums of the newest page and the load that they say.

        None where nothing says them.
        """
        counted = load.aborted_total
        profile = self._profile
        if counted is None and profile.aborts_since in sums:
            counted = 0
        if not (profile.begun in sums and profile.finished in sums and load.running is not None):
            return counted
        waiting = load.waiting or 0
        if load.preemptions_total is not None:
            waiting = min(waiting, load.preemptions_total)  # the others had no token yet
        alive = load.running + waiting
        missing = max(0.0, sums[profile.begun] - sums[profile.finished] - alive)
        # The figures of several servers are a moment apart: what two pages say is certain.
        self._least = max(self._least, min(missing, self._before))
        self._before = missing
        return int((counted or 0) + self._least)


class _Answer(msgspec.Struct):
    is_paused: bool


class PauseReader:
    """Asks a server at ``path``; without a path or a server, a pause is unknown."""

    def __init__(
        self,
        server: HttpClient,
        path: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._path, self._clock = server, path, clock
        self._absent, self._next = False, 0.0

    def forget(self) -> None:
        """Another process serves, which may have the route."""
        self._absent, self._next = False, 0.0

    def read(self) -> bool | None:
        """Return whether the engine is paused; None where the server does not say."""
        now = self._clock()
        if self._path is None or self._absent or now < self._next:
            return None
        self._next = now + AGAIN_S
        try:
            status, body = self._server.call("GET", self._path, PAUSE_ANSWER_S)
            self._absent = status == NOT_FOUND
            paused = decode(body, _Answer).is_paused if status == 200 else None
        except (EngineError, Malformed):
            return None
        if paused is not None:
            self._next = now
        return paused
