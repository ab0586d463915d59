"""What a failure ends, and how often it may happen: everything behind the frontend asks here.

A failure ends the smallest circle that cures it: a request, a worker, the zygote, all processes or
the engine. Each circle has an exception and a budget of its own. A budget is spent by failures in a
row; one whose successor served for a minute is none of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto

from plimsoll_engine.frontend.requests.request_log import Generation, RequestFailed

CRASH_DELAYS_S = (0.0, 0.0, 1.0, 2.0, 4.0)
"""What each crash in a row is waited for before the next worker; one more ends the engine. The
first two may be chance. A fault that is not in a worker's state is not cured by a further fork: the
kubelet's restart with its back-off of 10 s and more takes over. Until then the requests are held.
"""
SETTLED_S = 60.0
"""A worker that has served for so long ends a row of crashes."""
SUSPECTED = 2
"""So many workers ended while a request made no token."""


class WorkerLost(Exception):
    """A worker ended, or never became ready.

    ``permanent``: it said that its settings or its checkpoint are wrong, so that another one will
    fail as well.
    """

    def __init__(self, message: str, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class ForkRefused(Exception):
    """The kernel let the zygote have no further process; the zygote itself serves on."""


class ZygoteLost(Exception):
    """The zygote ended or does not answer."""


class GaveUp(Exception):
    """No worker can be had: the engine ends."""


class Circle(Enum):
    """What ends, from the smallest on."""

    WORKER = auto()
    ZYGOTE = auto()
    """Its processes live on, as the frontend's own."""
    PROCESSES = auto()
    """The zygote with all that it has forked."""


class CrashBudget:
    """How many crashes in a row are tolerated, and how long each is waited for.

    One that :meth:`serves` for ``settled_s`` seconds ends the row, however it ends.
    """

    def __init__(
        self,
        delays_s: Sequence[float] = CRASH_DELAYS_S,
        settled_s: float = SETTLED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._delays_s = delays_s
        self._settled_s = settled_s
        self._clock = clock
        self._row = 0
        self._since: float | None = None

    def reset(self) -> None:
        """Forget the row: its cause may be gone."""
        self._row, self._since = 0, None

    def serves(self) -> None:
        """Note that one serves from now on."""
        self._since = self._clock()

    def spend(self) -> float | None:
        """Count a crash, or a start that failed.

        Returns the seconds to wait before the next one, None when it was one too many.
        """
        if self._since is not None and self._clock() - self._since >= self._settled_s:
            self._row = 0
        self._since = None
        self._row += 1
        return self._delays_s[self._row - 1] if self._row <= len(self._delays_s) else None


class Quarantine:
    """Requests that may be what ends the workers: each of them is computed again alone.

    A request that ends its worker is carried over and ends the next one, until the engine gives up
    with all the others. What was running when two workers in a row ended, without a token between,
    is suspected: only one of the suspects is with a worker at a time, until its next token clears
    it. The one that a third worker ends with has an error, and the others go on.
    """

    def __init__(self) -> None:
        self._waiting: deque[Generation] = deque()
        self._tried: Generation | None = None

    def worker_lost(self, unfinished: Sequence[Generation]) -> None:
        """Count the loss of a worker for what it computed; end the suspect that was with it."""
        tried, self._tried = self._tried, None
        for generation in unfinished:
            if not generation.with_worker:
                continue
            generation.losses += 1
            if generation is tried:
                generation.fail(
                    RequestFailed("error", f"{generation.losses} workers ended while computing it")
                )

    def release(self, generation: Generation) -> None:
        """Forget a request that is over."""
        if generation in self._waiting:
            self._waiting.remove(generation)
        if generation is self._tried:
            self._tried = None

    def admit(self, carried: Sequence[Generation]) -> list[Generation]:
        """Return those of ``carried`` that are not suspected. The others wait for :meth:`next`."""
        suspects = [generation for generation in carried if generation.losses >= SUSPECTED]
        self._waiting = deque(suspects)
        return [generation for generation in carried if generation.losses < SUSPECTED]

    def next(self) -> Generation | None:
        """Return the suspect that is to be computed now; None while another one is."""
        tried = self._tried
        if tried is not None and tried.with_worker and tried.losses and not tried.done:
            return None
        self._tried = None
        while self._waiting:
            generation = self._waiting.popleft()
            if not (generation.done or generation.parked or generation.with_worker):
                self._tried = generation
                return generation
        return None


class Failures:
    """The budgets of one engine, and what each failure of its processes ends."""

    def __init__(self) -> None:
        self.requests = Quarantine()
        self.worker = CrashBudget()
        self.standby = CrashBudget()
        self.zygote = CrashBudget()

    def worker_ended(self, error: WorkerLost) -> float:
        """Count the end of the worker that serves, or was to.

        Returns the seconds to wait before the next one. Raises :class:`GaveUp`.
        """
        delay_s = self.worker.spend()
        if error.permanent:
            raise GaveUp(f"no worker can be started: {error}")
        if delay_s is None:
            raise GaveUp(f"the worker keeps crashing; last reason: {error}")
        return delay_s

    @staticmethod
    def not_started(error: Exception, another_serves: bool) -> Circle:
        """Return what ends where a worker could not be forked.

        A zygote that hangs is replaced in any case. One that may not fork stays while a worker
        serves: the kernel's limit is the same for the next one.
        """
        refused = isinstance(error, ForkRefused) and not another_serves
        return Circle.ZYGOTE if refused or isinstance(error, ZygoteLost) else Circle.WORKER

    @staticmethod
    def not_reaped(needed: bool) -> Circle:
        """Return what ends where a process outlives SIGKILL.

        All of them where the next worker needs what it holds. Any other goes when the driver lets
        it.
        """
        return Circle.PROCESSES if needed else Circle.WORKER
