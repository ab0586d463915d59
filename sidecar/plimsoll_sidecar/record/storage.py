"""Encode the journal's rows with checksums, and keep the files that outlive a damaged journal.

A row is JSON with a checksum. SQLite checks the structure of its file, but not the content of a
row: a flipped bit may change a number without any other sign. :class:`DamagedRowError` is raised
for a row that differs from what was written.
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
from plimsoll_api.times import LAST_TIME_S
from plimsoll_sidecar.clock import ClockReading
from plimsoll_sidecar.detect.detector import Checkpoint
from plimsoll_sidecar.govern.auto_budget import LearnedBudgets
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import GovernorState

INT64_END = 1 << 63
"""First integer that does not fit into 64 signed bits."""
_RENAMED_KEYS = {
    b'"doubtful":': b'"unconfirmed":',
    b'"remembered":': b'"checkpoint":',
    b'"verb":"release-slot"': b'"verb":"take-slot"',  # without an incident, it releases the slot
}
"""Keys and commands of earlier versions.

JSON escapes quotes, so none of these occurs in a string.
"""


class DamagedRowError(Exception):
    """A row cannot be read. The message says why."""


class LastKnownEngine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Last known state of the engine, which a restarted supervisor needs if it does not answer."""

    capabilities: frozenset[str] = frozenset()
    frontend_pid: int | None = None
    frontend_started: int | None = None
    epoch: str | None = None
    """Epoch of ``checkpoint``."""
    checkpoint: Checkpoint = Checkpoint()


_T = TypeVar("_T", Incident, GovernorState, LastKnownEngine, LearnedBudgets, ClockReading)
Row = Incident | GovernorState | LastKnownEngine | LearnedBudgets | ClockReading


def encode_row(value: Row) -> tuple[bytes, int]:
    """Return the JSON body of a row and its checksum."""
    body = msgspec.json.encode(value)
    return body, zlib.crc32(body)


def decode_row(body: object, checksum: object, kind: type[_T]) -> _T:
    """Return the value of a row. Raises :class:`DamagedRowError`.

    Rows of early versions have no checksum.
    """
    if not isinstance(body, bytes):
        raise DamagedRowError(f"the row's body must be of type bytes, not {type(body).__name__}")
    if checksum is not None and checksum != zlib.crc32(body):
        raise DamagedRowError("the checksum does not match the row")
    for old, new in _RENAMED_KEYS.items():
        body = body.replace(old, new)
    try:
        value = decoding.decode(body, kind)
    except decoding.MalformedError as error:
        raise DamagedRowError(str(error)) from error
    word = next(iterate_unknown_values(value), None)
    if word is not None:
        raise DamagedRowError(f"{type(word).__name__} {word.value} comes from a later version")
    if not _has_valid_numbers(msgspec.to_builtins(value)):
        raise DamagedRowError("a number is out of range")
    times = _collect_times(value)
    if any(time is not None and not 0 <= time <= LAST_TIME_S for time in times):
        raise DamagedRowError("a time is out of range")
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
        found: list[float | None] = [restart.at for restart in value.restarts]
        found += [quiet.until for quiet in value.quiet.values()]
        return found + [time for incident in value.incidents for time in _collect_times(incident)]
    if isinstance(value, Incident):
        found = [value.opened_at, value.phase_since, value.confirmed_at, value.ended_at]
        found += [value.warm_at, value.retry_at]
        return found + [t for step in value.timeline for t in (step.time, step.finished_at)]
    if isinstance(value, LearnedBudgets):
        return [one.seen_at for one in (value.host, value.device)]
    return [value.time] if isinstance(value, ClockReading) else []


SET_ASIDE_FOLDER = "set-aside"
"""Folder in the state directory for damaged parts of the journal."""
MAX_PARTS = 12
"""Maximum number of files in the folder."""
MAX_TOTAL_BYTES = 32 << 20
"""Maximum size of all files in the folder."""
MAX_PART_BYTES = 1 << 20
"""Maximum size of a damaged row."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class DamagedParts:
    """Damaged parts of the journal, kept for diagnosis in a folder of limited size.

    The files are named ``NNNN-NAME`` and numbered in order, independently of the clock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def store(self, name: str, body: bytes) -> Path:
        """Write at most :data:`MAX_PART_BYTES` of a part, and return the file. Raises OSError."""
        path = self._next_path(name)
        path.write_bytes(body[:MAX_PART_BYTES])
        self._delete_oldest()
        return path

    def move_file(self, source: Path, companion_suffixes: tuple[str, ...] = ()) -> Path:
        """Move a whole file, and its companions with these suffixes. Raises OSError."""
        path = self._next_path(source.name)
        os.replace(source, path)
        for suffix in companion_suffixes:
            companion = source.with_name(source.name + suffix)
            if companion.exists():
                os.replace(companion, path.with_name(path.name + suffix))
        self._delete_oldest()
        return path

    def names(self) -> list[str]:
        """Return the names of the files, oldest first; empty if they cannot be listed."""
        try:
            return sorted(os.listdir(self.folder))
        except OSError:
            return []

    def _next_path(self, name: str) -> Path:
        self.folder.mkdir(exist_ok=True)
        numbers = [int(known[:4]) for known in self.names() if known[:4].isdigit()]
        number = max(numbers, default=0) + 1
        return self.folder / f"{number % 10_000:04d}-{_UNSAFE.sub('_', name)[:120]}"

    def _delete_oldest(self) -> None:
        names = self.names()
        sizes = [(self.folder / name).stat().st_size for name in names]
        while len(names) > MAX_PARTS or (len(names) > 1 and sum(sizes) > MAX_TOTAL_BYTES):
            (self.folder / names.pop(0)).unlink()
            sizes.pop(0)


RESTARTS_FILE = "restarts.json"
"""File in the state directory that holds the copy of the restart budget."""


class SpentBudget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Restarts that count against the restart budget, and whether it is exhausted."""

    restarts: tuple[Restart, ...] = ()
    exhausted: bool = False


class RestartCopy:
    """Second copy of the spent restart budget, so that a lost journal does not restore the budget.

    The copy is written before the journal, so no restart that has started is missing. In a cluster,
    the slot Leases also count the service's restarts. In local mode, this file is the only other
    count.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: SpentBudget | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a copy. Without one, a new journal belongs to a new replica."""
        return self._path.exists()

    def write(self, state: GovernorState) -> None:
        """Write the copy if it has changed. It is on disk when the call returns. Raises OSError."""
        spent = SpentBudget(
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
        """Add missing restarts to ``state``, and return their number."""
        try:
            spent = decoding.decode(self._path.read_bytes(), SpentBudget)
        except (OSError, decoding.MalformedError):
            return 0  # the next write of the state repairs the file
        known = {restart.epoch for restart in state.restarts}
        lacking = [restart for restart in spent.restarts if restart.epoch not in known]
        state.restarts = sorted([*state.restarts, *lacking], key=lambda restart: restart.at)
        state.exhausted = state.exhausted or spent.exhausted
        return len(lacking)


def read_learned_budgets(path: Path) -> LearnedBudgets:
    """Return the learned budgets in a journal, without changing it.

    Raises OSError and ValueError.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    db = None
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
        row = db.execute("SELECT body, checksum FROM state WHERE key = 'learned'").fetchone()
        if row is None:
            return LearnedBudgets()
        body, checksum = row
        return decode_row(body, checksum, LearnedBudgets)
    except (sqlite3.Error, DamagedRowError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    finally:
        if db is not None:
            db.close()
