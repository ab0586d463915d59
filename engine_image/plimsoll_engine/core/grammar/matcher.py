"""Compute masks (the allowed next tokens of requests with grammars) in threads beside the steps.

A malicious grammar can make a mask take seconds. A step therefore waits only briefly for masks, and
requests whose mask is not ready skip the step.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from queue import Empty, SimpleQueue
from typing import Final

from llguidance import LLMatcher

# Longest wait of a step. Masks of typical schemas and expressions take 0.1 to 5 ms with a
# vocabulary of 150,000 tokens.
MASK_WAIT_S = 0.01
MAX_MASK_CPU_S = 0.5
# Limit for computing one mask, and for waiting for a thread.
MAX_MASK_WALL_S = 10.0
# Not counting threads with slow masks.
MAX_FAST_MASK_THREADS = 2
# Including threads with slow masks.
MAX_MASK_THREADS = 8
# With more, new masks of the tenant wait.
MAX_SLOW_MASKS_PER_TENANT = 2

MAX_ERROR_CHARACTERS = 500
# llguidance's messages advise an option that the engine's API does not have.
_COERCE_ONE_OF_ADVICE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class Matcher:
    """State of a request's output in its grammar.

    ``mask`` has one bit per token, little-endian, which is set if the token may come next. While
    ``busy`` is true, it is still the mask for the previous token. If ``error`` is not None, the
    request must end.
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
        # Whether the output is a complete text of the grammar, after which no token may follow.
        self.complete = False
        self.busy = False
        # Whether the mask takes longer than MASK_WAIT_S. Steps do not wait for it.
        self.slow = False
        self.update_mask()

    def consume_token(self, token_id: int) -> None:
        """Advance by one output token, and compute the next mask."""
        if self.complete:
            return
        self._matcher.consume_token(token_id)
        self.update_mask()

    def update_mask(self) -> None:
        """Compute the mask for the next token."""
        self.complete = self._matcher.is_stopped() and not self._matcher.is_error()
        if not self.complete or not self.mask:  # the first mask may allow only the end
            self.mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.error = shorten_error(self._matcher.get_error())


def shorten_error(message: str) -> str:
    """Return llguidance's error ``message`` in a short form for clients."""
    if message.startswith("panic"):
        return "the grammar is too large or too complex"
    if message.startswith("NoExtensionBias"):
        return "found no text that matches the grammar: simplify the grammar"
    message = message.replace(_COERCE_ONE_OF_ADVICE, "Use anyOf")
    return message.partition("\n<")[0][:MAX_ERROR_CHARACTERS]


class _MaskThread(threading.Thread):
    # ``job`` is the matcher that the thread works on. Only the worker's loop may access it.
    def __init__(self, finished: SimpleQueue[_MaskThread]) -> None:
        super().__init__(name="grammar mask", daemon=True)
        self._inbox: SimpleQueue[tuple[Matcher, int] | None] = SimpleQueue()
        self._done: Final = finished
        self.job: Matcher | None = None
        self.since = 0.0
        self.cpu_since = 0.0

    def assign(self, matcher: Matcher, token_id: int) -> None:
        self.job = matcher
        self.since, self.cpu_since = time.monotonic(), self.read_cpu_s()
        self._inbox.put((matcher, token_id))

    def read_cpu_s(self) -> float:
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def stop(self) -> None:
        self._inbox.put(None)

    def run(self) -> None:
        while (assignment := self._inbox.get()) is not None:
            matcher, token_id = assignment
            try:
                matcher.consume_token(token_id)
            except Exception as error:  # noqa: BLE001 - any error concerns only this request
                matcher.error = shorten_error(str(error))
            del matcher, assignment
            self._done.put(self)


