"""Compute the allowed next tokens of requests with grammars, in threads next to the steps.

A mask usually takes a millisecond, but a malicious grammar can make it take seconds, and llguidance
bounds only the number of items. Masks are therefore computed in threads that release the
interpreter's lock. A step waits briefly for them. A request whose mask is not ready skips the step.
A request whose mask took :data:`LIMIT_CPU_S` ends. The thread of the mask cannot be stopped. It
continues at the lowest priority until llguidance's limits end it, and another thread replaces it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import Final

from llguidance import LLMatcher

MASK_WAIT_S = 0.01
"""Time that a step waits for masks.

Typical schemas and expressions take 0.1 to 5 ms with a vocabulary of 150,000 tokens.
"""
LIMIT_CPU_S = 0.5
"""CPU time limit for a mask."""
LIMIT_WALL_S = 10.0
"""Time limit for a mask whose thread gets no CPU time, or that gets no thread."""
MAX_FAST_THREADS = 2
"""Maximum number of threads for fast masks. Threads with slow masks are not counted."""
MAX_THREADS = 8
"""Maximum number of threads for fast and slow masks."""
MAX_SLOW_PER_TENANT = 2
"""Number of slow masks at which a tenant gets no further thread."""

MAX_ERROR_CHARACTERS = 500
_ONE_OF_OPTION = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""Advice of llguidance for a field that clients of this engine do not have."""


class Matcher:
    """State of one request's output in the grammar ``key``, a kind and a text.

    ``mask`` has one bit per token, little-endian, which is set if the token may come next. While
    ``busy`` is true, the mask is the previous one. ``bytes`` is the size of the compiled grammar.
    If ``error`` is not None, the request must end.
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
        self.mask = b""
        self.error: str | None = None
        self.complete = False
        """Whether the output matches the grammar and no token may follow."""
        self.busy = False
        self.slow = False
        """Whether the mask took longer than a step waits. Steps no longer wait for it."""
        self.update_mask()

    def take(self, token_id: int) -> None:
        """Advance by the next output token. Ignore the token if the output is complete."""
        if self.complete:
            return
        self._matcher.consume_token(token_id)
        self.update_mask()

    def update_mask(self) -> None:
        """Compute the mask of the current state."""
        self.complete = self._matcher.is_stopped() and not self._matcher.is_error()
        if not self.complete or not self.mask:  # the first mask may allow only the end
            self.mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.error = shorten_error(self._matcher.get_error())


def shorten_error(message: str) -> str:
    """Return an error of llguidance for a client: short and without internal details."""
    if message.startswith("panic"):
        return "the grammar is too large or too complex"
    if message.startswith("NoExtensionBias"):
        return "found no text that matches the grammar: simplify the grammar"
    message = message.replace(_ONE_OF_OPTION, "Use anyOf")
    return message.partition("\n<")[0][:MAX_ERROR_CHARACTERS]


class _Thread(threading.Thread):
    """Thread that advances one matcher at a time. Only the pool's owner may access ``job``."""

    def __init__(self, done: SimpleQueue[_Thread]) -> None:
        super().__init__(name="grammar mask", daemon=True)
        self._inbox: SimpleQueue[tuple[Matcher, int] | None] = SimpleQueue()
        self._done: Final = done
        self.job: Matcher | None = None
        self.since = 0.0
        self.cpu_since = 0.0

    def give(self, matcher: Matcher, token_id: int) -> None:
        self.job = matcher
        self.since, self.cpu_since = time.monotonic(), self.read_cpu_s()
        self._inbox.put((matcher, token_id))

    def read_cpu_s(self) -> float:
        """Return the CPU time of this thread in seconds."""
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def end(self) -> None:
        self._inbox.put(None)

    def run(self) -> None:
        while (given := self._inbox.get()) is not None:
            matcher, token_id = given
            try:
                matcher.take(token_id)
            except Exception as error:  # noqa: BLE001 - any error concerns only this request
                matcher.error = shorten_error(str(error))
            del matcher, given
            self._done.put(self)


