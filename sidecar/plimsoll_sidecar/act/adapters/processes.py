"""The processes of one engine, as the adapters find and end them, each signal fenced.

A PID that was given to another process is never signalled. To end an engine is to end all of its
processes: helpers outlive a frontend that was killed, and keep the memory or the device.
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
    Members,
    NoEngine,
    has_title,
    is_in,
    named,
)
from plimsoll_sidecar.signals.process_table import (
    ProcessId,
    age_s,
    command_line,
    descendants,
    identify,
    lives,
    parents,
    send,
)
from plimsoll_sidecar.signals.resident_memory import resident, total

log = logging.getLogger(__name__)

TERM_GRACE_S = 5.0
"""A frontend that hangs does not run its handler; one that is only slow can still end cleanly."""
ALONE_S = 5.0
"""Grace for a main process whose parts have all ended: it can finish no request any more, yet
vLLM's waits for its open streams as long as its clients do."""
FOLLOW_S = 3.0
"""Time for helpers to follow a main process that ended by itself."""
KILL_WAIT_S = 5.0
POLL_S = 0.05
SWEEP_S = 5.0
REFRESH_S = 5.0
"""Between searches for the engine's helpers, which start with it: not at every sample."""
LEFT_S = 60.0
"""A process with the title of an engine's part was started by a main process. If there is no main
process for this long, it has ended: a starting engine has one from the first moment on."""
MIN_BYTES = 1 << 20
"""A serving engine takes and returns less than this anyway: it is not the effect of a trim."""


class TerminationResult(msgspec.Struct, frozen=True):
    """How the end of an engine's processes went.

    ``trouble`` says what is left and why, None if nothing is; ``summary`` is a sentence for the
    timeline.
    """

    summary: str
    trouble: str | None = None


class Terminator:
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

    def end(self, main: ProcessId | None, grace_s: float = TERM_GRACE_S) -> TerminationResult:
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
            return TerminationResult("; ".join(summary), f"{_names(left)}: {why}")
        return TerminationResult("; ".join(summary))

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
        except (psutil.Error, OSError) as error:
            self._refused[process] = getattr(error, "strerror", None) or str(error)


def _sentence(main: ProcessId, number: signal.Signals, took_s: float) -> str:
    if number is signal.SIGKILL:
        return f"process {main.pid} was killed by SIGKILL {took_s:.1f} s after SIGTERM"
    return f"process {main.pid} ended within {took_s:.1f} s of SIGTERM"


def _names(processes: Iterable[ProcessId]) -> str:
    pids = sorted(process.pid for process in processes)
    listed = ", ".join(map(str, pids[:8])) + (", …" if len(pids) > 8 else "")
    return f"process{'es' if len(pids) > 1 else ''} {listed}"


class OwnedEngine:
    """The part of an adapter that acts on the engine's processes, without asking the engine.

    The verbs are those of :class:`~plimsoll_sidecar.act.adapters.engine_adapter.EngineAdapter`.
    """

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self._owned = OwnedProcesses(endpoint)

    def processes(self) -> list[ProcessMemory]:
        """Return the engine's living processes; empty where there is none."""
        return self._owned.listed()

    def page_signal(self) -> Signal | None:
        """None: no metrics page is read."""
        return None

    def has_ended(self) -> bool:
        """Whether the main process has ended and left the others."""
        return self._owned.have_ended()

    def sweep(self) -> str:
        """End processes of an engine that has ended. Says what was ended."""
        return self._owned.sweep()

    def end(self, frontend: ProcessId | None) -> TerminationResult:
        """End all of the engine's processes by signals."""
        return self._owned.end(frontend)

    def standby(self, epoch: str, lease_s: float) -> StandbyStatus | None:
        """Raise EngineError: only our own engine has one."""
        raise EngineError("this engine has no standby worker")


