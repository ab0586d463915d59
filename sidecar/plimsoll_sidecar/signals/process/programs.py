"""How each type of engine looks in a process list.

Known engines set titles in their helper processes. A word of a path is no sign: a build, an
editor or a proxy may name an engine in its arguments. Titles are the engine's to choose: they only
select among names that are known here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plimsoll_api.admin import Parts, ProcessMemory, Role
from plimsoll_api.engines import EngineType
from plimsoll_api.units import whole_number


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
