"""Find the processes of the engine: all processes of its container, and no others.

The container is the one that :data:`~plimsoll_api.supervisor_config.CONTAINER_ENV` names, or whose
process listens on the serving port, or that runs the only program of this engine type. Outside
containers, the engine is a process tree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import msgspec

from plimsoll_api.admin import ProcessMemory, ProcessNames, Role
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import CONTAINER_ENV
from plimsoll_api.units import parse_whole_number
from plimsoll_sidecar.signals.process_table import (
    Container,
    ProcessId,
    find_container,
    find_descendants,
    identify,
    is_in_nested_namespace,
    is_running,
    iterate_ancestors,
    read_command_line,
    read_command_name,
    read_environment_variable,
    read_parent_pids,
)
from plimsoll_sidecar.signals.tcp_sockets import TCP_LISTEN, find_socket_inodes, find_socket_owners

# Programs that start an engine. They do not forward signals to it, or they end with it.
WRAPPER_PROGRAMS = frozenset(
    {"sh", "bash", "dash", "ash", "busybox", "tini", "dumb-init", "catatonit"}
)
MAX_STORED_PROCESSES = 256
CUSTOM_MAIN_PROCESS_NAME = "main process"

ListeningSockets = Callable[[], set[str]]
"""Returns the inodes of the sockets that listen on the serving port."""


@dataclass(frozen=True)
class EngineProgram:
    """Patterns that identify the processes of one engine type.

    Attributes:
        scripts: Names of the executables.
        modules: Modules for ``python -m``.
        title_prefixes: Prefixes of the titles of helper processes.
        port: Default serving port.
        main: Name of the main process, which has no title.
        names: Process names without ranks, by the start of a title after ``PREFIX::``.
        steps: Name of the process that runs the scheduler's steps.
        runs: Names of processes that may run the model. The first that exists runs it.

    """

    scripts: tuple[str, ...]
    modules: tuple[str, ...]
    title_prefixes: tuple[str, ...]
    port: int
    main: str = ""
    names: dict[str, str] = field(default_factory=dict)
    steps: str = ""
    runs: tuple[str, ...] = ()


ENGINE_PROGRAMS = {
    EngineType.PLIMSOLL: EngineProgram(
        scripts=(), modules=("plimsoll_engine",), title_prefixes=(), port=8000
    ),
    EngineType.VLLM: EngineProgram(
        scripts=("vllm",),
        modules=("vllm.entrypoints", "huggingfaceserver"),
        title_prefixes=("VLLM::EngineCore", "VLLM::Worker", "VLLM::DPCoordinator"),
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
        # With one device, the engine core runs the model itself.
        runs=("Worker", "EngineCore"),
    ),
    EngineType.SGLANG: EngineProgram(
        scripts=("sglang",),
        modules=("sglang.launch_server", "sglang_router.launch_server"),
        title_prefixes=("sglang::",),
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


def is_engine_command(command_line: Sequence[str], engine_type: EngineType) -> bool:
    """Report whether ``command_line`` is the command line of an engine's main process."""
    program = ENGINE_PROGRAMS.get(engine_type)
    if program is None or not command_line:
        return False
    # ENGINE …, python [-flags] ENGINE …, or python [-flags] -m MODULE …; later words do not count.
    if os.path.basename(command_line[0]) in program.scripts:
        return True
    if not os.path.basename(command_line[0]).startswith("python"):
        return False
    for at, word in enumerate(command_line[1:5], start=1):
        if word == "-m":
            module = "".join(command_line[at + 1 : at + 2])
            return any(module == m or module.startswith(m + ".") for m in program.modules)
        if not word.startswith("-"):
            return os.path.basename(word) in program.scripts
    return False


def is_helper_command(command_line: Sequence[str], engine_type: EngineType) -> bool:
    """Report whether this is the command line of a helper process of this engine type.

    Python's resource tracker is a helper process of every engine.
    """
    if any("multiprocessing.resource_tracker" in word for word in command_line[:5]):
        return True
    return has_helper_title(command_line, engine_type)


def has_helper_title(command_line: Sequence[str], engine_type: EngineType) -> bool:
    """Report whether only helper processes of this engine type have this process title."""
    program = ENGINE_PROGRAMS.get(engine_type)
    return (
        program is not None
        and bool(command_line)
        and command_line[0].startswith(program.title_prefixes)
    )


def find_helper_name(command_line: Sequence[str], engine_type: EngineType) -> str | None:
    """Return the name that the engine gives to a helper process; None if it has none."""
    program = ENGINE_PROGRAMS.get(engine_type)
    _, separator, title = (command_line[0] if command_line else "").partition("::")
    if program is None or not separator:
        return None
    return next((name for begin, name in program.names.items() if title.startswith(begin)), None)


