"""Find and end the processes of one engine.

A signal is sent only if the PID still belongs to the same process. All processes of an engine are
ended together, because helpers that outlive a frontend hold memory.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

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
    EngineNotFoundError,
    EngineProcesses,
    assign_roles,
    has_helper_title,
    is_in_container,
)
from plimsoll_sidecar.signals.process_table import (
    ProcessId,
    compute_age_s,
    find_descendants,
    identify,
    is_running,
    read_command_line,
    read_parent_pids,
    send_signal,
)
from plimsoll_sidecar.signals.resident_memory import read_resident_memory, sum_known

log = logging.getLogger(__name__)

# Between SIGTERM and SIGKILL. A frontend that hangs ignores SIGTERM; a slow frontend needs time for
# its shutdown.
TERM_GRACE_S = 5.0
# A main process without helpers can finish no request, but vLLM's waits as long as clients keep
# their streams open.
NO_HELPERS_GRACE_S = 5.0
# Helpers get this time if their main process ended without SIGKILL.
HELPER_EXIT_WAIT_S = 3.0
KILL_WAIT_S = 5.0
POLL_INTERVAL_S = 0.05
MAIN_EXIT_WAIT_S = 5.0
SEARCH_INTERVAL_S = 5.0
MIN_ORPHAN_AGE_S = 60.0
# A serving engine allocates and frees smaller amounts all the time.
MIN_TRIM_EFFECT_BYTES = 1 << 20


class TerminationResult(msgspec.Struct, frozen=True):
    """Summary of ending the processes; ``error`` names those that still run, or is None."""

    summary: str
    error: str | None = None


class Terminator:
    """Ends the processes of one engine with signals, including new child processes.

    Args:
        processes: The processes of the engine.
        is_allowed: Returns whether a process still belongs to the engine, before every signal.
        required_helpers: The helpers without which the main process cannot finish requests.

    """

    def __init__(
        self,
        processes: Iterable[ProcessId],
        is_allowed: Callable[[ProcessId], bool] = lambda process: True,
        required_helpers: Iterable[ProcessId] = (),
    ) -> None:
        self._processes, self._allowed, self._required_helpers = (
            set(processes),
            is_allowed,
            set(required_helpers),
        )
        self._refused: dict[ProcessId, str] = {}

    def terminate(self, main: ProcessId | None, grace_s: float = TERM_GRACE_S) -> TerminationResult:
        """End ``main``, and then all other processes: with SIGTERM, and later with SIGKILL.

        ``main`` has ``grace_s`` seconds between the two, or less if all required helpers have
        ended. If ``main`` is None, only the other processes are ended.
        """
        summary: list[str] = []
        if main is not None and is_running(main):
            self._processes.add(main)
            self._find_running()
            begin = time.monotonic()
            number = self._terminate_main(main, grace_s)
            took = time.monotonic() - begin
            if not is_running(main):
                summary.append(_format_main_end(main, number, took))
            self._wait_until_ended(
                self._processes - {main}, HELPER_EXIT_WAIT_S if number is signal.SIGTERM else 0.0
            )
        else:
            if main is not None:
                summary.append(f"process {main.pid} had already ended")
            self._wait_until_ended(self._find_running(), HELPER_EXIT_WAIT_S)
        if left := self._find_running() - {main}:
            verb = "were" if len(left) > 1 else "was"
            summary.append(f"{_format_pids(left)} {verb} still running")
            for number, wait_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_WAIT_S)):
                signalled = self._find_running()
                for process in signalled:
                    self._send_signal(process, number)
                self._wait_until_ended(signalled, wait_s)
                if ended := signalled - self._find_running():
                    summary.append(f"{_format_pids(ended)} ended after {number.name}")
        if left := self._find_running():
            why = "; ".join(sorted(set(self._refused.values()))) or "it still runs after SIGKILL"
            return TerminationResult("; ".join(summary), f"{_format_pids(left)}: {why}")
        return TerminationResult("; ".join(summary))

    def _terminate_main(self, process: ProcessId, grace_s: float) -> signal.Signals:
        # Returns the last signal that the process received.
        self._send_signal(process, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        if self._required_helpers:
            self._wait_until_ended({process}, grace_s, is_done=self._have_required_helpers_ended)
            deadline = min(deadline, time.monotonic() + NO_HELPERS_GRACE_S)
        self._wait_until_ended({process}, deadline - time.monotonic())
        if not is_running(process):
            return signal.SIGTERM
        self._send_signal(process, signal.SIGKILL)
        self._wait_until_ended({process}, KILL_WAIT_S)
        return signal.SIGKILL

    def _find_running(self) -> set[ProcessId]:
        alive = {process for process in self._processes if is_running(process)}
        children = find_descendants({process.pid for process in alive}, read_parent_pids())
        alive |= {child for pid in children if (child := identify(pid)) is not None}
        alive = {process for process in alive if self._allowed(process)}
        self._processes |= alive
        return alive

    def _have_required_helpers_ended(self) -> bool:
        return not any(is_running(part) for part in self._required_helpers)

    def _wait_until_ended(
        self,
        processes: Iterable[ProcessId],
        timeout_s: float,
        is_done: Callable[[], bool] = lambda: False,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        waited = list(processes)
        while time.monotonic() < deadline and not is_done():
            waited = [
                process
                for process in waited
                if is_running(process) and process not in self._refused
            ]
            if not waited:
                return
            time.sleep(POLL_INTERVAL_S)

    def _send_signal(self, process: ProcessId, signal_number: signal.Signals) -> None:
        try:
            owner = psutil.Process(process.pid).uids().effective
            if owner != os.geteuid():
                self._refused[process] = (
                    f"the process runs as UID {owner}, but the supervisor runs as UID "
                    f"{os.geteuid()}: run both as the same user"
                )
                return
            send_signal(process, signal_number, self._allowed)
        except (psutil.NoSuchProcess, ProcessLookupError):
            return
        except (psutil.Error, OSError) as error:
            self._refused[process] = getattr(error, "strerror", None) or str(error)


def _format_main_end(main: ProcessId, signal_number: signal.Signals, took_s: float) -> str:
    if signal_number is signal.SIGKILL:
        return f"process {main.pid} was killed by SIGKILL {took_s:.1f} s after SIGTERM"
    return f"process {main.pid} ended {took_s:.1f} s after SIGTERM"


def _format_pids(processes: Iterable[ProcessId]) -> str:
    pids = sorted(process.pid for process in processes)
    listed = ", ".join(map(str, pids[:8])) + (", …" if len(pids) > 8 else "")
    return f"process{'es' if len(pids) > 1 else ''} {listed}"


class OwnedEngine:
    """Base class of adapters: the operations on the engine's processes."""

    has_status_port = False

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self._owned = OwnedProcesses(endpoint)

    @property
    def can_test_partners(self) -> bool:
        """Always False: this engine exchanges no KV blocks with other engines."""
        return False

    @property
    def restart_blocker(self) -> str | None:
        """Always None: a restart of this engine affects no other engine."""
        return None

    def continue_epoch(self, epoch: str) -> None:
        """Do nothing: this engine numbers its epochs itself."""

    def list_processes(self) -> list[ProcessMemory]:
        """Return the running processes of the engine; empty if there are none."""
        return self._owned.list_processes()

    def read_metrics_signal(self) -> Signal | None:
        """Return None: this adapter reads no metrics page."""
        return None

    def has_ended(self) -> bool:
        """Report whether the main process has ended while its helpers still run."""
        return self._owned.has_main_ended()

    def end_leftover_processes(self) -> str:
        """End the processes of an earlier engine, and return their names as text."""
        return self._owned.end_leftover_processes()

    def end_processes(self, main: ProcessId | None) -> TerminationResult:
        """End all processes of the engine with signals."""
        return self._owned.end_processes(main)

    def lease_standby(self, epoch: str, lease_s: float) -> StandbyStatus | None:
        """Raise EngineError: only Plimsoll's own engine has a standby worker."""
        raise EngineError("this engine has no standby worker: only Plimsoll's own engine has one")


