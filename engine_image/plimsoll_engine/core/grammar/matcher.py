"""How far one request's output has come in its grammar, computed beside the step.

What a grammar allows next usually takes a millisecond, but a grammar that a client made for it
takes seconds, and llguidance can be bounded in items alone. So the computation runs in a thread
with the interpreter's lock released. A step waits a moment for it; a request that is not ready is
left out of the step, and one that used :data:`LIMIT_CPU_S` ends. Its thread cannot be ended: it
goes on at the lowest priority until llguidance's own limits stop it, and while it does the pool has
another thread for the others.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import Final

from llguidance import LLMatcher

GRACE_S = 0.01
"""How long a step waits. Measured with a vocabulary of 150,000 tokens: schemas and expressions as
clients write them take 0.1 to 5 ms."""
LIMIT_CPU_S = 0.5
LIMIT_WALL_S = 10.0
"""For a request whose thread gets no CPU time, or that gets no thread."""
THREADS = 2
"""Those that are at work on something fast."""
MAX_THREADS = 8
TENANT_SLOW = 2
"""A tenant with so many slow computations gets no further thread before one of them ends."""

ERROR_CHARACTERS = 500


class Matcher:
    """Where a request's output is in its grammar.

    ``mask`` has one bit for each token that may come next, little-endian. While ``busy`` it is that
    of the token before. ``error`` ends the request.
    """

    __slots__ = (
        "_matcher",
        "busy",
        "bytes",
        "complete",
        "error",
        "field",
        "key",
        "mask",
        "slow",
        "tenant",
    )  # fmt: skip

    def __init__(
        self, matcher: LLMatcher, field: str, size_bytes: int, tenant: str, key: tuple[str, str]
    ) -> None:
        self._matcher = matcher
        self.field = field
        self.bytes = size_bytes
        self.tenant = tenant
        self.key = key
        """The size of the compiled grammar."""
        self.mask = b""
        self.error: str | None = None
        self.complete = False
        """Whether the output matches and nothing may follow."""
        self.busy = False
        self.slow = False
        """A step has waited in vain for it, and does not again."""
        self.look()

    def take(self, token_id: int) -> None:
        """Take in the next token of the output, which ends a text that is complete."""
        if self.complete:
            return
        self._matcher.consume_token(token_id)
        self.look()

    def look(self) -> None:
        """Compute what the present state allows."""
        self.complete = self._matcher.is_stopped() and not self._matcher.is_error()
        if not self.complete or not self.mask:  # an end alone, where the output is complete already
            self.mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.error = short(self._matcher.get_error())


def short(message: str) -> str:
    """Return an error of llguidance for a client: nothing of the inside, and not at length."""
    if message.startswith("panic"):
        return "it is too large or too complex"
    return message.partition("\n<")[0][:ERROR_CHARACTERS]


class _Thread(threading.Thread):
    """Advances one matcher after the other. The pool's thread alone reads and sets ``job``."""

    def __init__(self, done: SimpleQueue[_Thread]) -> None:
        super().__init__(name="grammar mask", daemon=True)
        self._inbox: SimpleQueue[tuple[Matcher, int] | None] = SimpleQueue()
        self._done: Final = done
        self.job: Matcher | None = None
        self.since = 0.0
        self.cpu_since = 0.0

    def give(self, matcher: Matcher, token_id: int) -> None:
        self.job = matcher
        self.since, self.cpu_since = time.monotonic(), self.cpu_s()
        self._inbox.put((matcher, token_id))

    def cpu_s(self) -> float:
        """CPU time of this thread so far."""
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def end(self) -> None:
        self._inbox.put(None)

    def run(self) -> None:
        while (given := self._inbox.get()) is not None:
            matcher, token_id = given
            try:
                matcher.take(token_id)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's
                matcher.error = short(str(error))
            del matcher, given
            self._done.put(self)


