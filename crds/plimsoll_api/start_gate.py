"""The start gate: an engine that starts asks its supervisor whether its devices are free.

The supervisor keeps the answer in a file of the run directory, and only if a gate is configured.
The engine writes a new question at each start. Both files are small and replaced as a whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

ANSWER_FILE, QUESTION_FILE = "start-gate.json", "start-gate-question"
QUESTION_BYTES = 8
MAX_GATE_FILE_BYTES = 2048
MAX_GATE_REASON = 400

Question = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * QUESTION_BYTES}}}$")]


class GateAnswer(msgspec.Struct, omit_defaults=True):
    """The supervisor's answer, written at ``at`` in Unix seconds.

    ``answered`` is the last question of an engine that may start. ``reason`` says why another one
    waits.
    """

    at: float
    answered: str = ""
    reason: Annotated[str, msgspec.Meta(max_length=MAX_GATE_REASON)] = ""


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file. Raises OSError."""
    fresh = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def read_file(path: Path) -> bytes | None:
    """Return a file of at most :data:`MAX_GATE_FILE_BYTES`; None if there is no regular file.

    The other container may have put a link or a pipe there.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = os.read(number, MAX_GATE_FILE_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(number)
    return data if len(data) <= MAX_GATE_FILE_BYTES else None
