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
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from plimsoll_api.admin import Load
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.state import Signal, SignalReason
from plimsoll_sidecar.act.adapters.external_profile import EngineProfile
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.signals.metrics_page import (
    MALFORMED,
    MAX_LINES,
    Kind,
    Labels,
    Page,
    Series,
    Share,
    reader,
)

SCRAPE_S = 2.0
SILENT_S = 1.0
"""The next page is read so soon while work waits and nothing moves."""
ANSWER_S = 2.0
PAUSE_ANSWER_S = 1.0
"""The server may pass the question on to a process that hangs."""
AGAIN_S = 10.0
"""Pause before a server that did not answer properly is asked again."""
NOT_FOUND = 404
AGREEING = 300
"""Pages in a row that must agree after a first one that contradicted those before. Each is asked
for on a connection of its own: that one of two servers answers them all by chance, even if it
answers nine in ten, has a probability of 2e-14."""
UNREAD = Signal(True)
"""Before the first page: nothing is wrong yet."""
INCONSISTENT = Signal(
    False,
    SignalReason.METRICS_INCONSISTENT,
    "the pages of one process contradict each other: several servers, each with counters of its"
    " own, answer at one port. Memory is watched without the load",
)


class ExternalLoad:
    """The newest page's figures. A page that could not be read is no information, not zero.

    ``restarts`` counts new beginnings within the main process: its counters fell, and
    ``replaced`` says that all processes which it had started were replaced meanwhile. Counters
    that fall in the same process are those of several registries behind one port: then no page
    tells of the whole engine, and none is used (:class:`OneRegistry`). ``waiting`` says how many
    connections wait for an answer, None where nobody can tell.
    """

    def __init__(
        self,
        server: HttpClient,
        profile: EngineProfile,
        clock: Callable[[], float] = time.monotonic,
        waiting: Callable[[], int | None] = lambda: None,
        replaced: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server, self._profile, self._clock = server, profile, clock
        self._waiting, self._replaced = waiting, replaced
        self._read = reader(profile.series())
        self._registry = OneRegistry(profile)
        self._aborts = Aborts(profile)
        self._pause = PauseReader(server, profile.paused, clock)
        self._next = 0.0
        self._at: float | None = None
        self._load: Load | None = None
        self._moved: tuple[int | None, ...] | None = None
        self._entered = self._known = 0
        self.restarts = 0
        self.signal = UNREAD

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
        self._load, self._at, self._next = None, None, 0.0
        self._moved, self._entered, self._known, self.restarts = None, 0, 0, 0
        self._registry, self._aborts = OneRegistry(self._profile), Aborts(self._profile)
        self._pause.forget()
        self.signal = UNREAD

    def expire(self) -> None:
        """Have the next call read the page."""
        self._next = 0.0

    def _scrape(self, now: float) -> None:
        self._load = self._at = None
        try:
            status, body = self._server.call("GET", "/metrics", ANSWER_S)
        except EngineError as error:
            self.signal = Signal(False, SignalReason.METRICS_SILENT, f"GET /metrics: {error}")
            return
        if status != 200:
            self.signal = _refusal(status)
            return
        page = self._read(body)
        if not self._registry.agrees(page) and self._replaced():
            self.restarts += 1
            self._registry, self._aborts = OneRegistry(self._profile), Aborts(self._profile)
            self._registry.agrees(page)
        if self._registry.inconsistent:
            self.signal, self._moved = INCONSISTENT, None
            return
        self._registry.keep(page)
        self._load, self._at = load_of(page, self._profile), now
        self.signal = _understood(page, self._profile)
        if self._load is not None:
            self._load.aborted_total = self._aborts.total(self._load, page)
            self._enter(self._load, page, now)

    def _enter(self, load: Load, page: Page, now: float) -> None:
        """Add requests that came in since the engine last moved to those that it knew of then.

        Those that were counted at its last move are not: a server that loses one from its count
        would seem at work for ever. An engine may take a request in before it moves, so that what
        it knows of by now counts instead where that is more, and never as well.
        """
        known = (load.running or 0) + (load.waiting or 0)
        moved = (load.steps_total, load.prompt_tokens_total, load.generation_tokens_total)
        entered = self._at_the_door(page)
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

    def _at_the_door(self, page: Page) -> int | None:
        """Return the server's own count of requests that it has not answered."""
        profile = self._profile
        if profile.entered is not None:
            entered = page.value(profile.entered)
            ours = page.value(profile.entered_not) if profile.entered_not is not None else None
            return None if entered is None else max(0, int(entered - (ours or 0.0)))
        if profile.load_path is None:
            return None
        try:
            status, body = self._server.call("GET", profile.load_path, ANSWER_S)
            answered = decode(body, _Entered).server_load
        except (EngineError, Malformed):
            return None
        return max(0, answered) if status == 200 else None


class OneRegistry:
    """Whether all pages of one process come from one registry of metrics.

    Several servers may share a port, by SO_REUSEPORT or behind a socket that was inherited, and
    answer in turn, each with what it has counted itself. A page of one says nothing of the others.
    """

    def __init__(self, profile: EngineProfile) -> None:
        self._every = tuple(dict.fromkeys(profile.series()))
        self._counters: dict[tuple[str, Labels], float] = {}
        self._begun: dict[tuple[str, Labels], float] = {}
        self._disagreed, self._agreed = 0, 0

    def agrees(self, page: Page) -> bool:
        """Take in a page; return whether it may continue those before.

        A counter that left with its rank is no fall.
        """
        counters, begun = page.counters(self._every), page.begun(self._every)
        fell = any(value < self._counters.get(key, value) for key, value in counters.items())
        other = any(value != self._begun.get(key, value) for key, value in begun.items())
        if max(len(self._counters), len(self._begun)) > MAX_LINES or fell or other:
            self._counters, self._begun = {}, {}
        # What a line that cannot be read would have said stays unknown, should its rank leave.
        broken = {name for name, labels in counters if labels == MALFORMED}
        self._counters |= {key: math.nan for key in self._counters if key[0] in broken}
        self._counters |= {key: value for key, value in counters.items() if key[1] != MALFORMED}
        self._begun |= begun
        self._disagreed += fell or other
        self._agreed = 0 if fell or other else self._agreed + 1
        return not (fell or other)

    @property
    def inconsistent(self) -> bool:
        """Whether no page is to be used: for a while after one that disagreed.

        Once may be a library that began to count again. Twice is no chance.
        """
        return self._disagreed > 1 or (self._disagreed == 1 and self._agreed < AGREEING)

    def keep(self, page: Page) -> None:
        """Add what ranks counted that have left the page since."""
        page.keep(self._counters)


class _Entered(msgspec.Struct):
    """vLLM's answer to ``/load``: zero where ``--enable-server-load-tracking`` is not given."""

    server_load: int


def load_of(page: Page, profile: EngineProfile) -> Load | None:
    """Return the load that the page says; None where it names no work at all.

    A figure of several series needs all of them; a selection of a known metric that has no line
    yet is unknown, as everything else that is absent.
    """
    known = {
        figure: value
        for figure, series in profile.metrics.items()
        if (value := page.value(series)) is not None
    }
    if "running" not in known:
        return None
    usage = known.pop("kv_usage_ratio", None)
    counts: dict[str, Any] = {name: int(value) for name, value in known.items()}
    load = Load(**counts)
    if isinstance(usage, Share):
        load.kv_usage_ratio = float(usage)
        load.kv_usage_least_ratio = usage.least if usage.least < usage else None
    load.steps_total = next(
        (steps for one in profile.steps if (steps := _sum(page, one)) is not None), None
    )
    if profile.steps_are_progress and load.steps_total is None:
        load.prompt_tokens_total = load.generation_tokens_total = None
    return load


def _sum(page: Page, every: Iterable[Series]) -> int | None:
    values = [page.value(one) for one in every]
    known = [value for value in values if value is not None]
    return int(sum(known)) if len(known) == len(values) else None


def _refusal(status: int) -> Signal:
    if status in (401, 403):
        return Signal(
            False,
            SignalReason.METRICS_UNAUTHORIZED,
            f"GET /metrics: HTTP {status}: the page needs a key, which the supervisor has not",
        )
    if status == NOT_FOUND:
        why = "GET /metrics: HTTP 404: start the engine with its metrics (SGLang: --enable-metrics)"
        return Signal(False, SignalReason.METRICS_MISSING, why)
    return Signal(False, SignalReason.METRICS_SILENT, f"GET /metrics: HTTP {status}")


def _understood(page: Page, profile: EngineProfile) -> Signal:
    """Return whether the page has the gauges that a load needs, and which it lacks."""
    gauges = [one for one in profile.metrics.values() if one.kind is not Kind.COUNTER]
    absent = [one.name for one in gauges if not page.has(one)]
    if len(absent) == len(gauges):
        why = f"the metrics page has none of {', '.join(absent)}: is it that of another program?"
        return Signal(False, SignalReason.METRICS_UNKNOWN_NAMES, why)
    if absent:
        why = f"the metrics page lacks {', '.join(absent)}"
        return Signal(False, SignalReason.METRICS_INCOMPLETE, why)
    unknown = [one.name for one in gauges if page.value(one) is None]
    if unknown:
        why = f"the metrics page has values that cannot be right for {', '.join(unknown)}"
        return Signal(False, SignalReason.METRICS_INCOMPLETE, why)
    return Signal(True)


class Aborts:
    """The aborted requests of one process, as a count that only grows."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile
        self._least = 0.0
        self._before = math.inf

    def total(self, load: Load, page: Page) -> int | None:
        """Return aborts so far, by the newest page and the load that it says.

        None where nothing says them.
        """
        counted, profile = load.aborted_total, self._profile
        if counted is None and profile.aborts_since is not None and page.has(profile.aborts_since):
            counted = 0
        begun = page.value(profile.begun) if profile.begun is not None else None
        finished = page.value(profile.finished) if profile.finished is not None else None
        if begun is None or finished is None or load.running is None:
            return counted
        waiting = load.waiting or 0
        if load.preemptions_total is not None:
            waiting = min(waiting, load.preemptions_total)  # the others had no token yet
        alive = load.running + waiting
        missing = max(0.0, begun - finished - alive)
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
