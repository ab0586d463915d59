"""Run the supervisor's threads. Each is a named :class:`BackgroundThread`, which logs failures.

A thread works in turns. A failure is logged once, until a turn succeeds or fails with another type
of error, and the pauses after failures grow. The metric ``plimsoll_supervisor_part_ok`` reports
whether the newest turn succeeded. A turn may block for any time.

=============  ===============================================  ==================================
thread         what it does                                     where
=============  ===============================================  ==================================
actuator       executes commands, one at a time                 ``act/actuator.py``
slot           renews the restart slot, stores restart counts   ``act/actuator.py``
standby        renews the lease on the standby worker           ``act/standby.py``
publisher      publishes incidents in Kubernetes                ``record/publisher.py``
state-server   serves ``/metrics``, ``/state`` and the page     ``record/server.py``
ask-server     serves manual actions                            ``ask_server.py``
group-members  polls the other pods of a multi-node group       ``signals/other_pods.py``
group-leader   polls the leader of a multi-node group           ``signals/other_pods.py``
=============  ===============================================  ==================================

The main thread samples and decides; :class:`SamplingWatchdog` detects that it hangs.
:func:`run_in_thread` starts a thread for one task.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""First and longest pause after a failure, in seconds."""
MAX_RETRY_AFTER_S = 300.0
"""Longest pause in seconds that an error may request (``retry_after_s``).

A server that asked for a day would stop the thread.
"""
HANG_S = 60.0
"""Seconds without a sample after which the main thread counts as hanging.

A sample takes milliseconds, or seconds if an answer is slow.
"""


class BackgroundThread(threading.Thread):
    """A daemon thread that calls ``turn`` repeatedly until it is stopped.

    ``turn`` returns the seconds until the next call, or None to wait for :meth:`wake`. Errors of
    the ``expected`` types are logged without a traceback. Pauses after failures grow to
    ``max_pause_s``. After an error with ``retry_after_s``, from a Retry-After header, the pause has
    that length, up to ``max_retry_after_s``.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        expected: tuple[type[Exception], ...] = (),
        max_pause_s: float = MAX_PAUSE_S,
        max_retry_after_s: float = MAX_RETRY_AFTER_S,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._turn, self._expected = turn, expected
        self._max_pause_s, self._max_retry_after_s = max_pause_s, max_retry_after_s
        self._ending, self._woken = threading.Event(), threading.Event()
        self._failures = 0
        self._logged: type[Exception] | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the newest completed turn succeeded."""
        return not self._failures

    @property
    def is_stopping(self) -> bool:
        """Whether no further turn will start."""
        return self._ending.is_set()

    def wake(self) -> None:
        """Start the next turn now, or right after the current one."""
        self._woken.set()

    def stop(self) -> None:
        """Start no further turn, without interrupting the current one."""
        self._ending.set()
        self._woken.set()

    def run(self) -> None:
        """Call ``turn`` in a loop until stopped. :meth:`start` runs this in the thread."""
        while not self._ending.is_set():
            self._woken.clear()
            try:
                pause = self._turn()
            except Exception as error:  # noqa: BLE001 - the next turn may succeed
                self._ending.wait(self._record_failure(error))
                continue
            if self._failures:
                log.info("%s has recovered", self.name)
            self._failures, self._logged = 0, None
            if pause is None or pause > 0:
                self._woken.wait(pause)

    def _record_failure(self, error: Exception) -> float:
        """Record a failure, and return the pause after it in seconds."""
        if type(error) is not self._logged:
            # Compare types, because the text of an error differs each time, for example in its
            # port.
            known = isinstance(error, self._expected)
            log.error("%s failed: %s", self.name, error, exc_info=None if known else error)
            self._logged = type(error)
        wished: float | None = getattr(error, "retry_after_s", None)
        pause = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 16), self._max_pause_s)
        self._failures += 1
        if wished is None:
            return pause * random.uniform(0.5, 1.0)
        return min(wished, self._max_retry_after_s)


def run_in_thread(name: str, task: Callable[[], object]) -> None:
    """Run ``task`` in a thread that ends with the task or the process.

    Raises RuntimeError if no thread can be started, for example because the engine's processes have
    used up the pod's limit.
    """

    def run() -> None:
        try:
            task()
        except Exception:  # no caller waits for the result
            log.exception("%s failed", name)

    threading.Thread(target=run, name=name, daemon=True).start()


def read_thread_status() -> dict[str, bool]:
    """Return whether the newest turn of each running thread succeeded, by thread name."""
    found: dict[str, bool] = {}
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundThread):
            found[thread.name] = thread.is_ok and found.get(thread.name, True)
    return found


class SamplingWatchdog:
    """Detect a main thread that takes no samples because a driver or a volume hangs.

    Another thread calls :meth:`is_ok`, which logs once where the main thread hangs.
    """

    def __init__(self) -> None:
        self._at, self._logged = time.monotonic(), False

    def record_sample(self) -> None:
        """Record that a sample was taken."""
        self._at = time.monotonic()

    def is_ok(self) -> bool:
        """Report whether the last sample, or the start, was less than :data:`HANG_S` ago."""
        age_s = time.monotonic() - self._at
        if age_s < HANG_S:
            self._logged = False
        elif not self._logged:
            self._logged = True
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            log.error(
                "the main thread has taken no sample for %.0f s; its stack:\n%s", age_s, stack
            )
        return age_s < HANG_S
