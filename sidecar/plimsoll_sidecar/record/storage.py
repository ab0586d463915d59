"""What the journal is made of, beside its database: checked rows, and what outlives a damaged one.

A row is JSON and its checksum, and nothing that a clock cannot show.

SQLite checks the structure of its file, not what stands in a row: a flipped bit may leave a number
that is only wrong. :class:`Damaged` says that a row is not what was written.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from plimsoll_api import decoding
from plimsoll_api.open_enum import unknown_words
from plimsoll_api.times import LAST_TIME
from plimsoll_sidecar.clock import Reading
from plimsoll_sidecar.detect.detector import Checkpoint
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.restart_budget import Restart
from plimsoll_sidecar.govern.state import GovernorState

LARGEST = 1 << 63
_RENAMED = {
    b'"doubtful":': b'"unconfirmed":',
    b'"remembered":': b'"checkpoint":',
    b'"verb":"release-slot"': b'"verb":"take-slot"',  # without an incident, it gives the slot back
}
"""Keys and commands of older versions. Quotes within JSON strings are escaped, so no string
contains them."""


class Damaged(Exception):
    """A row that cannot be read; the message says why."""


class LastKnownEngine(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was last known of the engine, for our own restart: it may not answer then."""

    capabilities: frozenset[str] = frozenset()
    frontend_pid: int | None = None
    frontend_started: int | None = None
    epoch: str | None = None
    """The epoch that ``checkpoint`` is about."""
    checkpoint: Checkpoint = Checkpoint()


_T = TypeVar("_T", Incident, GovernorState, LastKnownEngine, Reading)


def encode(value: Incident | GovernorState | LastKnownEngine | Reading) -> tuple[bytes, int]:
    """Body and checksum."""
    body = msgspec.json.encode(value)
    return body, zlib.crc32(body)


def decode(body: object, checksum: object, kind: type[_T]) -> _T:
    """Return the value of a row; raise :class:`Damaged`.

    Rows of older versions have no checksum.
    """
    if not isinstance(body, bytes):
        raise Damaged(f"its body is of type {type(body).__name__}")
    if checksum is not None and checksum != zlib.crc32(body):
        raise Damaged("its checksum is wrong")
    for old, new in _RENAMED.items():
        body = body.replace(old, new)
    try:
        value = decoding.decode(body, kind)
    except decoding.Malformed as error:
        raise Damaged(str(error)) from error
    word = next(unknown_words(value), None)
    if word is not None:
        raise Damaged(f"{type(word).__name__} {word.value} is of a later version")
    if not _sound(msgspec.to_builtins(value)):
        raise Damaged("it has a number that is out of range")
    times = _times(value)
    if any(time is not None and not 0 <= time <= LAST_TIME for time in times):
        raise Damaged("it has a time that is out of range")
    return value


def _sound(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_sound, value.values()))
    if isinstance(value, list):
        return all(map(_sound, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or -LARGEST <= value < LARGEST


def _times(value: Incident | GovernorState | LastKnownEngine | Reading) -> list[float | None]:
    if isinstance(value, GovernorState):
        found: list[float | None] = [restart.at for restart in value.restarts]
        found += [quiet.until for quiet in value.quiet.values()]
        return found + [time for incident in value.incidents for time in _times(incident)]
    if isinstance(value, Incident):
        found = [value.opened_at, value.phase_since, value.confirmed_at, value.ended_at]
        found += [value.warm_at, value.retry_at]
        return found + [t for step in value.timeline for t in (step.time, step.finished_at)]
    return [value.time] if isinstance(value, Reading) else []


SET_ASIDE = "set-aside"
KEPT_PARTS = 12
KEPT_BYTES = 32 << 20
MAX_PART_BYTES = 1 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class SetAside:
    """What could not be read, kept for diagnosis in one bounded folder.

    Files ``NNNN-NAME``, numbered as they come: a clock that is set changes no order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, body: bytes) -> Path:
        """Write a part of a file, at most 1 MiB of it. Raises OSError."""
        path = self._next(name)
        path.write_bytes(body[:MAX_PART_BYTES])
        self._bound()
        return path

    def move(self, source: Path, beside: tuple[str, ...] = ()) -> Path:
        """Move a whole file, and those that belong to it by these suffixes. Raises OSError."""
        path = self._next(source.name)
        os.replace(source, path)
        for suffix in beside:
            companion = source.with_name(source.name + suffix)
            if companion.exists():
                os.replace(companion, path.with_name(path.name + suffix))
        self._bound()
        return path

    def names(self) -> list[str]:
        """Oldest first; empty where there is no folder, or none that can be read."""
        try:
            return sorted(os.listdir(self.folder))
        except OSError:
            return []

    def _next(self, name: str) -> Path:
        self.folder.mkdir(exist_ok=True)
        numbers = [int(known[:4]) for known in self.names() if known[:4].isdigit()]
        number = max(numbers, default=0) + 1
        return self.folder / f"{number % 10_000:04d}-{_UNSAFE.sub('_', name)[:120]}"

    def _bound(self) -> None:
        names = self.names()
        sizes = [(self.folder / name).stat().st_size for name in names]
        while len(names) > KEPT_PARTS or (len(names) > 1 and sum(sizes) > KEPT_BYTES):
            (self.folder / names.pop(0)).unlink()
            sizes.pop(0)


RESTARTS_FILE = "restarts.json"


class Spent(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of the governor's state that must not be lost."""

    restarts: tuple[Restart, ...] = ()
    exhausted: bool = False


class RestartCopy:
    """A second copy of the restart budget: a journal that is lost gives no restarts back.

    Written before the journal, so that it never lacks a restart that was begun. In a cluster the
    slot Leases count the service's restarts too; this file counts the replica's own, and is all
    there is in local mode.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: Spent | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a copy: without one, a new journal is a new replica's."""
        return self._path.exists()

    def write(self, state: GovernorState) -> None:
        """On disk when the call returns, where it changed. Raises OSError."""
        spent = Spent(tuple(msgspec.structs.replace(r) for r in state.restarts), state.exhausted)
        if spent == self._written:
            return
        temporary = self._path.with_name(f"{self._path.name}.new")
        with temporary.open("wb") as out:
            out.write(msgspec.json.encode(spent))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, self._path)
        self._written = spent

    def join(self, state: GovernorState) -> int:
        """Add what ``state`` lacks, and return how many restarts that were."""
        try:
            spent = decoding.decode(self._path.read_bytes(), Spent)
        except (OSError, decoding.Malformed):
            return 0  # written anew with the next state
        known = {restart.epoch for restart in state.restarts}
        lacking = [restart for restart in spent.restarts if restart.epoch not in known]
        state.restarts = sorted([*state.restarts, *lacking], key=lambda restart: restart.at)
        state.exhausted = state.exhausted or spent.exhausted
        return len(lacking)
