"""Evidence saved before anything is destroyed: once an incident, in a bounded directory."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from plimsoll_api.admin import Diagnostic, Status
from plimsoll_sidecar.act import process
from plimsoll_sidecar.act.adapter import EngineAdapter, EngineError
from plimsoll_sidecar.govern.command import Command

log = logging.getLogger(__name__)

DIRECTORY = "diagnostics"
STACKS_S = 0.5
"""Time for faulthandler to write: it needs milliseconds, whatever the process hangs in."""
MAX_FILES = 16
"""Files of one kind an incident: an engine has a handful of processes."""
MAX_BYTES = 64 << 20
MAX_FILE_BYTES = 8 << 20
STALL = (Diagnostic.STACKS,)
GROWTH = (Diagnostic.STACKS, Diagnostic.GC, Diagnostic.TRACEMALLOC, Diagnostic.TORCH)


class Diagnostics:
    """Writes ``<state-dir>/diagnostics/<incident>/``; the oldest incidents make room."""

    def __init__(
        self,
        engine: EngineAdapter,
        state_dir: Path,
        run_dir: Path,
        frontend: Callable[[], process.ProcessId | None],
    ) -> None:
        self._engine, self._root, self._run_dir = engine, state_dir / DIRECTORY, run_dir
        self._frontend = frontend

    def save(self, command: Command) -> tuple[str, ...]:
        """Saves what can be had, and returns the files' names relative to the state directory.

        What the engine cannot say is left out; OSError where nothing can be written.
        """
        folder = self._root / command.incident
        folder.mkdir(parents=True, exist_ok=True)
        self._make_room(folder)
        try:
            status = self._engine.status()
        except EngineError as error:
            log.info("no diagnostics, the engine does not answer: %s", error)
            self._ask_frontend_for_stacks()
            saved = self._leftover_stacks(folder)
        else:
            saved = self._ask(folder, STALL if command.stalled else GROWTH)
            if not command.stalled:
                saved += _smaps(folder, status)
        return tuple(str(path.relative_to(self._root.parent)) for path in saved)

    def _ask(self, folder: Path, kinds: tuple[Diagnostic, ...]) -> list[Path]:
        saved = []
        for kind in kinds:
            try:
                saved.append(_write(folder / f"{kind.value}.txt", self._engine.diagnostics(kind)))
            except EngineError as error:
                log.info("diagnostic %s: %s", kind.value, error)
        return saved

    def _ask_frontend_for_stacks(self) -> None:
        """SIGUSR1 makes a frontend that hangs write its stacks. Its file is there from the start:
        without it nobody handles the signal, which would then end the process."""
        frontend = self._frontend()
        if frontend is None or process.identify(frontend.pid) != frontend:
            return
        if not (self._run_dir / "stacks" / f"frontend-{frontend.pid}.txt").exists():
            return
        try:
            os.kill(frontend.pid, signal.SIGUSR1)
        except OSError as error:
            log.info("stacks of the frontend: %s", error.strerror)
        time.sleep(STACKS_S)

    def _leftover_stacks(self, folder: Path) -> list[Path]:
        """Stacks that the engine's processes wrote to the shared directory by themselves."""
        found = []
        for source in sorted((self._run_dir / "stacks").glob("*"))[:MAX_FILES]:
            if source.is_file() and source.stat().st_size:
                found.append(_write(folder / f"stacks-{source.name}", source.read_bytes()))
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


def _smaps(folder: Path, status: Status) -> list[Path]:
    """``smaps_rollup`` of each process: exact, but milliseconds of the kernel's time, so once."""
    saved = []
    for member in status.processes:
        try:
            text = Path(f"/proc/{member.pid}/smaps_rollup").read_bytes()
        except OSError as error:
            log.info("smaps_rollup of %s: %s", member.role.value, error.strerror)
            continue
        name = f"smaps_rollup-{member.role.value}-{member.pid}.txt"
        saved.append(_write(folder / name, text))
    return saved


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data[:MAX_FILE_BYTES])
    return path


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