class OwnedProcesses:
    """Processes of one engine. Thread-safe.

    The main process stays the same until it ends.
    """

    def __init__(self, endpoint: EngineEndpoint) -> None:
        port = endpoint.serving_port
        self._kind = endpoint.type
        named = endpoint.process
        given = None if named is msgspec.UNSET else ProcessId(named.pid, named.started)
        self._identity = EngineFinder(port, endpoint.type, endpoint.container, given)
        self._lock = threading.Lock()
        self._members: EngineProcesses | None = None
        self._searched_at = 0.0
        self._logged = ""
        self._leftovers: set[ProcessId] = set()

    def find_processes(self) -> EngineProcesses:
        """Return the running processes, at most :data:`SEARCH_INTERVAL_S` old.

        Raises :class:`EngineNotFoundError`, and logs the error once.
        """
        with self._lock:
            stored_processes = self._members
            fresh = time.monotonic() - self._searched_at < SEARCH_INTERVAL_S
            if (
                fresh
                and stored_processes is not None
                and stored_processes.main is not None
                and is_running(stored_processes.main)
            ):
                return stored_processes
            return self._search()

    def _search(self) -> EngineProcesses:
        self._searched_at = time.monotonic()
        before = self._members
        if before is not None and (before.main is None or not is_running(before.main)):
            self._leftovers |= set(
                before.helpers if before.main is not None else self._find_titled_helpers(before)
            )
        self._leftovers = {process for process in self._leftovers if is_running(process)}
        try:
            self._members = self._identity.find_processes()
        except EngineNotFoundError as error:
            self._members = None
            if str(error) != self._logged:
                log.warning("cannot find the engine: %s", error)
            self._logged = str(error)
            raise
        self._logged = ""
        return self._members

    def list_processes(self, members: EngineProcesses | None = None) -> list[ProcessMemory]:
        """Return the processes with their roles and names. The main process is the ``Frontend``.

        Without ``members``, the running processes are found first; the result may be empty.
        """
        members = members or self.find_processes_or_none()
        if members is None:
            return []
        lines = ((process.pid, read_command_line(process.pid)) for process in members.processes)
        return assign_roles(lines, members.main.pid if members.main else None, self._kind)

    def find_processes_or_none(self) -> EngineProcesses | None:
        """Return the running processes; None if there are none."""
        try:
            return self.find_processes()
        except EngineNotFoundError:
            return None

    def has_main_ended(self) -> bool:
        """Report whether only orphaned helpers of an engine are running.

        They must be at least :data:`MIN_ORPHAN_AGE_S` old, because the search may miss processes of
        an engine that is starting.
        """
        members = self.find_processes_or_none()
        if members is None or members.main is not None:
            return False
        parts = self._find_titled_helpers(members)
        return bool(parts) and min(map(compute_age_s, parts)) >= MIN_ORPHAN_AGE_S

    def _find_titled_helpers(self, members: EngineProcesses) -> list[ProcessId]:
        # Only helpers of this engine type use such a title.
        return [
            p for p in members.processes if has_helper_title(read_command_line(p.pid), self._kind)
        ]

    def end_leftover_processes(self) -> str:
        """End the processes of an earlier engine, and return their names as text."""
        with self._lock:
            members = self._members
            left = {process for process in self._leftovers if is_running(process)}
            if not left or members is None or members.main is None:
                return ""
            engine_processes = {members.main, *members.helpers}
            self._leftovers = set()
        ending = Terminator(left - engine_processes).terminate(None)
        return "; ".join(filter(None, (ending.summary, ending.error)))

    def end_processes(
        self, main: ProcessId | None = None, grace_s: float = TERM_GRACE_S
    ) -> TerminationResult:
        """End every process of the engine, but not of an engine that has started since.

        ``main`` is the main process at the time of the decision to end the engine; None if unknown.
        """
        with self._lock:
            try:
                members = self._search()
            except EngineNotFoundError as error:
                # A known main process can still be ended: its start time protects a reused PID.
                members = EngineProcesses(main, (main,) if main is not None else ())
                if main is None or not is_running(main):
                    return TerminationResult(f"no process of the engine was running: {error}")
        if main is not None and members.main is not None and members.main != main:
            left = tuple(p for p in members.processes if p.started < members.main.started)
            members = EngineProcesses(main, left, None)
        return _make_terminator(members, self._find_titled_helpers(members)).terminate(
            main or members.main, grace_s
        )


