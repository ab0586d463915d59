"""Finds and ends the processes of one engine; every signal is fenced.

A process with a reused PID is never signalled. Ending an engine means ending all of its processes:
helper processes outlive a frontend that was killed, and keep memory or the device.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import msgspec
import psutil

from plimsoll_api.admin import ProcessMemory, StandbyStatus
from plimsoll_api.state import Signal
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.command import Outcome
from plimsoll_sidecar.signals.engine_processes import (
    EngineFinder,
    EngineNotFound,
    EngineProcesses,
    assign_roles,
    has_helper_title,
    is_in_container,
)
from plimsoll_sidecar.signals.process_table import (
    ProcessId,
    age_s,
    command_line,
    descendants,
    identify,
    is_running,
    parents,
    send_signal,
)
from plimsoll_sidecar.signals.resident_memory import read_resident, sum_known

log = logging.getLogger(__name__)

TERM_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL. A frontend that hangs does not run its handler; one that is
only slow still can end cleanly."""
NO_HELPERS_GRACE_S = 5.0
"""Seconds for a main process whose helpers have all ended. It cannot finish any request, but vLLM's
waits as long as clients keep their streams open."""
HELPER_EXIT_S = 3.0
"""Seconds within which helpers end after a main process that ended by itself."""
KILL_WAIT_S = 5.0
"""Seconds to wait for the end of a process after SIGKILL."""
POLL_S = 0.05
MAIN_EXIT_S = 5.0
"""Seconds to wait for the end of the main process."""
REFRESH_S = 5.0
"""Seconds between two searches for the engine's helpers, which start together with it."""
ORPHAN_AGE_S = 60.0
"""Seconds after which helpers without a main process count as orphaned. An engine that is starting
always has a main process."""
MIN_EFFECT_BYTES = 1 << 20
"""Smallest effect of a trim: a serving engine allocates and frees less than this anyway."""


class TerminationResult(msgspec.Struct, frozen=True):
    """The result of ending the processes of an engine.

    ``error`` names the processes that are still running and why, None for none. ``summary`` is a
    sentence for the timeline.
    """

    summary: str
    error: str | None = None