class OwnedProcesses:
    """Safe to use from several threads. ``main`` that is known stays until it ends."""

    def __init__(
        self, endpoint: EngineEndpoint, clock: Callable[[], float] = time.monotonic
    ) -> None:
        port = urlsplit(endpoint.serving_url).port or 80
        self._kind = endpoint.type
        self._identity = EngineFinder(port, endpoint.type, endpoint.container)
        self._clock, self._lock = clock, threading.Lock()
        self._members: Members | None = None
        self._looked = 0.0
        self._logged = ""
        self._left: set[ProcessId] = set()

    def find(self) -> Members:
        """Return the living processes; raise :class:`NoEngine`, and log it once, without any."""
        with self._lock:
            known = self._members
            fresh = self._clock() - self._looked < REFRESH_S
            if fresh and known is not None and known.main is not None and lives(known.main):
                return known
            return self._look()

    def _look(self) -> Members:
        self._looked = self._clock()
        before = self._members
        if before is not None and (before.main is None or not lives(before.main)):
            self._left |= set(before.helpers if before.main is not None else self._parts(before))
        self._left = {process for process in self._left if lives(process)}
        try:
            self._members = self._identity.find()
        except NoEngine as none:
            self._members = None
            if str(none) != self._logged:
                log.warning("no engine: %s", none)
            self._logged = str(none)
            raise
        self._logged = ""
        return self._members

    def listed(self, members: Members | None = None) -> list[ProcessMemory]:
        """Return the processes by role and name, the main one as the frontend.

        They are those of ``members``, or the living ones; empty where none is known.
        """
        members = members or self.known()
        if members is None:
            return []
        lines = ((process.pid, command_line(process.pid)) for process in members.everyone)
        return named(lines, members.main.pid if members.main else None, self._kind)

    def known(self) -> Members | None:
        """Return the living processes; None where none is known."""
        try:
            return self.find()
        except NoEngine:
            return None

    def have_ended(self) -> bool:
        """Return whether only parts of an engine are left, for longer than while it starts.

        Their ages count: the main process may have ended before the first look.
        """
        members = self.known()
        if members is None or members.main is not None:
            return False
        parts = self._parts(members)
        return bool(parts) and min(map(age_s, parts)) >= LEFT_S

    def _parts(self, members: Members) -> list[ProcessId]:
        """Those whose title only a part of this type of engine has."""
        return [p for p in members.everyone if has_title(command_line(p.pid), self._kind)]

    def sweep(self) -> str:
        """End the processes that an engine left behind for the next one, which may serve already.

        Returns what that was, empty where there was nothing. A container's runtime does the same,
        where it can.
        """
        with self._lock:
            members = self._members
            left = {process for process in self._left if lives(process)}
            if not left or members is None or members.main is None:
                return ""
            kept = {members.main, *members.helpers}
            self._left = set()
        ending = Terminator(left - kept).end(None)
        return "; ".join(filter(None, (ending.summary, ending.trouble)))

    def end(
        self, main: ProcessId | None = None, grace_s: float = TERM_GRACE_S
    ) -> TerminationResult:
        """End every process of the engine.

        ``main`` is the main process at the decision, if known; another engine that serves in its
        place by now is left alone.
        """
        with self._lock:
            try:
                members = self._look()
            except NoEngine as none:
                # Remembered processes can still be ended: their start times fence the signals.
                members = Members(main, (main,) if main is not None else ())
                if main is None or not lives(main):
                    return TerminationResult(f"no process was running ({none})")
        if main is not None and members.main is not None and members.main != main:
            left = tuple(p for p in members.everyone if p.started < members.main.started)
            members = Members(main, left, None)
        return _terminator(members, self._parts(members)).end(main or members.main, grace_s)


def sweep(members: Members) -> TerminationResult:
    """End the rest of an engine that ended by itself; nothing while its main process lives."""
    deadline = time.monotonic() + SWEEP_S
    while members.main is not None and lives(members.main):
        if time.monotonic() > deadline:
            return TerminationResult("")
        time.sleep(POLL_S)
    return _terminator(members).end(None)


def _terminator(members: Members, parts: Iterable[ProcessId] = ()) -> Terminator:
    container = members.container
    return Terminator(
        members.everyone, lambda process: container is None or is_in(process.pid, container), parts
    )


class TrimEffect(msgspec.Struct, frozen=True):
    """Bytes that came back, negative where memory grew meanwhile; None is unknown.

    ``devices`` says whether the engine has devices.
    """

    host: int | None
    device: int | None
    devices: bool

    @property
    def outcome(self) -> Outcome:
        """``Unknown`` if nothing measurable came back, and some memory could not be measured."""
        if max(self.host or 0, self.device or 0) >= MIN_BYTES:
            return Outcome.SUCCEEDED
        unmeasured = self.host is None or (self.devices and self.device is None)
        return Outcome.UNKNOWN if unmeasured else Outcome.FAILED

    @property
    def summary(self) -> str:
        """The bytes that came back, as a sentence for the incident's timeline."""
        parts = [f"{_bytes(self.host)} of host memory"]
        if self.devices or self.device is not None:
            parts.append(f"{_bytes(self.device)} of device memory")
        return f"gave back {' and '.join(parts)}"


def trim_effect(
    before: int | None, after: int | None, device: int | None, devices: bool
) -> TrimEffect:
    """From what the engine held before and after the trim; ``device`` is what torch gave back."""
    host = None if before is None or after is None else before - after
    return TrimEffect(host, device, devices)


def held(pids: Iterable[int]) -> int | None:
    """Host memory of these processes that a trim can return; None where one cannot be read."""
    sizes = [resident(pid) for pid in pids]
    known = [size.anon + size.shmem + (size.swap or 0) for size in sizes if size is not None]
    return total(known) if known and len(known) == len(sizes) else None


def _bytes(size: int | None) -> str:
    return "an unknown amount" if size is None else format_bytes(max(0, size))