class MaskThreads:
    """Threads of one worker that compute masks. Only the worker's loop may call them."""

    def __init__(self, stack_bytes: int) -> None:
        self._stack_bytes = stack_bytes
        self._threads: list[_Thread] = []
        self._idle: list[_Thread] = []
        self._waiting: list[tuple[Matcher, int, float]] = []
        """Waiting matcher, its token and the time of arrival."""
        self._done: SimpleQueue[_Thread] = SimpleQueue()

    def advance(self, matcher: Matcher, token_id: int) -> None:
        """Advance ``matcher`` by a token in a thread. It is ``busy`` until the thread is done.

        If no thread is free, the matcher waits for one.
        """
        matcher.busy = True
        self._waiting.append((matcher, token_id, time.monotonic()))
        self._dispatch()

    def wait(self, timeout_s: float, idle: bool = False) -> None:
        """Wait up to ``timeout_s`` seconds for masks, except slow ones. Mark the rest as slow.

        If the worker is ``idle``, also wait for slow masks until one is ready.
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
            self._on_finished(thread)
            idle = False
        for thread in self._busy:
            if thread.job is not None and time.monotonic() - thread.since >= MASK_WAIT_S:
                thread.job.slow = True
        self._dispatch()

    def give_up_if_overdue(self, matcher: Matcher) -> bool:
        """Give up ``matcher`` if it has used up its time. Return whether it was given up.

        A matcher that still waits for a thread gets none. A running thread cannot be stopped: it
        continues at the lowest priority.
        """
        thread = self._find_thread(matcher)
        if thread is None:
            waiting = next((entry for entry in self._waiting if entry[0] is matcher), None)
            if waiting is None or time.monotonic() - waiting[2] < LIMIT_WALL_S:
                return False
            self._waiting.remove(waiting)
            return True
        if not self.has_used_cpu_time(matcher) and time.monotonic() - thread.since < LIMIT_WALL_S:
            return False
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, 19)
        return True

    def has_used_cpu_time(self, matcher: Matcher) -> bool:
        """Report whether ``matcher`` used up its CPU time."""
        thread = self._find_thread(matcher)
        return thread is not None and thread.read_cpu_s() - thread.cpu_since >= LIMIT_CPU_S

    def _find_thread(self, matcher: Matcher) -> _Thread | None:
        return next((thread for thread in self._busy if thread.job is matcher), None)

    def close(self) -> None:
        """Stop the threads. A busy thread stops when llguidance returns."""
        for thread in self._threads:
            thread.end()
        self._threads, self._idle, self._waiting = [], [], []

    @property
    def _busy(self) -> list[_Thread]:
        return [thread for thread in self._threads if thread.job is not None]

    def _on_finished(self, thread: _Thread) -> None:
        if thread.job is None:
            return  # it was closed meanwhile
        slow, thread.job.busy = thread.job.slow, False
        # If it used little CPU time, the machine was slow and not the grammar.
        thread.job.slow = thread.read_cpu_s() - thread.cpu_since >= MASK_WAIT_S
        thread.job = None
        if slow:  # the thread may have the lowest priority, and another thread has replaced it
            self._threads.remove(thread)
            thread.end()
        else:
            self._idle.append(thread)
        self._dispatch()

    def _dispatch(self) -> None:
        left: list[tuple[Matcher, int, float]] = []
        for matcher, token_id, since in self._waiting:
            thread = None if self._has_max_threads(matcher.tenant) else self._get_free_thread()
            if thread is None:
                left.append((matcher, token_id, since))
            else:
                thread.give(matcher, token_id)
        self._waiting = left

    def _has_max_threads(self, tenant: str) -> bool:
        jobs = (thread.job for thread in self._busy)
        slow = sum(job is not None and job.slow and job.tenant == tenant for job in jobs)
        return slow >= MAX_SLOW_PER_TENANT

    def _get_free_thread(self) -> _Thread | None:
        if self._idle:
            return self._idle.pop()
        slow = sum(thread.job is not None and thread.job.slow for thread in self._busy)
        if len(self._threads) - slow >= MAX_FAST_THREADS or len(self._threads) >= MAX_THREADS:
            return None
        thread = _Thread(self._done)
        before = threading.stack_size(self._stack_bytes)
        try:
            thread.start()
        except RuntimeError:  # the process may start no more threads
            return None
        finally:
            threading.stack_size(before)
        self._threads.append(thread)
        return thread