def end_orphaned_helpers(members: EngineProcesses) -> TerminationResult:
    """Wait for the end of an engine's main process, and then end its other processes.

    If the main process still runs after :data:`MAIN_EXIT_WAIT_S`, no process is ended.
    """
    deadline = time.monotonic() + MAIN_EXIT_WAIT_S
    while members.main is not None and is_running(members.main):
        if time.monotonic() > deadline:
            return TerminationResult("")
        time.sleep(POLL_INTERVAL_S)
    return _make_terminator(members).terminate(None)


def _make_terminator(
    members: EngineProcesses, required_helpers: Iterable[ProcessId] = ()
) -> Terminator:
    container = members.container
    return Terminator(
        members.processes,
        lambda process: container is None or is_in_container(process.pid, container),
        required_helpers,
    )


class TrimEffect(msgspec.Struct, frozen=True):
    """Memory that a trim has freed, in bytes; None if unknown, and negative if it grew."""

    host: int | None
    device: int | None
    has_devices: bool

    @property
    def outcome(self) -> Outcome:
        """Outcome of the trim.

        A trim succeeds if it frees at least :data:`MIN_TRIM_EFFECT_BYTES` of host or device memory.
        Otherwise, the outcome is ``Failed``, or ``Unknown`` if one of the two could not be
        measured.
        """
        if max(self.host or 0, self.device or 0) >= MIN_TRIM_EFFECT_BYTES:
            return Outcome.SUCCEEDED
        unmeasured = self.host is None or (self.has_devices and self.device is None)
        return Outcome.UNKNOWN if unmeasured else Outcome.FAILED

    @property
    def summary(self) -> str:
        """Freed memory as text."""
        parts = [f"{_format_bytes(self.host)} of host memory"]
        if self.has_devices or self.device is not None:
            parts.append(f"{_format_bytes(self.device)} of device memory")
        return f"freed {' and '.join(parts)}"


def measure_trim_effect(
    host_before: int | None, host_after: int | None, device_freed: int | None, has_devices: bool
) -> TrimEffect:
    """Return the effect of a trim. Sizes are in bytes; None if unknown."""
    host = None if host_before is None or host_after is None else host_before - host_after
    return TrimEffect(host, device_freed, has_devices)


def measure_trimmable_bytes(pids: Iterable[int]) -> int | None:
    """Return the host memory that a trim can free, in bytes.

    None if unknown for at least one process.
    """
    sizes = [read_resident_memory(pid) for pid in pids]
    known_sizes = [size.anon + size.shmem + (size.swap or 0) for size in sizes if size is not None]
    return sum_known(known_sizes) if known_sizes and len(known_sizes) == len(sizes) else None


def _format_bytes(size_bytes: int | None) -> str:
    return "an unknown amount" if size_bytes is None else format_bytes(max(0, size_bytes))
