"""Signals to the engine's processes, fenced.

A PID that was given to another process is never signalled.

Whatever ends an engine ends all of its processes. A frontend that is killed takes none of its
helpers along, and they keep the memory, or the device, for as long as anybody looks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

import msgspec
import psutil

from plimsoll_sidecar.signals.process.process_table import (
    ProcessId,
    descendants,
    identify,
    lives,
    parents,
    send,
)

TERM_GRACE_S = 5.0
"""A frontend that hangs does not run its handler; one that is only slow can still end cleanly."""
ALONE_S = 5.0
"""For a main process whose parts have all ended: it can finish no request any more, yet vLLM's
waits for its open streams as long as its clients do."""
FOLLOW_S = 3.0
"""Time for helpers to follow a main process that ended by itself."""
KILL_WAIT_S = 5.0
POLL_S = 0.05


class Ending(msgspec.Struct, frozen=True):
    """What became of an engine's processes.

    ``trouble`` says what is left and why, None where nothing is; ``summary`` is a sentence for the
    timeline.
    """

    summary: str
    trouble: str | None = None


class Ender:
    """Ends one engine.

    ``allowed`` is asked before every signal: whether the process is still the engine's. Children
    that are started meanwhile belong to those that started them. ``parts`` are the processes
    without which the main one can do no work.
    """

    def __init__(
        self,
        everyone: Iterable[ProcessId],
        allowed: Callable[[ProcessId], bool] = lambda process: True,
        parts: Iterable[ProcessId] = (),
    ) -> None:
        self._everyone, self._allowed, self._parts = set(everyone), allowed, set(parts)
        self._refused: dict[ProcessId, str] = {}

    def end(self, main: ProcessId | None, grace_s: float = TERM_GRACE_S) -> Ending:
        """Send SIGTERM to ``main``, wait a grace, send SIGKILL; then the same for what it left.

        The grace is short once its parts have ended.
        """
        summary: list[str] = []
        if main is not None and lives(main):
            self._everyone.add(main)
            self._living()
            begin = time.monotonic()
            number = self._one(main, grace_s)
            took = time.monotonic() - begin
            if not lives(main):
                summary.append(_sentence(main, number, took))
            self._wait(self._everyone - {main}, FOLLOW_S if number is signal.SIGTERM else 0.0)
        else:
            if main is not None:
                summary.append(f"process {main.pid} had already ended")
            self._wait(self._living(), FOLLOW_S)
        if left := self._living() - {main}:
            summary.append(f"{_names(left)} still ran")
            for number, wait_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_WAIT_S)):
                signalled = self._living()
                for process in signalled:
                    self._send(process, number)
                self._wait(signalled, wait_s)
                if ended := signalled - self._living():
                    summary.append(f"{_names(ended)} ended by {number.name}")
        if left := self._living():
            why = "; ".join(sorted(set(self._refused.values()))) or "still running after SIGKILL"
            return Ending("; ".join(summary), f"{_names(left)}: {why}")
        return Ending("; ".join(summary))

    def _one(self, process: ProcessId, grace_s: float) -> signal.Signals:
        """Return the signal that ended it, or the last that was tried."""
        self._send(process, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        if self._parts:
            self._wait({process}, grace_s, until=self._is_alone)
            deadline = min(deadline, time.monotonic() + ALONE_S)
        self._wait({process}, deadline - time.monotonic())
        if not lives(process):
            return signal.SIGTERM
        self._send(process, signal.SIGKILL)
        self._wait({process}, KILL_WAIT_S)
        return signal.SIGKILL

    def _living(self) -> set[ProcessId]:
        """Those that live, and what they have started since."""
        alive = {process for process in self._everyone if lives(process)}
        children = descendants({process.pid for process in alive}, parents())
        alive |= {found for pid in children if (found := identify(pid)) is not None}
        alive = {process for process in alive if self._allowed(process)}
        self._everyone |= alive
        return alive

    def _is_alone(self) -> bool:
        """Whether every part has ended."""
        return not any(lives(part) for part in self._parts)

    def _wait(
        self,
        processes: Iterable[ProcessId],
        seconds: float,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for the end of all of them, or ``until`` that is so."""
        deadline = time.monotonic() + seconds
        waited = list(processes)
        while time.monotonic() < deadline and not until():
            waited = [one for one in waited if lives(one) and one not in self._refused]
            if not waited:
                return
            time.sleep(POLL_S)

    def _send(self, process: ProcessId, number: signal.Signals) -> None:
        try:
            owner = psutil.Process(process.pid).uids().effective
            if owner != os.geteuid():
                self._refused[process] = (
                    f"it runs as UID {owner}, the supervisor as UID {os.geteuid()}"
                )
                return
            send(process, number, self._allowed)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return
        except OSError as error:
            self._refused[process] = str(error.strerror)


def _sentence(main: ProcessId, number: signal.Signals, took_s: float) -> str:
    if number is signal.SIGKILL:
        return f"process {main.pid} was killed by SIGKILL {took_s:.1f} s after SIGTERM"
    return f"process {main.pid} ended within {took_s:.1f} s of SIGTERM"


def _names(processes: Iterable[ProcessId]) -> str:
    pids = sorted(process.pid for process in processes)
    listed = ", ".join(map(str, pids[:8])) + (", …" if len(pids) > 8 else "")
    return f"process{'es' if len(pids) > 1 else ''} {listed}"
