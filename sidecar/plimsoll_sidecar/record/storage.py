"""Encode the journal's rows with checksums, and manage the files beside the journal.

SQLite checks the structure of its file, but not the content of a row: a flipped bit can change a
number unnoticed.
"""

from __future__ import annotations

import math
import os
import re
import sqlite3
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from plimsoll_api import decoding
from plimsoll_api.open_enum import iterate_unknown_values
from plimsoll_api.times import MAX_UNIX_TIME_S
from plimsoll_sidecar.clock import ClockReading
from plimsoll_sidecar.detect.detector import Checkpoint
from plimsoll_sidecar.govern.auto_budget import LearnedBudgets
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import GovernorState

INT64_END = 1 << 63
# Keys and commands in journals of earlier versions. They never occur within a string, because JSON
# escapes quotation marks.
_RENAMED_KEYS = {
    b'"doubtful":': b'"unconfirmed":',
    b'"remembered":': b'"checkpoint":',
    b'"verb":"release-slot"': b'"verb":"take-slot"',  # without an incident, it releases the slot
}


class DamagedRowError(Exception):
    """A row that cannot be read. The message contains the reason."""


class LastKnownEngine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Last known state of the engine, for a restarted supervisor whose engine does not answer."""

    capabilities: frozenset[str] = frozenset()
    frontend_pid: int | None = None
    frontend_started: int | None = None
    # The epoch of the checkpoint.
    epoch: str | None = None
    checkpoint: Checkpoint = Checkpoint()


_T = TypeVar("_T", Incident, GovernorState, LastKnownEngine, LearnedBudgets, ClockReading)
Row = Incident | GovernorState | LastKnownEngine | LearnedBudgets | ClockReading


def encode_row(value: Row) -> tuple[bytes, int]:
    """Return the JSON body of a row and its checksum."""
    body = msgspec.json.encode(value)
    return body, zlib.crc32(body)


def decode_row(body: object, checksum: object, row_type: type[_T]) -> _T:
    """Return the value of a row. Raises :class:`DamagedRowError`.

    ``checksum`` is None for a row of an early version, which is not checked.
    """
    if not isinstance(body, bytes):
        raise DamagedRowError(f"the body of a row must be of type bytes, got {type(body).__name__}")
    if checksum is not None and checksum != zlib.crc32(body):
        raise DamagedRowError("the row does not match its checksum")
    for old, new in _RENAMED_KEYS.items():
        body = body.replace(old, new)
    try:
        value = decoding.decode(body, row_type)
    except decoding.MalformedError as error:
        raise DamagedRowError(str(error)) from error
    word = next(iterate_unknown_values(value), None)
    if word is not None:
        raise DamagedRowError(
            f"the row has the unknown {type(word).__name__} {word.value!r}, which a later "
            "version wrote"
        )
    if not _has_valid_numbers(msgspec.to_builtins(value)):
        raise DamagedRowError("the row has a number that is not finite or is too large")
    times = _collect_times(value)
    if any(time is not None and not 0 <= time <= MAX_UNIX_TIME_S for time in times):
        raise DamagedRowError("the row has a time that is negative or too large")
    return value


def _has_valid_numbers(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_has_valid_numbers, value.values()))
    if isinstance(value, list):
        return all(map(_has_valid_numbers, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or -INT64_END <= value < INT64_END


def _collect_times(value: Row) -> list[float | None]:
    if isinstance(value, GovernorState):
        times: list[float | None] = [restart.at for restart in value.restarts]
        times += [cooldown.until for cooldown in value.cooldowns.values()]
        return times + [time for incident in value.incidents for time in _collect_times(incident)]
    if isinstance(value, Incident):
        times = [value.opened_at, value.phase_since, value.confirmed_at, value.ended_at]
        times += [value.warm_at, value.retry_at]
        return times + [t for step in value.timeline for t in (step.time, step.finished_at)]
    if isinstance(value, LearnedBudgets):
        return [history.seen_at for history in (value.host, value.device)]
    return [value.time] if isinstance(value, ClockReading) else []


SET_ASIDE_FOLDER = "set-aside"
MAX_SET_ASIDE_FILES = 12
MAX_SET_ASIDE_BYTES = 32 << 20
MAX_SET_ASIDE_ROW_BYTES = 1 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class DamagedParts:
    """Damaged parts of the journal, stored for diagnosis in a folder of limited size.

    The files are named ``NNNN-NAME``, so their order does not depend on the clock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def store(self, name: str, content: bytes) -> Path:
        """Write a damaged row to a file, and return the file's path. Raises OSError."""
        path = self._make_next_path(name)
        path.write_bytes(content[:MAX_SET_ASIDE_ROW_BYTES])
        self._delete_oldest()
        return path

    def move_file(self, source: Path, companion_suffixes: tuple[str, ...] = ()) -> Path:
        """Move a damaged file to the folder, and return its new path. Raises OSError.

        Files with the same name and one of ``companion_suffixes`` are moved with it.
        """
        path = self._make_next_path(source.name)
        os.replace(source, path)
        for suffix in companion_suffixes:
            companion = source.with_name(source.name + suffix)
            if companion.exists():
                os.replace(companion, path.with_name(path.name + suffix))
        self._delete_oldest()
        return path

    def list_names(self) -> list[str]:
        """Return the names of the files, oldest first; empty if the folder cannot be read."""
        try:
            return sorted(os.listdir(self.folder))
        except OSError:
            return []

    def _make_next_path(self, name: str) -> Path:
        self.folder.mkdir(exist_ok=True)
        numbers = [int(file_name[:4]) for file_name in self.list_names() if file_name[:4].isdigit()]
        number = max(numbers, default=0) + 1
        return self.folder / f"{number % 10_000:04d}-{_UNSAFE.sub('_', name)[:120]}"

    def _delete_oldest(self) -> None:
        names = self.list_names()
        sizes = [(self.folder / name).stat().st_size for name in names]
        while len(names) > MAX_SET_ASIDE_FILES or (
            len(names) > 1 and sum(sizes) > MAX_SET_ASIDE_BYTES
        ):
            (self.folder / names.pop(0)).unlink()
            sizes.pop(0)


