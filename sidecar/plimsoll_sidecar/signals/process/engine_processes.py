"""Which processes are the engine: those of its own container, and nothing beside it.

The container is the one that was started with its own name in the environment variable
:data:`~plimsoll_api.supervisor_config.CONTAINER_ENV`. Without it, as in pods of an earlier release,
it is the container of the process that listens on the serving port, or of the only program of this
type of engine. Outside of containers the engine is a tree of processes: its outermost process that
is an engine by one of these three signs, and that process's descendants.

The containers of a pod share the supervisor's PID namespace. A process of a nested namespace, as a
pod seen from its node, is the engine only where it listens at the port.

Neither the supervisor nor any process that it descends from is ever the engine's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial

import msgspec

from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import CONTAINER_ENV
from plimsoll_sidecar.signals.process.process_table import (
    Container,
    ProcessId,
    ancestors,
    command_line,
    command_name,
    container_of,
    descendants,
    environment,
    identify,
    is_nested,
    lives,
    parents,
)
from plimsoll_sidecar.signals.process.programs import (
    default_port,
    has_title,
    is_engine,
    is_part,
    may_serve,
)
from plimsoll_sidecar.signals.process.tcp_sockets import LISTEN, holders, sockets

WRAPPERS = frozenset({"sh", "bash", "dash", "ash", "busybox", "tini", "dumb-init", "catatonit"})
"""What starts an engine and does not pass its signals on, or ends with it."""
MAX_MEMBERS = 256

Listening = Callable[[], set[str]]
"""The sockets that listen at the engine's port, as :func:`sockets` names them."""


class NoEngine(Exception):
    """No process can be called the engine; the message says why, and what to do."""


class Members(msgspec.Struct, frozen=True):
    """One engine's processes.

    ``main`` is the one that the others end with, None where it has ended and left them; ``helpers``
    are those that it started. ``container`` is None outside of containers.
    """

    main: ProcessId | None
    everyone: tuple[ProcessId, ...]
    container: Container | None = None
    helpers: tuple[ProcessId, ...] = ()


class EngineFinder:
    """Finds the engine's processes.

    What was found once is remembered, so that processes which outlive their engine are known as its
    own, and are not taken for the next.
    """

    def __init__(self, port: int, kind: EngineType, container: str = "") -> None:
        self._port, self._kind, self._name = port, kind, container
        self._known: dict[ProcessId, bool] = {}
        self._marked = False

    def find(self) -> Members:
        """Return the engine's living processes; :class:`NoEngine` where there is none."""
        tree = parents()
        mine = container_of(os.getpid()) or Container("", None)
        candidates = set(tree) - {1, *ancestors(os.getpid(), tree)}
        # Once a look, and only where it is needed: the kernel walks its whole table for each read.
        listening = cache(partial(sockets, self._port, LISTEN))
        signs = self._signs(candidates, mine, listening)
        containers = {pid: found for pid in signs if (found := container_of(pid)) is not None}
        others = {pid: found for pid, found in containers.items() if found.is_other_than(mine)}
        if others:
            container = self._only(set(others.values()))
            everyone = {pid for pid in candidates if is_in(pid, container)}
        elif containers:
            container = None
            everyone = set(containers) | descendants(set(containers), tree)
        else:
            container, everyone = None, set()
        alive = {p for p in self._known if lives(p)}
        everyone |= {p.pid for p in alive} | descendants({p.pid for p in alive}, tree)
        return self._members(everyone & candidates, set(signs), tree, container, listening)

    def _members(
        self,
        everyone: set[int],
        signs: set[int],
        tree: dict[int, int],
        container: Container | None,
        listening: Listening,
    ) -> Members:
        identities = {pid: found for pid in sorted(everyone) if (found := identify(pid))}
        main = self._main(identities, signs, tree, container, listening)
        self._known = {p: p == main for p in list(identities.values())[:MAX_MEMBERS]}
        if not identities:
            raise NoEngine(self._why(listening))
        started = descendants({main.pid}, tree) if main is not None else set()
        helpers = tuple(process for process in self._known if process.pid in started)
        return Members(main, tuple(self._known), container, helpers)

    def _signs(self, candidates: set[int], mine: Container, listening: Listening) -> set[int]:
        """Return the processes that say that they are the engine, by the best sign there is."""
        if self._name:
            marked = {
                p
                for p in candidates
                if environment(p, CONTAINER_ENV) == self._name and not is_nested(p)
            }
            self._marked = self._marked or bool(marked)
            if self._marked:
                return marked
        serving = holders(listening(), candidates)
        if serving:
            return serving
        found: set[int] = set()
        for pid in candidates:
            line = command_line(pid)
            if not (is_engine(line, self._kind) or has_title(line, self._kind)):
                continue
            container = container_of(pid)
            if container is None or is_nested(pid):
                continue
            # Where everything is one container, only the port tells two engines apart.
            apart = container.is_other_than(mine)
            if may_serve(line, self._port, self._port if apart else default_port(self._kind)):
                found.add(pid)
        return found

    def _only(self, containers: set[Container]) -> Container:
        if len(containers) > 1:
            raise NoEngine(
                f"{len(containers)} containers of this pod may be the engine on port"
                f" {self._port}: set {CONTAINER_ENV} in the environment of the right one"
            )
        return containers.pop()

    def _main(
        self,
        identities: dict[int, ProcessId],
        signs: set[int],
        tree: dict[int, int],
        container: Container | None,
        listening: Listening,
    ) -> ProcessId | None:
        """Return the process to end first; None where only parts of an engine are left."""
        known = next((p for p, is_main in self._known.items() if is_main), None)
        if known is not None and identities.get(known.pid) == known:
            return known
        left = set(self._known)
        fresh = {
            pid
            for pid, found in identities.items()
            if found not in left and not is_part(command_line(pid), self._kind)
        }
        for chosen in (holders(listening(), fresh), signs & fresh, fresh if container else set()):
            tops = {self._top(pid, fresh, tree) for pid in chosen}
            tops = {pid for pid in tops if command_name(pid) not in WRAPPERS}
            if tops:
                return min((identities[pid] for pid in tops), key=lambda p: (p.started, p.pid))
        return None

    @staticmethod
    def _top(pid: int, within: set[int], tree: dict[int, int]) -> int:
        """Return the outermost ancestor within the engine that is no shell."""
        for ancestor in list(ancestors(pid, tree))[1:]:
            if ancestor not in within or command_name(ancestor) in WRAPPERS:
                break
            pid = ancestor
        return pid

    def _why(self, listening: Listening) -> str:
        if self._marked:
            return f"container {self._name} has no running process"
        if listening():
            return (
                f"port {self._port} is in use, but no readable process of this pod"
                " listens on it: the engine runs as another user or with more capabilities than"
                " the supervisor, or the pod does not set shareProcessNamespace"
            )
        return f"no process of this pod listens on port {self._port}"


def is_in(pid: int, container: Container) -> bool:
    """Whether the process is in ``container`` now: asked before every signal."""
    found = container_of(pid)
    return found is not None and container.holds(found)