class Masks:
    """The threads of one worker. Its loop alone calls this."""

    def __init__(self, stack_bytes: int) -> None:
        self._stack_bytes = stack_bytes
        self._threads: list[_Thread] = []
        self._idle: list[_Thread] = []
        self._waiting: list[tuple[Matcher, int, float]] = []
        """With the time of their arrival."""
        self._done: SimpleQueue[_Thread] = SimpleQueue()

    def advance(self, matcher: Matcher, token_id: int) -> None:
        """Take the token in and compute what may follow; ``matcher.busy`` until that is done."""
        matcher.busy = True
        self._waiting.append((matcher, token_id, time.monotonic()))
        self._dispatch()

    def wait(self, timeout_s: float, idle: bool = False) -> None:
        """Until all are done that are not slow, at most so long; those that are left are slow.

        Where the worker is ``idle``, until one is done in any case.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            busy = self._busy
            awaited = any(thread.job is not None and not thread.job.slow for thread in busy)
            awaited = awaited or (idle and bool(busy))
            left_s = deadline - time.monotonic() if awaited else 0.0
            try:
                thread = self._done.get(timeout=left_s) if left_s > 0 else self._done.get_nowait()
            except Empty:
                break
            self._finished(thread)
            idle = False
        for thread in self._busy:
            if thread.job is not None and time.monotonic() - thread.since >= GRACE_S:
                thread.job.slow = True
        self._dispatch()

    def overdue(self, matcher: Matcher) -> bool:
        """Whether it had all the time that it may have; then its thread gives way to all others."""
        thread = self._thread_of(matcher)
        if thread is None:
            waiting = next((entry for entry in self._waiting if entry[0] is matcher), None)
            if waiting is None or time.monotonic() - waiting[2] < LIMIT_WALL_S:
                return False
            self._waiting.remove(waiting)
            return True
        if not self.spent(matcher) and time.monotonic() - thread.since < LIMIT_WALL_S:
            return False
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, 19)
        return True

    def spent(self, matcher: Matcher) -> bool:
        """Whether it had all the CPU time that it may have."""
        thread = self._thread_of(matcher)
        return thread is not None and thread.cpu_s() - thread.cpu_since >= LIMIT_CPU_S

    def _thread_of(self, matcher: Matcher) -> _Thread | None:
        return next((thread for thread in self._busy if thread.job is matcher), None)

    def close(self) -> None:
        """End the threads; one that is at work ends when llguidance lets it."""
        for thread in self._threads:
            thread.end()
        self._threads, self._idle, self._waiting = [], [], []

    @property
    def _busy(self) -> list[_Thread]:
        return [thread for thread in self._threads if thread.job is not None]

    def _finished(self, thread: _Thread) -> None:
        if thread.job is None:
            return  # of before a close
        slow, thread.job.busy = thread.job.slow, False
        # A pause of the machine made it slow, not its grammar, where it needed little CPU time.
        thread.job.slow = thread.cpu_s() - thread.cpu_since >= GRACE_S
        thread.job = None
        if slow:  # it may be at the lowest priority, and others have taken its place
            self._threads.remove(thread)
            thread.end()
        else:
            self._idle.append(thread)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give what waits to the threads that are free."""
        left: list[tuple[Matcher, int, float]] = []
        for matcher, token_id, since in self._waiting:
            thread = None if self._has_enough(matcher.tenant) else self._free_thread()
            if thread is None:
                left.append((matcher, token_id, since))
            else:
                thread.give(matcher, token_id)
        self._waiting = left

    def _has_enough(self, tenant: str) -> bool:
        jobs = (thread.job for thread in self._busy)
        slow = sum(job is not None and job.slow and job.tenant == tenant for job in jobs)
        return slow >= TENANT_SLOW

    def _free_thread(self) -> _Thread | None:
        if self._idle:
            return self._idle.pop()
        slow = sum(thread.job is not None and thread.job.slow for thread in self._busy)
        if len(self._threads) - slow >= THREADS or len(self._threads) >= MAX_THREADS:
            return None
        thread = _Thread(self._done)
        before = threading.stack_size(self._stack_bytes)
        try:
            thread.start()
        except RuntimeError:  # the machine has none left
            return None
        finally:
            threading.stack_size(before)
        self._threads.append(thread)
        return thread