class Terminator:
    """Terminator of the processes of one engine.

    ``allowed`` is called before every signal and returns whether the process still belongs to the
    engine. Children that start meanwhile are ended, too. ``parts`` are the processes without which
    the main process cannot work.
    """

    def __init__(
        self,
        everyone: Iterable[ProcessId],
        allowed: Callable[[ProcessId], bool] = lambda process: True,
        parts: Iterable[ProcessId] = (),
    ) -> None:
        self._processes, self._allowed, self._titled_helpers = set(everyone), allowed, set(parts)
        self._refused: dict[ProcessId, str] = {}

    def end(self, main: ProcessId | None, grace_s: float = TERM_GRACE_S) -> TerminationResult:
        """End ``main`` with SIGTERM and, after a grace period, SIGKILL; then all others.

        The grace period is short once the parts have ended.
        """
        summary: list[str] = []
        if main is not None and is_running(main):
            self._processes.add(main)
            self._find_running()
            begin = time.monotonic()
            number = self._end_main(main, grace_s)
            took = time.monotonic() - begin
            if not is_running(main):
                summary.append(_format_end(main, number, took))
            self._wait(self._processes - {main}, HELPER_EXIT_S if number is signal.SIGTERM else 0.0)
        else:
            if main is not None:
                summary.append(f"process {main.pid} had already ended")
            self._wait(self._find_running(), HELPER_EXIT_S)
        if left := self._find_running() - {main}:
            summary.append(f"{_format_pids(left)} still ran")
            for number, wait_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_WAIT_S)):
                signalled = self._find_running()
                for process in signalled:
                    self._send(process, number)
                self._wait(signalled, wait_s)
                if ended := signalled - self._find_running():
                    summary.append(f"{_format_pids(ended)} ended by {number.name}")
        if left := self._find_running():
            why = "; ".join(sorted(set(self._refused.values()))) or "still running after SIGKILL"
            return TerminationResult("; ".join(summary), f"{_format_pids(left)}: {why}")
        return TerminationResult("; ".join(summary))

    def _end_main(self, process: ProcessId, grace_s: float) -> signal.Signals:
        """Return the signal that ended the process, or the last one that was sent."""
        self._send(process, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        if self._titled_helpers:
            self._wait({process}, grace_s, until=self._is_alone)
            deadline = min(deadline, time.monotonic() + NO_HELPERS_GRACE_S)
        self._wait({process}, deadline - time.monotonic())
        if not is_running(process):
            return signal.SIGTERM
        self._send(process, signal.SIGKILL)
        self._wait({process}, KILL_WAIT_S)
        return signal.SIGKILL

    def _find_running(self) -> set[ProcessId]:
        """Return the processes that are running, including their new children."""
        alive = {process for process in self._processes if is_running(process)}
        children = descendants({process.pid for process in alive}, parents())
        alive |= {found for pid in children if (found := identify(pid)) is not None}
        alive = {process for process in alive if self._allowed(process)}
        self._processes |= alive
        return alive

    def _is_alone(self) -> bool:
        """Report whether all parts have ended."""
        return not any(is_running(part) for part in self._titled_helpers)

    def _wait(
        self,
        processes: Iterable[ProcessId],
        seconds: float,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until all processes have ended, or until ``until`` returns True."""
        deadline = time.monotonic() + seconds
        waited = list(processes)
        while time.monotonic() < deadline and not until():
            waited = [one for one in waited if is_running(one) and one not in self._refused]
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
            send_signal(process, number, self._allowed)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return
        except (psutil.Error, OSError) as error:
            self._refused[process] = getattr(error, "strerror", None) or str(error)


def _format_end(main: ProcessId, number: signal.Signals, took_s: float) -> str:
    if number is signal.SIGKILL:
        return f"process {main.pid} was killed by SIGKILL {took_s:.1f} s after SIGTERM"
    return f"process {main.pid} ended within {took_s:.1f} s of SIGTERM"


def _format_pids(processes: Iterable[ProcessId]) -> str:
    pids = sorted(process.pid for process in processes)
    listed = ", ".join(map(str, pids[:8])) + (", …" if len(pids) > 8 else "")
    return f"process{'es' if len(pids) > 1 else ''} {listed}"


class OwnedEngine:
    """The operations of an adapter that signal processes and need no answer of the engine.

    They are those of :class:`~plimsoll_sidecar.act.adapters.engine_adapter.EngineAdapter`.
    """

    has_status_port = False

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self._owned = OwnedProcesses(endpoint)

    def processes(self) -> list[ProcessMemory]:
        """Return the running processes of the engine; empty for none."""
        return self._owned.list_all()

    def page_signal(self) -> Signal | None:
        """Return None: no metrics page is read."""
        return None

    def has_ended(self) -> bool:
        """Report whether the main process has ended and left other processes behind."""
        return self._owned.has_main_ended()

    def sweep(self) -> str:
        """End processes of an earlier engine; return a text that names them."""
        return self._owned.sweep()

    def end(self, frontend: ProcessId | None) -> TerminationResult:
        """End all processes of the engine with signals."""
        return self._owned.end(frontend)

    def standby(self, epoch: str, lease_s: float) -> StandbyStatus | None:
        """Raise EngineError: only Plimsoll's own engine has a standby worker."""
        raise EngineError("this engine has no standby worker")


class OwnedProcesses:
    """The processes of one engine. Thread-safe. A known main process is kept until it ends."""

    def __init__(
        self, endpoint: EngineEndpoint, clock: Callable[[], float] = time.monotonic
    ) -> None:
        port = urlsplit(endpoint.serving_url).port or 80
        self._kind = endpoint.type
        named = endpoint.process
        given = None if named is msgspec.UNSET else ProcessId(named.pid, named.started)
        self._identity = EngineFinder(port, endpoint.type, endpoint.container, given)
        self._clock, self._lock = clock, threading.Lock()
        self._found: EngineProcesses | None = None
        self._searched_at = 0.0
        self._logged = ""
        self._leftovers: set[ProcessId] = set()

    def find(self) -> EngineProcesses:
        """Return the running processes. Raises and logs :class:`EngineNotFound`."""
        with self._lock:
            known = self._found
            fresh = self._clock() - self._searched_at < REFRESH_S
            if fresh and known is not None and known.main is not None and is_running(known.main):
                return known
            return self._search()

    def _search(self) -> EngineProcesses:
        self._searched_at = self._clock()
        before = self._found
        if before is not None and (before.main is None or not is_running(before.main)):
            self._leftovers |= set(
                before.helpers if before.main is not None else self._titled_helpers(before)
            )
        self._leftovers = {process for process in self._leftovers if is_running(process)}
        try:
            self._found = self._identity.find()
        except EngineNotFound as none:
            self._found = None
            if str(none) != self._logged:
                log.warning("engine not found: %s", none)
            self._logged = str(none)
            raise
        self._logged = ""
        return self._found

    def list_all(self, members: EngineProcesses | None = None) -> list[ProcessMemory]:
        """Return the processes with role and name; the main process is the frontend.

        Without ``members``, finds the running processes first. Empty if there are none.
        """
        members = members or self.find_or_none()
        if members is None:
            return []
        lines = ((process.pid, command_line(process.pid)) for process in members.processes)
        return assign_roles(lines, members.main.pid if members.main else None, self._kind)

    def find_or_none(self) -> EngineProcesses | None:
        """Return the running processes; None if there is no engine."""
        try:
            return self.find()
        except EngineNotFound:
            return None

    def has_main_ended(self) -> bool:
        """Report whether only orphaned helper processes of an engine are running.

        Their age decides, because the main process may have ended before the first search.
        """
        members = self.find_or_none()
        if members is None or members.main is not None:
            return False
        parts = self._titled_helpers(members)
        return bool(parts) and min(map(age_s, parts)) >= ORPHAN_AGE_S

    def _titled_helpers(self, members: EngineProcesses) -> list[ProcessId]:
        """Return the processes with a title that only helpers of this engine type have."""
        return [p for p in members.processes if has_helper_title(command_line(p.pid), self._kind)]

    def sweep(self) -> str:
        """End the processes that an earlier engine left behind; return a text that names them.

        The text is empty if there were none. A container runtime does the same, if it can.
        """
        with self._lock:
            members = self._found
            left = {process for process in self._leftovers if is_running(process)}
            if not left or members is None or members.main is None:
                return ""
            kept = {members.main, *members.helpers}
            self._leftovers = set()
        ending = Terminator(left - kept).end(None)
        return "; ".join(filter(None, (ending.summary, ending.error)))

    def end(
        self, main: ProcessId | None = None, grace_s: float = TERM_GRACE_S
    ) -> TerminationResult:
        """End every process of the engine.

        ``main`` is the main process at the time of the decision, if known. Another engine that has
        started since is not affected.
        """
        with self._lock:
            try:
                members = self._search()
            except EngineNotFound as none:
                # A known main process can still be ended: its start time fences the signals.
                members = EngineProcesses(main, (main,) if main is not None else ())
                if main is None or not is_running(main):
                    return TerminationResult(f"no process was running ({none})")
        if main is not None and members.main is not None and members.main != main:
            left = tuple(p for p in members.processes if p.started < members.main.started)
            members = EngineProcesses(main, left, None)
        return _terminator(members, self._titled_helpers(members)).end(
            main or members.main, grace_s
        )


def end_leftovers(members: EngineProcesses) -> TerminationResult:
    """End the remaining processes of an engine that ended by itself.

    Does nothing while its main process is running.
    """
    deadline = time.monotonic() + MAIN_EXIT_S
    while members.main is not None and is_running(members.main):
        if time.monotonic() > deadline:
            return TerminationResult("")
        time.sleep(POLL_S)
    return _terminator(members).end(None)


def _terminator(members: EngineProcesses, parts: Iterable[ProcessId] = ()) -> Terminator:
    container = members.container
    return Terminator(
        members.processes,
        lambda process: container is None or is_in_container(process.pid, container),
        parts,
    )


class TrimEffect(msgspec.Struct, frozen=True):
    """The bytes that a trim freed, negative if memory grew meanwhile; None is unknown.

    ``devices`` is whether the engine has devices.
    """

    host: int | None
    device: int | None
    devices: bool

    @property
    def outcome(self) -> Outcome:
        """``Unknown`` if nothing was freed and some of the memory could not be measured."""
        if max(self.host or 0, self.device or 0) >= MIN_EFFECT_BYTES:
            return Outcome.SUCCEEDED
        unmeasured = self.host is None or (self.devices and self.device is None)
        return Outcome.UNKNOWN if unmeasured else Outcome.FAILED

    @property
    def summary(self) -> str:
        """The freed memory, as a sentence for the incident's timeline."""
        parts = [f"{_bytes(self.host)} of host memory"]
        if self.devices or self.device is not None:
            parts.append(f"{_bytes(self.device)} of device memory")
        return f"gave back {' and '.join(parts)}"


def trim_effect(
    before: int | None, after: int | None, device: int | None, devices: bool
) -> TrimEffect:
    """Compare host memory before and after the trim; ``device`` is what torch freed."""
    host = None if before is None or after is None else before - after
    return TrimEffect(host, device, devices)


def trimmable_bytes(pids: Iterable[int]) -> int | None:
    """Return the host memory of these processes that a trim can free; None if unknown."""
    sizes = [read_resident(pid) for pid in pids]
    known = [size.anon + size.shmem + (size.swap or 0) for size in sizes if size is not None]
    return sum_known(known) if known and len(known) == len(sizes) else None


def _bytes(size: int | None) -> str:
    return "an unknown amount" if size is None else format_bytes(max(0, size))
