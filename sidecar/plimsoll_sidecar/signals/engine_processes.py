"""Which processes are the engine: those of its own container, and nothing beside it.

The container is the one that was started with its own name in the environment variable
:data:`~plimsoll_api.supervisor_config.CONTAINER_ENV`. Without it, as in pods of an earlier release,
it is the container of the process that listens on the serving port, or of the only program of this
type of engine. Outside of containers the engine is a tree of processes: its outermost process that
is an engine by one of these three signs, and that process's descendants.

The containers of a pod share the supervisor's PID namespace. A process of a nested namespace, as a
pod seen from its node, is the engine only where it listens at the port.

Neither the supervisor nor any process that it descends from is ever the engine's.

Known engines set titles in their helper processes. A word of a path is no sign: a build, an
editor or a proxy may name an engine in its arguments. Titles are the engine's to choose: they only
select among names that are known here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import msgspec

from plimsoll_api.admin import Parts, ProcessMemory, Role
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import CONTAINER_ENV
from plimsoll_api.units import whole_number
from plimsoll_sidecar.signals.process_table import (
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
from plimsoll_sidecar.signals.tcp_sockets import LISTEN, holders, sockets

WRAPPERS = frozenset({"sh", "bash", "dash", "ash", "busybox", "tini", "dumb-init", "catatonit"})
"""What starts an engine and does not pass its signals on, or ends with it."""
MAX_MEMBERS = 256

Listening = Callable[[], set[str]]
"""The sockets that listen at the engine's port, as :func:`sockets` names them."""


@dataclass(frozen=True)
class Program:
    """One kind of engine, by its processes.

    ``scripts`` are its executables, ``modules`` what follows ``python -m``, ``titles`` begin the
    titles of the processes that are only parts of it, and ``port`` is where it serves unless an
    argument says otherwise.

    ``main`` is what it calls its main process, which has no title. ``names`` maps what follows
    ``PREFIX::`` in the other titles to the name of such a process; ranks are left out. ``steps``
    names the process that makes the steps, and ``runs`` those that may run the model: the first of
    them that is there does.
    """

    scripts: tuple[str, ...]
    modules: tuple[str, ...]
    titles: tuple[str, ...]
    port: int
    main: str = ""
    names: dict[str, str] = field(default_factory=dict)
    steps: str = ""
    runs: tuple[str, ...] = ()


PROGRAMS = {
    EngineType.PLIMSOLL: Program(scripts=(), modules=("plimsoll_engine",), titles=(), port=8000),
    EngineType.VLLM: Program(
        scripts=("vllm",),
        modules=("vllm.entrypoints", "huggingfaceserver"),
        titles=("VLLM::EngineCore", "VLLM::Worker", "VLLM::DPCoordinator"),
        port=8000,
        main="APIServer",
        # The prefix is VLLM_PROCESS_NAME_PREFIX; Ray names its processes by their class.
        names={
            "APIServer": "APIServer",
            "EngineCore": "EngineCore",
            "Worker": "Worker",
            "RayWorker": "Worker",
            "DPCoordinator": "DPCoordinator",
        },
        steps="EngineCore",
        # On one device the model runs within the core.
        runs=("Worker", "EngineCore"),
    ),
    EngineType.SGLANG: Program(
        scripts=("sglang",),
        modules=("sglang.launch_server", "sglang_router.launch_server"),
        titles=("sglang::",),
        port=30_000,
        main="server",
        names={
            "scheduler": "scheduler",
            "detokenizer": "detokenizer",
            "tokenizer_worker": "tokenizer",
            "data_parallel_controller": "data_parallel_controller",
        },
        steps="scheduler",
        runs=("scheduler",),
    ),
}


def is_engine(line: Sequence[str], kind: EngineType) -> bool:
    """Whether the command line is that of an engine's main process."""
    program = PROGRAMS.get(kind)
    if program is None or not line:
        return False
    # ENGINE …, python [-flags] ENGINE …, python [-flags] -m MODULE …: no word beyond counts.
    if os.path.basename(line[0]) in program.scripts:
        return True
    if not os.path.basename(line[0]).startswith("python"):
        return False
    for at, word in enumerate(line[1:5], start=1):
        if word == "-m":
            module = "".join(line[at + 1 : at + 2])
            return any(module == m or module.startswith(m + ".") for m in program.modules)
        if not word.startswith("-"):
            return os.path.basename(word) in program.scripts
    return False


def is_part(line: Sequence[str], kind: EngineType) -> bool:
    """Whether this is a helper process, which an engine has beside its main one.

    Python's resource tracker is a helper of any.
    """
    if any("multiprocessing.resource_tracker" in word for word in line[:5]):
        return True
    return has_title(line, kind)


def has_title(line: Sequence[str], kind: EngineType) -> bool:
    """Whether this process has a title that only a helper of this type of engine has."""
    program = PROGRAMS.get(kind)
    return program is not None and bool(line) and line[0].startswith(program.titles)


def name_of(line: Sequence[str], kind: EngineType) -> str | None:
    """Return what the engine calls a helper process with this command line; None for nothing."""
    program = PROGRAMS.get(kind)
    _, separator, title = (line[0] if line else "").partition("::")
    if program is None or not separator:
        return None
    return next((name for begin, name in program.names.items() if title.startswith(begin)), None)


def named(
    lines: Iterable[tuple[int, Sequence[str]]], main: int | None, kind: EngineType
) -> list[ProcessMemory]:
    """Return an engine's processes by PID and command line, with their roles and names."""
    program = PROGRAMS.get(kind)
    names = {pid: name_of(line, kind) for pid, line in lines}
    # Beside servers with a title of their own, the main process only starts and watches them.
    if main in names and program is not None and program.main not in names.values():
        names[main] = program.main or None
    runs = program.runs if program is not None else ()
    runner = next((name for name in runs if name in names.values()), None)
    found = []
    for pid, name in names.items():
        role = Role.WORKER if runner is not None and name == runner else Role.OTHER
        found.append(ProcessMemory(Role.FRONTEND if pid == main else role, pid, name=name))
    return found


def parts_of(processes: Iterable[ProcessMemory], kind: EngineType) -> Parts:
    """Which of the named processes does what."""
    program = PROGRAMS.get(kind)
    names = {process.name: process.role for process in processes if process.name is not None}
    if program is None:
        return Parts()
    return Parts(
        serves=program.main if program.main in names else None,
        steps=program.steps if program.steps in names else None,
        runs=next((name for name in program.runs if name in names), None),
    )


def may_serve(line: Sequence[str], port: int, otherwise: int | None) -> bool:
    """Whether the command line asks for ``port``; ``otherwise`` is the port where it names none.

    A port that is not a number, such as a variable's name, may be any.
    """
    for at, word in enumerate(line):
        value = None
        if word == "--port" and at + 1 < len(line):
            value = line[at + 1]
        elif word.startswith("--port="):
            value = word.partition("=")[2]
        if value is not None:
            number = whole_number(value)
            return number is None or number == port
    return otherwise == port


def default_port(kind: EngineType) -> int | None:
    """Return the port that an engine of this kind serves on without an option.

    None where it is unknown.
    """
    program = PROGRAMS.get(kind)
    return program.port if program else None


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
