"""The processes of one engine, as the adapters know and end them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from plimsoll_api.admin import ProcessMemory, StandbyStatus
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.termination import TERM_GRACE_S, Ender, Ending
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.signals.process.engine_processes import EngineFinder, Members, NoEngine, is_in
from plimsoll_sidecar.signals.process.process_table import ProcessId, age_s, command_line, lives
from plimsoll_sidecar.signals.process.programs import has_title, named

log = logging.getLogger(__name__)

SWEEP_S = 5.0
POLL_S = 0.1
REFRESH_S = 5.0
"""Helpers are started with the engine: who belongs to it is not asked for at every sample."""
LEFT_S = 60.0
"""A process with a title of an engine's part was started by a main process. Where none is there
for so long, none will be: a start has its main process from its first moment on."""


class OwnedEngine:
    """The part of an adapter that acts on the engine's processes, without its answer.

    The verbs are those of :class:`~plimsoll_sidecar.act.adapters.engine_adapter.EngineAdapter`.
    """

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self._owned = OwnedProcesses(endpoint)

    def processes(self) -> list[ProcessMemory]:
        """Return the engine's living processes; empty where there is none."""
        return self._owned.listed()

    def has_ended(self) -> bool:
        """Whether the main process has ended and left the others."""
        return self._owned.have_ended()

    def sweep(self) -> str:
        """End processes of an engine that has ended. Says what was ended."""
        return self._owned.sweep()

    def end(self, frontend: ProcessId | None) -> Ending:
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
        """Return the living processes; :class:`NoEngine`, also logged once, where none is."""
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

        Their ages count: the main process may have ended before anybody looked.
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
        """End what an engine left to the next one, which serves already or will.

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
        ending = Ender(left - kept).end(None)
        return "; ".join(filter(None, (ending.summary, ending.trouble)))

    def end(self, main: ProcessId | None = None, grace_s: float = TERM_GRACE_S) -> Ending:
        """End every process of the engine.

        ``main`` is what was decided on, where it is known; another engine that serves in its place
        by now is left alone.
        """
        with self._lock:
            try:
                members = self._look()
            except NoEngine as none:
                # What is remembered of the engine may still be ended by its start time.
                members = Members(main, (main,) if main is not None else ())
                if main is None or not lives(main):
                    return Ending(f"no process was running ({none})")
        if main is not None and members.main is not None and members.main != main:
            left = tuple(p for p in members.everyone if p.started < members.main.started)
            members = Members(main, left, None)
        return _ender(members, self._parts(members)).end(main or members.main, grace_s)


def sweep(members: Members) -> Ending:
    """End what an engine left that ended by itself; nothing while its main process lives."""
    deadline = time.monotonic() + SWEEP_S
    while members.main is not None and lives(members.main):
        if time.monotonic() > deadline:
            return Ending("")
        time.sleep(POLL_S)
    return _ender(members).end(None)


def _ender(members: Members, parts: Iterable[ProcessId] = ()) -> Ender:
    container = members.container
    return Ender(
        members.everyone, lambda process: container is None or is_in(process.pid, container), parts
    )