def assign_roles(
    command_lines: Iterable[tuple[int, Sequence[str]]],
    main_pid: int | None,
    engine_type: EngineType,
) -> list[ProcessMemory]:
    """Return the processes of an engine with their roles and names."""
    program = ENGINE_PROGRAMS.get(engine_type)
    names = {pid: find_helper_name(line, engine_type) for pid, line in command_lines}
    # If another process has the name of the main process, the main process only starts it.
    if main_pid in names and program is None:
        names[main_pid] = CUSTOM_MAIN_PROCESS_NAME
    elif main_pid in names and program and program.main not in names.values():
        names[main_pid] = program.main or None
    runs = program.runs if program is not None else ()
    runner = next((name for name in runs if name in names.values()), None)
    processes = []
    for pid, name in names.items():
        role = Role.WORKER if runner is not None and name == runner else Role.OTHER
        processes.append(ProcessMemory(Role.FRONTEND if pid == main_pid else role, pid, name=name))
    return processes


def find_process_names(processes: Iterable[ProcessMemory], engine_type: EngineType) -> ProcessNames:
    """Return the names of the processes that serve, schedule the steps, and run the model."""
    program = ENGINE_PROGRAMS.get(engine_type)
    names = {process.name: process.role for process in processes if process.name is not None}
    if program is None:
        return ProcessNames()
    return ProcessNames(
        serves=program.main if program.main in names else None,
        steps=program.steps if program.steps in names else None,
        runs=next((name for name in program.runs if name in names), None),
    )


def may_listen_on(command_line: Sequence[str], port: int, default_port: int | None) -> bool:
    """Report whether a process with this command line may listen on ``port``.

    A port that is not a number, such as the name of a variable, may be any port.
    """
    value = read_port_option(command_line)
    if value is None:
        return default_port == port
    number = parse_whole_number(value)
    return number is None or number == port


def read_port_option(command_line: Sequence[str]) -> str | None:
    """Return the port in the command line as written; None if there is none."""
    for at, word in enumerate(command_line):
        if word == "--port" and at + 1 < len(command_line):
            return command_line[at + 1]
        if word.startswith("--port="):
            return word.partition("=")[2]
    return None


def get_default_port(engine_type: EngineType) -> int | None:
    """Return the default serving port of this engine type; None if unknown."""
    program = ENGINE_PROGRAMS.get(engine_type)
    return program.port if program else None


class EngineNotFoundError(Exception):
    """The engine's process was not found."""


class EngineProcesses(msgspec.Struct, frozen=True):
    """Processes of one engine.

    ``main`` is None if only other processes still run. ``helpers`` are the descendants of ``main``.
    ``container`` is None outside containers.
    """

    main: ProcessId | None
    processes: tuple[ProcessId, ...]
    container: Container | None = None
    helpers: tuple[ProcessId, ...] = ()


