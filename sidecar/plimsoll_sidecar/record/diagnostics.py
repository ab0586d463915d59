"""Save diagnostics before a restart, once per incident, in a directory of limited size."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from plimsoll_api.admin import Diagnostic, ProcessMemory
from plimsoll_api.files import open_regular_file
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.command import Command
from plimsoll_sidecar.signals.process_table import ProcessId, list_entry_names, send_signal

log = logging.getLogger(__name__)

DIAGNOSTICS_FOLDER = "diagnostics"
# faulthandler writes the stacks within milliseconds, even if the process hangs.
STACKS_WAIT_S = 0.5
# An incident has one file of a kind for each process.
MAX_FILES_PER_KIND = 16
# The engine may create any number of files in its folder.
MAX_LISTED_NAMES = 1024
MAX_TOTAL_BYTES = 64 << 20
MAX_FILE_BYTES = 8 << 20
CHUNK_BYTES = 1 << 16
STALL_DIAGNOSTICS = (Diagnostic.STACKS,)
GROWTH_DIAGNOSTICS = (Diagnostic.STACKS, Diagnostic.GC, Diagnostic.TRACEMALLOC, Diagnostic.TORCH)


class DiagnosticsWriter:
    """Saves diagnostics in ``<state-dir>/diagnostics/<incident>/``.

    Beyond :data:`MAX_TOTAL_BYTES`, the diagnostics of the oldest incidents are deleted.
    """

    def __init__(
        self,
        engine: EngineAdapter,
        state_dir: Path,
        run_dir: Path,
        get_main_process: Callable[[], ProcessId | None],
    ) -> None:
        self._engine, self._root, self._run_dir = engine, state_dir / DIAGNOSTICS_FOLDER, run_dir
        self._get_main_process = get_main_process

    def save(self, command: Command) -> tuple[str, ...]:
        """Save the available diagnostics once, and return their paths in the state directory.

        Raises OSError if the folder cannot be created.
        """
        folder = self._root / command.incident
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            return tuple(str(path.relative_to(self._root.parent)) for path in _list_files(folder))
        self._delete_oldest_incidents(folder)
        try:
            status = self._engine.status()
        except EngineError as error:
            log.info("failed to save diagnostics, because the engine does not answer: %s", error)
            self._signal_frontend()
            saved = self._copy_stacks(folder) + self._save_stacks(folder, command)
        else:
            saved = self._save_texts(
                folder, STALL_DIAGNOSTICS if command.stalled else GROWTH_DIAGNOSTICS, command
            )
            if not command.stalled:
                saved += _copy_smaps(folder, command.sort_suspected_first(status.processes))
        return tuple(str(path.relative_to(self._root.parent)) for path in saved)

    def _save_texts(
        self, folder: Path, kinds: tuple[Diagnostic, ...], command: Command
    ) -> list[Path]:
        saved = []
        for kind in kinds:
            try:
                text = self._engine.read_diagnostic(kind, command)
                saved.append(_write_file(folder / f"{kind.value}.txt", text))
            except (EngineError, OSError) as error:
                log.warning("failed to save the diagnostic %s: %s", kind.value, error)
        return saved

    def _save_stacks(self, folder: Path, command: Command) -> list[Path]:
        # These stacks need no answer from the engine.
        text = self._engine.read_stacks(command)
        if text is None:
            return []
        try:
            return [_write_file(folder / f"{Diagnostic.STACKS.value}.txt", text)]
        except OSError as error:
            log.warning("failed to save the stacks of the engine's processes: %s", error)
            return []

    def _signal_frontend(self) -> None:
        # A frontend that handles SIGUSR1 creates a file for its stacks at its start. Without this
        # file, the signal would end the process.
        frontend = self._get_main_process()
        if frontend is None:
            return
        if not (self._run_dir / "stacks" / f"frontend-{frontend.pid}.txt").exists():
            return
        try:
            send_signal(frontend, signal.SIGUSR1)
        except OSError as error:
            log.info(
                "failed to send SIGUSR1 to the frontend (PID %d): %s", frontend.pid, error.strerror
            )
        time.sleep(STACKS_WAIT_S)

    def _copy_stacks(self, folder: Path) -> list[Path]:
        copies: list[Path] = []
        stacks = self._run_dir / "stacks"
        try:  # the engine can put any number of files here
            names = list_entry_names(stacks, MAX_LISTED_NAMES)
        except OSError:
            return copies
        for source in [stacks / name for name in sorted(names)[:MAX_FILES_PER_KIND]]:
            target = folder / f"stacks-{source.name}"
            try:
                if _copy_file(source, target):
                    copies.append(target)
            except OSError as error:
                log.info("failed to copy stacks from %s: %s", source, error.strerror)
        return copies

    def _delete_oldest_incidents(self, kept_folder: Path) -> None:
        folders = sorted(
            (path for path in self._root.iterdir() if path.is_dir()),
            key=lambda path: path.stat().st_mtime,
        )
        sizes = {path: _sum_folder_bytes(path) for path in folders}
        total = sum(sizes.values())
        for path in folders:
            if total <= MAX_TOTAL_BYTES or path == kept_folder:
                continue
            shutil.rmtree(path, ignore_errors=True)
            total -= sizes[path]


def _copy_smaps(folder: Path, processes: Sequence[ProcessMemory]) -> list[Path]:
    # smaps_rollup is read only once per incident, because each read takes the kernel milliseconds.
    saved = []
    for member in processes[:MAX_FILES_PER_KIND]:
        target = folder / f"smaps_rollup-{member.label}-{member.pid}.txt"
        try:
            if _copy_file(Path(f"/proc/{member.pid}/smaps_rollup"), target):
                saved.append(target)
        except OSError as error:
            log.info("failed to copy smaps_rollup of %s: %s", member.label, error.strerror)
    return saved


def _copy_file(source: Path, target: Path) -> bool:
    # The engine may have replaced the file with a link or a pipe, which is not copied.
    if (taken := open_regular_file(source)) is None:
        return False
    with taken, _create_file(target) as out:
        while (piece := taken.read(CHUNK_BYTES)) and out.tell() < MAX_FILE_BYTES:
            out.write(piece)
        size = out.tell()
    if not size:
        target.unlink()
    return size > 0


def _write_file(path: Path, data: bytes) -> Path:
    with _create_file(path) as out:
        out.write(data[:MAX_FILE_BYTES])
    return path


@contextlib.contextmanager
def _create_file(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("wb") as out:
            yield out
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sum_folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _list_files(folder))
