"""The supervisor's threads: each is a :class:`Part` with a name, and none ends unnoticed.

A part does its work in turns. A failure is logged once, until a turn succeeds or fails in another
way, and the pauses after failures grow. The metric ``plimsoll_supervisor_part_ok`` says whether the
newest turn succeeded. A turn may block for as long as it likes.

=============  ===============================================  ==================================
part           what it does                                     where
=============  ===============================================  ==================================
actuator       carries out commands, one at a time              ``act/actuator.py``
slot           keeps the restart slot and the restart counts    ``act/actuator.py``
standby        renews the lease on the engine's standby worker  ``act/standby.py``
publisher      brings incidents to Kubernetes                   ``record/publisher.py``
state-server   ``/metrics``, ``/state`` and the page            ``record/server.py``
ask-server     takes manual actions                             ``ask_server.py``
group-members  asks the other pods of a multi-node group        ``signals/other_pods.py``
group-leader   asks the leader of a multi-node group            ``signals/other_pods.py``
=============  ===============================================  ==================================

The main thread samples and decides; :class:`Sampling` says when it hangs. :func:`once` starts a
thread for a single task.
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

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
LONGEST_WISH_S = 300.0
"""Pause that an answer may ask for (``retry_after_s`` of its error): a day would be an outage."""
HANGS_S = 60.0
"""Longest time between two samples; a sample takes milliseconds, and its slowest answer seconds."""


class Part(threading.Thread):
    """A thread that calls ``turn`` until it is stopped; it ends with the process at the latest.

    ``turn`` returns the seconds until the next one, None for until :meth:`wake`. Errors of the
    ``expected`` types are logged without a traceback. Pauses after failures grow to ``longest_s``;
    one that an answer asks for may be as long as ``longest_wish_s``.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        expected: tuple[type[Exception], ...] = (),
        longest_s: float = LONGEST_PAUSE_S,
        longest_wish_s: float = LONGEST_WISH_S,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._turn, self._expected = turn, expected
        self._longest_s, self._longest_wish_s = longest_s, longest_wish_s
        self._ending, self._woken = threading.Event(), threading.Event()
        self._failures = 0
        self._told: type[Exception] | None = None

    @property
    def ok(self) -> bool:
        """Whether the newest turn that has ended succeeded."""
        return not self._failures

    @property
    def stopping(self) -> bool:
        """Whether no further turn will begin."""
        return self._ending.is_set()

    def wake(self) -> None:
        """Begin the next turn now, or right after the present one."""
        self._woken.set()

    def stop(self) -> None:
        """Begin no further turn; the present one is not cut short."""
        self._ending.set()
        self._woken.set()

    def run(self) -> None:
        """Take turns; called by :meth:`start`."""
        while not self._ending.is_set():
            self._woken.clear()
            try:
                pause = self._turn()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next turn may succeed
                self._ending.wait(self._failed(error))
                continue
            if self._failures:
                log.info("%s works again", self.name)
            self._failures, self._told = 0, None
            if pause is None or pause > 0:
                self._woken.wait(pause)

    def _failed(self, error: Exception) -> float:
        """Note a failure; return the pause after it, in seconds."""
        if type(error) is not self._told:
            # The text of an error differs from try to try: ports, addresses of objects.
            known = isinstance(error, self._expected)
            log.error("%s failed: %s", self.name, error, exc_info=None if known else error)
            self._told = type(error)
        wished: float | None = getattr(error, "retry_after_s", None)
        pause = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 16), self._longest_s)
        self._failures += 1
        if wished is None:
            return pause * random.uniform(0.5, 1.0)
        return min(wished, self._longest_wish_s)


def once(name: str, task: Callable[[], object]) -> None:
    """Run ``task`` in a thread of its own, which ends with it or with the process.

    Raises RuntimeError where the machine has no thread left: the engine's processes may use up
    those of the pod.
    """

    def run() -> None:
        try:
            task()
        except Exception:  # no caller waits for it: the log is the only place
            log.exception("%s failed", name)

    threading.Thread(target=run, name=name, daemon=True).start()


def parts_ok() -> dict[str, bool]:
    """Return for each part that runs now whether its newest turn succeeded."""
    found: dict[str, bool] = {}
    for thread in threading.enumerate():
        if isinstance(thread, Part):
            found[thread.name] = thread.ok and found.get(thread.name, True)
    return found


class Sampling:
    """Whether the main thread still takes samples: a driver or a volume that hangs stops it.

    :meth:`ok` is asked by another thread. It logs where the main thread hangs, once.
    """

    def __init__(self) -> None:
        self._at, self._told = time.monotonic(), False

    def sampled(self) -> None:
        """Note that a sample was taken now."""
        self._at = time.monotonic()

    def ok(self) -> bool:
        """Return whether the newest sample, or the start, is less than :data:`HANGS_S` ago."""
        age_s = time.monotonic() - self._at
        if age_s < HANGS_S:
            self._told = False
        elif not self._told:
            self._told = True
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            log.error("no sample for %.0f s; the main thread is at:\n%s", age_s, stack)
        return age_s < HANGS_S
