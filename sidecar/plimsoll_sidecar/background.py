"""Run the supervisor's threads. Each is a named :class:`BackgroundThread`, which logs failures.

A thread calls a function repeatedly; each call is a turn. A failure is logged once, until a turn
succeeds or fails with another type of error.

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
# Otherwise, a server could stop the thread for a day.
MAX_RETRY_AFTER_S = 300.0
# A sample takes milliseconds, or seconds if an engine or exporter responds slowly.
HANG_TIMEOUT_S = 60.0


class BackgroundThread(threading.Thread):
    """A daemon thread that calls a function repeatedly until it is stopped.

    Args:
        name: The name of the thread, as logs and metrics show it.
        run_turn: The function, which returns the seconds until its next call, or None to wait for
            :meth:`wake`.
        expected_errors: The types of errors that are logged without a traceback.
        max_pause_s: The longest pause after a failure, in seconds.
        max_retry_after_s: The longest pause that an error may request with ``retry_after_s``.

    """

    def __init__(
        self,
        name: str,
        run_turn: Callable[[], float | None],
        expected_errors: tuple[type[Exception], ...] = (),
        max_pause_s: float = MAX_PAUSE_S,
        max_retry_after_s: float = MAX_RETRY_AFTER_S,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._turn, self._expected = run_turn, expected_errors
        self._max_pause_s, self._max_retry_after_s = max_pause_s, max_retry_after_s
        self._ending, self._woken = threading.Event(), threading.Event()
        self._failures = 0
        self._logged: type[Exception] | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the last completed turn succeeded."""
        return not self._failures

    @property
    def is_stopping(self) -> bool:
        """Whether :meth:`stop` was called. No further turn then starts."""
        return self._ending.is_set()

    def try_start(self) -> bool:
        """Start the thread, and report whether this was possible.

        The engine may have used up the pod's process limit. A thread can be started only once.
        """
        try:
            self.start()
        except RuntimeError as error:
            log.debug("cannot start thread %s: %s", self.name, error)
            return False
        return True

    def wake(self) -> None:
        """Start the next turn as soon as the current turn has ended."""
        self._woken.set()

    def stop(self) -> None:
        """Prevent further turns. The current turn is not interrupted."""
        self._ending.set()
        self._woken.set()

    def run(self) -> None:
        """Call ``run_turn`` in the new thread until :meth:`stop` is called."""
        while not self._ending.is_set():
            self._woken.clear()
            try:
                pause = self._turn()
            except Exception as error:  # noqa: BLE001 - the next turn may succeed
                self._ending.wait(self._record_failure(error))
                continue
            if self._failures:
                log.info("thread %s has recovered", self.name)
            self._failures, self._logged = 0, None
            if pause is None or pause > 0:
                self._woken.wait(pause)

    def _record_failure(self, error: Exception) -> float:
        # Returns the seconds until the next turn.
        if type(error) is not self._logged:
            # Compare types, because the text of an error differs each time, for example in its
            # port.
            is_expected = isinstance(error, self._expected)
            log.error(
                "thread %s failed: %s", self.name, error, exc_info=None if is_expected else error
            )
            self._logged = type(error)
        requested_s: float | None = getattr(error, "retry_after_s", None)
        pause = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 16), self._max_pause_s)
        self._failures += 1
        if requested_s:
            return min(requested_s, self._max_retry_after_s)
        return pause * random.uniform(0.5, 1.0)  # a proxy may ask for a pause of 0 s


def run_in_thread(name: str, task: Callable[[], object]) -> None:
    """Run ``task`` in a daemon thread, and log an exception that it raises.

    Raises RuntimeError if no thread can be started.
    """

    def run() -> None:
        try:
            task()
        except Exception:  # no caller waits for the result
            log.exception("%s failed", name)

    threading.Thread(target=run, name=name, daemon=True).start()


def read_thread_status() -> dict[str, bool]:
    """Return whether the newest turn of each running thread succeeded, by name."""
    status: dict[str, bool] = {}
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundThread):
            status[thread.name] = thread.is_ok and status.get(thread.name, True)
    return status


class SamplingWatchdog:
    """Detects that the main thread takes no samples, for example because a driver hangs."""

    def __init__(self) -> None:
        self._sampled_at, self._logged = time.monotonic(), False

    def record_sample(self) -> None:
        """Record that a sample was taken."""
        self._sampled_at = time.monotonic()

    def is_ok(self) -> bool:
        """Report whether the main thread takes samples; if not, log its stack once."""
        age_s = time.monotonic() - self._sampled_at
        if age_s < HANG_TIMEOUT_S:
            self._logged = False
        elif not self._logged:
            self._logged = True
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            log.error(
                "the main thread has taken no sample for %.0f s; its stack:\n%s", age_s, stack
            )
        return age_s < HANG_TIMEOUT_S
