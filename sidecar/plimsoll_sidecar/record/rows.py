"""What a row of the journal holds: JSON and its checksum, and nothing that a clock cannot show.

SQLite checks the structure of its file, not what stands in a row: a flipped bit may leave a number
that is only wrong. :class:`Damaged` says that a row is not what was written.
"""

from __future__ import annotations

import math
import zlib
from typing import TypeVar

import msgspec

from plimsoll_api import decoding
from plimsoll_api.open_enum import unknown_words
from plimsoll_api.times import LAST_TIME
from plimsoll_sidecar.clock import Reading
from plimsoll_sidecar.detect.leak.baseline import Checkpoint
from plimsoll_sidecar.govern.incident import Incident
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