RESTARTS_FILE = "restarts.json"


class StoredRestarts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Restarts that count against the restart budget, and whether it is exhausted."""

    restarts: tuple[Restart, ...] = ()
    exhausted: bool = False


class RestartCopy:
    """Copy of the restarts that count against the restart budget.

    If the journal is lost, the copy prevents a reset of the budget. It is written before the
    journal, so it contains every restart that has started.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: StoredRestarts | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a copy. A new replica has none."""
        return os.path.exists(self._path)  # Path.exists() would raise if the volume fails

    def write(self, state: GovernorState) -> None:
        """Write the restarts to disk, unless the copy already contains them. Raises OSError."""
        spent = StoredRestarts(
            tuple(msgspec.structs.replace(r) for r in state.restarts), state.exhausted
        )
        if spent == self._written:
            return
        temporary = self._path.with_name(f"{self._path.name}.new")
        with temporary.open("wb") as out:
            out.write(msgspec.json.encode(spent))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, self._path)
        self._written = spent

    def add_missing_restarts(self, state: GovernorState) -> int:
        """Add the restarts that ``state`` lacks, and return their number."""
        try:
            spent = decoding.decode(self._path.read_bytes(), StoredRestarts)
        except (OSError, decoding.MalformedError):
            return 0  # the next write of the state repairs the file
        known_epochs = {restart.epoch for restart in state.restarts}
        lacking = [restart for restart in spent.restarts if restart.epoch not in known_epochs]
        state.restarts = sorted([*state.restarts, *lacking], key=lambda restart: restart.at)
        state.exhausted = state.exhausted or spent.exhausted
        return len(lacking)


def read_learned_budgets(path: Path) -> LearnedBudgets:
    """Return the learned budgets in the journal at ``path``.

    Raises OSError if the file cannot be opened, and ValueError if it is damaged.
    """
    return _read_row(path, "learned", LearnedBudgets) or LearnedBudgets()


def read_last_epoch(path: Path) -> str | None:
    """Return the engine's last known epoch in the journal at ``path``; None if unknown."""
    try:
        engine = _read_row(path, "engine", LastKnownEngine)
    except (OSError, ValueError):
        return None
    return engine.epoch if engine is not None else None


def _read_row(path: Path, key: str, row_type: type[_T]) -> _T | None:
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    db = None
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
        row = db.execute("SELECT body, checksum FROM state WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        body, checksum = row
        return decode_row(body, checksum, row_type)
    except (sqlite3.Error, DamagedRowError) as error:
        raise ValueError(f"cannot read {path} as a supervisor's journal: {error}") from None
    finally:
        if db is not None:
            db.close()
