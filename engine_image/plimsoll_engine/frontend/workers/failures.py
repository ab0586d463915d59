"""Decide which processes end after a failure and restart, and which requests are suspected."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto

from plimsoll_engine.frontend.requests.request_log import Generation, RequestFailedError

# Delays before the restarts after consecutive crashes. One more crash ends the engine, because its
# cause is probably outside the worker. The kubelet then restarts it, after 10 s or more.
RESTART_DELAYS_S = (0.0, 0.0, 1.0, 2.0, 4.0)
# Serving time after which a worker's earlier crashes no longer count.
CRASH_COUNT_RESET_AFTER_S = 60.0
# Consecutive crashes after which a request without a new token is suspected.
CRASHES_UNTIL_SUSPECTED = 2


class WorkerLostError(Exception):
    """A worker exited, or did not become ready.

    If ``permanent`` is True, every worker would fail.
    """

    def __init__(self, message: str, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = is_permanent


class ForkRefusedError(Exception):
    """The kernel did not let the zygote create a process."""


class ZygoteLostError(Exception):
    """The zygote exited or does not answer."""


class WorkerUnrecoverableError(Exception):
    """No worker can be started, so the engine exits."""


class FailureScope(Enum):
    """Processes to end after a failure, in ascending order of their number."""

    WORKER = auto()
    # Its children continue, with the frontend as their parent.
    ZYGOTE = auto()
    # The zygote and every process that it has forked.
    PROCESSES = auto()


class CrashBudget:
    """Limit on consecutive crashes, with a delay before each restart.

    Crashes no longer count once the process has served for ``reset_after_s`` seconds.
    """

    def __init__(
        self,
        delays_s: Sequence[float] = RESTART_DELAYS_S,
        reset_after_s: float = CRASH_COUNT_RESET_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._delays_s = delays_s
        self._reset_after_s = reset_after_s
        self._clock = clock
        self._consecutive = 0
        self._since: float | None = None

    def reset(self) -> None:
        """Reset the number of crashes, because their cause may be gone."""
        self._consecutive, self._since = 0, None

    def mark_serving(self) -> None:
        """Record that the process has started to serve, after another one or a crash."""
        self._forget_crashes_after_service()
        self._since = self._clock()

    def count_crash(self) -> float | None:
        """Count a crash or a failed start. Return the delay in seconds before the restart.

        Return None if the budget is exhausted.
        """
        self._forget_crashes_after_service()
        self._since = None
        self._consecutive += 1
        return (
            self._delays_s[self._consecutive - 1]
            if self._consecutive <= len(self._delays_s)
            else None
        )

    def _forget_crashes_after_service(self) -> None:
        if self._since is not None and self._clock() - self._since >= self._reset_after_s:
            self._consecutive = 0


class Quarantine:
    """Quarantine of requests that ran without a new token while two consecutive workers crashed.

    Such requests run one at a time. If another worker crashes, only the request that it ran fails.
    """

    def __init__(self) -> None:
        self._waiting: deque[Generation] = deque()
        self._running_suspect: Generation | None = None

    def count_loss(self, generations: Sequence[Generation]) -> None:
        """Count a lost worker for each request that it ran, and fail the suspected request."""
        suspect, self._running_suspect = self._running_suspect, None
        for generation in generations:
            if not generation.with_worker:
                continue
            generation.losses += 1
            if generation is suspect:
                generation.fail(
                    RequestFailedError(
                        "error",
                        f"{generation.losses} workers exited while running this request",
                    )
                )

    def release(self, generation: Generation) -> None:
        """Remove a request that has ended."""
        if generation in self._waiting:
            self._waiting.remove(generation)
        if generation is self._running_suspect:
            self._running_suspect = None

    def queue_suspects(self, generations: Sequence[Generation]) -> list[Generation]:
        """Queue the suspected requests in ``generations``, and return the others."""
        suspects = [
            generation for generation in generations if generation.losses >= CRASHES_UNTIL_SUSPECTED
        ]
        self._waiting = deque(suspects)
        return [
            generation for generation in generations if generation.losses < CRASHES_UNTIL_SUSPECTED
        ]

    def get_next_suspect(self) -> Generation | None:
        """Return the suspected request to run next.

        Return None if no request is suspected, or if a suspected request is still running.
        """
        suspect = self._running_suspect
        if suspect is not None and suspect.with_worker and suspect.losses and not suspect.is_done:
            return None
        self._running_suspect = None
        while self._waiting:
            generation = self._waiting.popleft()
            if not (generation.is_done or generation.parked or generation.with_worker):
                self._running_suspect = generation
                return generation
        return None


class Failures:
    """Crash budgets of an engine, and the rules that decide which processes to restart."""

    def __init__(self) -> None:
        self.requests = Quarantine()
        self.worker = CrashBudget()
        self.standby = CrashBudget()
        self.zygote = CrashBudget()

    def count_worker_loss(self, error: WorkerLostError) -> float:
        """Count the loss of a worker. Return the delay in seconds before the next one starts.

        Raises WorkerUnrecoverableError if the budget is exhausted or the error is permanent.
        """
        delay_s = self.worker.count_crash()
        if error.permanent:
            raise WorkerUnrecoverableError(f"cannot start a worker: {error}")
        if delay_s is None:
            raise WorkerUnrecoverableError(
                f"the worker keeps crashing; the last reason is: {error}"
            )
        return delay_s

    @staticmethod
    def choose_scope_of_failed_start(
        error: Exception, is_another_worker_serving: bool
    ) -> FailureScope:
        """Return which processes to end after a worker could not be forked.

        If the kernel refuses a fork while another worker serves, the zygote is kept.
        """
        refused = isinstance(error, ForkRefusedError) and not is_another_worker_serving
        return (
            FailureScope.ZYGOTE
            if refused or isinstance(error, ZygoteLostError)
            else FailureScope.WORKER
        )

    @staticmethod
    def choose_scope_of_unkillable_process(is_memory_needed: bool) -> FailureScope:
        """Return which processes to end after a process survived SIGKILL.

        The process is left alone unless the next worker needs its memory.
        """
        return FailureScope.PROCESSES if is_memory_needed else FailureScope.WORKER