class MaskThreads:
    """Threads of a worker that compute masks. Only the worker's loop may call the methods."""

    def __init__(self, stack_bytes: int) -> None:
        self._stack_bytes = stack_bytes
        self._threads: list[_MaskThread] = []
        self._idle: list[_MaskThread] = []
        # (matcher, token, start of the wait).
        self._waiting: list[tuple[Matcher, int, float]] = []
        self._done: SimpleQueue[_MaskThread] = SimpleQueue()

    def advance(self, matcher: Matcher, token_id: int) -> None:
        """Advance ``matcher`` by a token in a thread. It is ``busy`` until the mask is ready."""
        matcher.busy = True
        self._waiting.append((matcher, token_id, time.monotonic()))
        self._assign_waiting_matchers()

    def wait_for_masks(self, timeout_s: float, is_idle: bool = False) -> None:
        """Wait up to ``timeout_s`` seconds for masks, and mark late ones as slow.

        Slow masks are not awaited, except one if ``is_idle``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            busy = self._busy_threads
            awaited = any(thread.job is not None and not thread.job.slow for thread in busy)
            awaited = awaited or (is_idle and bool(busy))
            left_s = deadline - time.monotonic() if awaited else 0.0
            try:
                thread = self._done.get(timeout=left_s) if left_s > 0 else self._done.get_nowait()
            except Empty:
                break
            self._on_finished(thread)
            is_idle = False
        for thread in self._busy_threads:
            if thread.job is not None and time.monotonic() - thread.since >= MASK_WAIT_S:
                thread.job.slow = True
        self._assign_waiting_matchers()

    def give_up_if_overdue(self, matcher: Matcher) -> bool:
        """Give up ``matcher`` if its time is used up. Return whether it was given up.

        Its thread cannot be stopped, so it continues at the lowest priority.
        """
        thread = self._find_thread(matcher)
        if thread is None:
            waiting = next((entry for entry in self._waiting if entry[0] is matcher), None)
            if waiting is None or time.monotonic() - waiting[2] < MAX_MASK_WALL_S:
                return False
            self._waiting.remove(waiting)
            return True
        if (
            not self.has_used_cpu_time(matcher)
            and time.monotonic() - thread.since < MAX_MASK_WALL_S
        ):
            return False
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, 19)
        return True

    def has_used_cpu_time(self, matcher: Matcher) -> bool:
        """Report whether the mask of ``matcher`` has used its CPU time, :data:`MAX_MASK_CPU_S`."""
        thread = self._find_thread(matcher)
        return thread is not None and thread.read_cpu_s() - thread.cpu_since >= MAX_MASK_CPU_S

    def _find_thread(self, matcher: Matcher) -> _MaskThread | None:
        return next((thread for thread in self._busy_threads if thread.job is matcher), None)

    def close(self) -> None:
        """Stop all threads. A busy thread stops as soon as llguidance returns."""
        for thread in self._threads:
            thread.stop()
        self._threads, self._idle, self._waiting = [], [], []

    @property
    def _busy_threads(self) -> list[_MaskThread]:
        return [thread for thread in self._threads if thread.job is not None]

    def _on_finished(self, thread: _MaskThread) -> None:
        if thread.job is None:
            return  # it was closed in the meantime
        slow, thread.job.busy = thread.job.slow, False
        # If it used little CPU time, the machine was slow and not the grammar.
        thread.job.slow = thread.read_cpu_s() - thread.cpu_since >= MASK_WAIT_S
        thread.job = None
        if slow:  # the thread may have the lowest priority, and another thread has replaced it
            self._threads.remove(thread)
            thread.stop()
        else:
            self._idle.append(thread)
        self._assign_waiting_matchers()

    def _assign_waiting_matchers(self) -> None:
        # The longest waiting first.
        left: list[tuple[Matcher, int, float]] = []
        for matcher, token_id, since in self._waiting:
            thread = None if self._has_max_slow_masks(matcher.tenant) else self._get_free_thread()
            if thread is None:
                left.append((matcher, token_id, since))
            else:
                thread.assign(matcher, token_id)
        self._waiting = left

    def _has_max_slow_masks(self, tenant: str) -> bool:
        jobs = (thread.job for thread in self._busy_threads)
        slow = sum(job is not None and job.slow and job.tenant == tenant for job in jobs)
        return slow >= MAX_SLOW_MASKS_PER_TENANT

    def _get_free_thread(self) -> _MaskThread | None:
        if self._idle:
            return self._idle.pop()
        slow = sum(thread.job is not None and thread.job.slow for thread in self._busy_threads)
        if (
            len(self._threads) - slow >= MAX_FAST_MASK_THREADS
            or len(self._threads) >= MAX_MASK_THREADS
        ):
            return None
        thread = _MaskThread(self._done)
        before = threading.stack_size(self._stack_bytes)
        try:
            thread.start()
        except RuntimeError:  # the process may start no more threads
            return None
        finally:
            threading.stack_size(before)
        self._threads.append(thread)
        return thread
