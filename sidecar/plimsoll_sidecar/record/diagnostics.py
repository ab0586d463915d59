"""Evidence saved before anything is destroyed: once an incident, in a bounded directory."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from plimsoll_api.admin import Diagnostic, ProcessMemory
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.command import Command
from plimsoll_sidecar.signals.process_table import ProcessId, list_names, send_signal

log = logging.getLogger(__name__)

DIRECTORY = "diagnostics"
STACKS_S = 0.5
"""Time for faulthandler to write: it needs milliseconds, whatever the process hangs in."""
MAX_FILES = 16
"""Files of one kind an incident: an engine has a handful of processes."""
MAX_LISTED = 1024
MAX_BYTES = 64 << 20
MAX_FILE_BYTES = 8 << 20
PIECE = 1 << 16
STALL = (Diagnostic.STACKS,)
GROWTH = (Diagnostic.STACKS, Diagnostic.GC, Diagnostic.TRACEMALLOC, Diagnostic.TORCH)


class Diagnostics:
    """Writes ``<state-dir>/diagnostics/<incident>/``; the oldest incidents make room."""

    def __init__(
        self,
        engine: EngineAdapter,
        state_dir: Path,
        run_dir: Path,
        frontend: Callable[[], ProcessId | None],
    ) -> None:
        self._engine, self._root, self._run_dir = engine, state_dir / DIRECTORY, run_dir
        self._frontend = frontend

    def save(self, command: Command) -> tuple[str, ...]:
        """Save what can be had, and return the files' names relative to the state directory.

        What the engine cannot say, and what the volume has no room for, is left out; OSError where
        there cannot even be a folder.
        """
        folder = self._root / command.incident
        folder.mkdir(parents=True, exist_ok=True)
        self._make_room(folder)
        try:
            status = self._engine.status()
        except EngineError as error:
            log.info("no diagnostics, the engine does not answer: %s", error)
            self._ask_frontend_for_stacks()
            saved = self._leftover_stacks(folder) + self._stacks(folder, command)
        else:
            saved = self._ask(folder, STALL if command.stalled else GROWTH, command)
            if not command.stalled:
                saved += _smaps(folder, command.suspected_first(status.processes))
        return tuple(str(path.relative_to(self._root.parent)) for path in saved)

    def _ask(self, folder: Path, kinds: tuple[Diagnostic, ...], command: Command) -> list[Path]:
        saved = []
        for kind in kinds:
            try:
                text = self._engine.diagnostics(kind, command)
                saved.append(_write(folder / f"{kind.value}.txt", text))
            except (EngineError, OSError) as error:
                log.warning("diagnostic %s: %s", kind.value, error)
        return saved

    def _stacks(self, folder: Path, command: Command) -> list[Path]:
        """Stacks that the adapter gets without an answer of the engine."""
        text = self._engine.stacks(command)
        if text is None:
            return []
        try:
            return [_write(folder / f"{Diagnostic.STACKS.value}.txt", text)]
        except OSError as error:
            log.warning("stacks: %s", error)
            return []

    def _ask_frontend_for_stacks(self) -> None:
        """Make a frontend that hangs write its stacks, by SIGUSR1.

        Its file is there from the start: without it nobody handles the signal, which would then end
        the process.
        """
        frontend = self._frontend()
        if frontend is None:
            return
        if not (self._run_dir / "stacks" / f"frontend-{frontend.pid}.txt").exists():
            return
        try:
            send_signal(frontend, signal.SIGUSR1)
        except OSError as error:
            log.info("stacks of the frontend: %s", error.strerror)
        time.sleep(STACKS_S)

    def _leftover_stacks(self, folder: Path) -> list[Path]:
        """Stacks that the engine's processes wrote to the shared directory by themselves."""
        found: list[Path] = []
        stacks = self._run_dir / "stacks"
        try:  # the folder is the engine's, and may hold any number of files
            names = list_names(stacks, MAX_LISTED)
        except OSError:
            return found
        for source in [stacks / name for name in sorted(names)[:MAX_FILES]]:
            target = folder / f"stacks-{source.name}"
            try:
                if _copy(source, target):
                    found.append(target)
            except OSError as error:
                log.info("stacks in %s: %s", source, error.strerror)
        return found

    def _make_room(self, keep: Path) -> None:
        folders = sorted(
            (path for path in self._root.iterdir() if path.is_dir()),
            key=lambda path: path.stat().st_mtime,
        )
        sizes = {path: _size(path) for path in folders}
        total = sum(sizes.values())
        for path in folders:
            if total <= MAX_BYTES or path == keep:
                continue
            shutil.rmtree(path, ignore_errors=True)
            total -= sizes[path]


def _smaps(folder: Path, processes: Sequence[ProcessMemory]) -> list[Path]:
    """``smaps_rollup`` of each process: exact, but milliseconds of the kernel's time, so once."""
    saved = []
    for member in processes[:MAX_FILES]:
        target = folder / f"smaps_rollup-{member.label}-{member.pid}.txt"
        try:
            if _copy(Path(f"/proc/{member.pid}/smaps_rollup"), target):
                saved.append(target)
        except OSError as error:
            log.info("smaps_rollup of %s: %s", member.label, error.strerror)
    return saved


def _copy(source: Path, target: Path) -> bool:
    """Copy a file of the engine's, piece by piece and no more than the bound.

    False where it is empty or none. It may be a link, a pipe, or gone by now. Raises OSError; no
    half of a file stays.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as taken:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        with _whole(target) as out:
            while (piece := taken.read(PIECE)) and out.tell() < MAX_FILE_BYTES:
                out.write(piece)
            size = out.tell()
    if not size:
        target.unlink()
    return size > 0


def _write(path: Path, data: bytes) -> Path:
    with _whole(path) as out:
        out.write(data[:MAX_FILE_BYTES])
    return path


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file that is removed again where it cannot be written to its end."""
    try:
        with path.open("wb") as out:
            yield out
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