class EngineFinder:
    """Finds the engine's processes.

    It remembers them, so processes that outlive their engine are not mistaken for the next engine.
    """

    def __init__(
        self, port: int, kind: EngineType, container: str = "", main: ProcessId | None = None
    ) -> None:
        self._port, self._kind, self._name = port, kind, container
        self._configured_main = main
        self._stored_processes: dict[ProcessId, bool] = {}
        self._has_marked = False

    def find_processes(self) -> EngineProcesses:
        """Return the running processes of the engine. Raises :class:`EngineNotFoundError`."""
        tree = read_parent_pids()
        mine = find_container(os.getpid()) or Container("", None)
        candidates = set(tree) - {1, *iterate_ancestors(os.getpid(), tree)}
        # Read at most once, and only if needed: the kernel walks its whole table for each read.
        listening = cache(partial(find_socket_inodes, self._port, TCP_LISTEN))
        identifying = self._find_identifying_processes(candidates, mine, listening)
        containers = {
            pid: process_container
            for pid in identifying
            if (process_container := find_container(pid)) is not None
        }
        others = {
            pid: process_container
            for pid, process_container in containers.items()
            if process_container.is_different_from(mine)
        }
        if others:
            container = self._require_single_container(set(others.values()))
            members = {pid for pid in candidates if is_in_container(pid, container)}
        elif containers:
            container = None
            members = set(containers) | find_descendants(set(containers), tree)
        else:
            container, members = None, set()
        alive = {p for p in self._stored_processes if is_running(p)}
        members |= {p.pid for p in alive} | find_descendants({p.pid for p in alive}, tree)
        return self._collect_members(
            members & candidates, set(identifying), tree, container, listening
        )

    def _collect_members(
        self,
        member_pids: set[int],
        identifying_pids: set[int],
        parent_pids: dict[int, int],
        container: Container | None,
        listening: ListeningSockets,
    ) -> EngineProcesses:
        identities = {pid: identity for pid in sorted(member_pids) if (identity := identify(pid))}
        main = self._find_main_process(
            identities, identifying_pids, parent_pids, container, listening
        )
        self._stored_processes = {
            p: p == main for p in list(identities.values())[:MAX_STORED_PROCESSES]
        }
        if not identities:
            raise EngineNotFoundError(self._explain_absence(listening))
        started = find_descendants({main.pid}, parent_pids) if main is not None else set()
        helpers = tuple(process for process in self._stored_processes if process.pid in started)
        return EngineProcesses(main, tuple(self._stored_processes), container, helpers)

    def _find_identifying_processes(
        self, candidates: set[int], own_container: Container, listening: ListeningSockets
    ) -> set[int]:
        if self._configured_main is not None:
            return (
                {self._configured_main.pid} & candidates
                if is_running(self._configured_main)
                else set()
            )
        if self._name:
            marked = {
                p
                for p in candidates
                if read_environment_variable(p, CONTAINER_ENV) == self._name
                and not is_in_nested_namespace(p)
            }
            self._has_marked = self._has_marked or bool(marked)
            if self._has_marked:
                return marked
        serving = find_socket_owners(listening(), candidates)
        if serving:
            return serving
        pids: set[int] = set()
        for pid in candidates:
            line = read_command_line(pid)
            if not (is_engine_command(line, self._kind) or has_helper_title(line, self._kind)):
                continue
            container = find_container(pid)
            if container is None or is_in_nested_namespace(pid):
                continue
            # Within one container, only the port distinguishes two engines.
            apart = container.is_different_from(own_container)
            if may_listen_on(
                line, self._port, self._port if apart else get_default_port(self._kind)
            ):
                pids.add(pid)
        return pids

    def _require_single_container(self, containers: set[Container]) -> Container:
        if len(containers) > 1:
            raise EngineNotFoundError(
                f"{len(containers)} containers of this pod may run the engine on port "
                f"{self._port}: set {CONTAINER_ENV} in the environment of the "
                "engine's container"
            )
        return containers.pop()

    def _find_main_process(
        self,
        identities: dict[int, ProcessId],
        identifying_pids: set[int],
        parent_pids: dict[int, int],
        container: Container | None,
        listening: ListeningSockets,
    ) -> ProcessId | None:
        stored_main = next((p for p, is_main in self._stored_processes.items() if is_main), None)
        if stored_main is not None and identities.get(stored_main.pid) == stored_main:
            return stored_main
        left = set(self._stored_processes)
        fresh = {
            pid
            for pid, identity in identities.items()
            if identity not in left and not is_helper_command(read_command_line(pid), self._kind)
        }
        for chosen in (
            find_socket_owners(listening(), fresh),
            identifying_pids & fresh,
            fresh if container else set(),
        ):
            tops = {self._find_outermost(pid, fresh, parent_pids) for pid in chosen}
            tops = {pid for pid in tops if read_command_name(pid) not in WRAPPER_PROGRAMS}
            if tops:
                return min((identities[pid] for pid in tops), key=lambda p: (p.started, p.pid))
        return None

    @staticmethod
    def _find_outermost(pid: int, member_pids: set[int], parent_pids: dict[int, int]) -> int:
        # A wrapper program, such as a shell, is not part of the engine.
        for ancestor in list(iterate_ancestors(pid, parent_pids))[1:]:
            if ancestor not in member_pids or read_command_name(ancestor) in WRAPPER_PROGRAMS:
                break
            pid = ancestor
        return pid

    def _explain_absence(self, listening: ListeningSockets) -> str:
        if self._configured_main is not None:
            return f"process {self._configured_main.pid} has ended"
        if self._has_marked:
            return f"the container {self._name} has no running process"
        if listening():
            return (
                f"a process listens on port {self._port}, but the supervisor cannot read it: "
                "run the engine as the supervisor's user, without further capabilities, and "
                "set shareProcessNamespace in the pod"
            )
        return f"no process of this pod listens on port {self._port}"


def is_in_container(pid: int, container: Container) -> bool:
    """Report whether the process is in ``container`` now. Call this before every signal."""
    process_container = find_container(pid)
    return process_container is not None and container.is_same_as(process_container)
