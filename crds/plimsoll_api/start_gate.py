"""Start gate: a starting engine waits until its supervisor reports that the devices are free.

At each start, the engine writes a random question to a file in the run directory, and the
supervisor answers in another file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from plimsoll_api.files import open_regular_file

GATE_ANSWER_FILE, GATE_QUESTION_FILE = "start-gate.json", "start-gate-question"
GATE_QUESTION_BYTES = 8
MAX_GATE_FILE_BYTES = 2048
MAX_GATE_REASON_CHARS = 400

Question = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * GATE_QUESTION_BYTES}}}$")]


class GateAnswer(msgspec.Struct, omit_defaults=True):
    """Answer of the supervisor at the Unix time ``at``.

    The engine may start if its question is ``answered``. Otherwise, ``reason`` says why it must
    wait.
    """

    at: float
    answered: str = ""
    reason: Annotated[str, msgspec.Meta(max_length=MAX_GATE_REASON_CHARS)] = ""


def read_gate_file(path: Path) -> bytes | None:
    """Return the content of a gate file; None if the file is missing, irregular or too large."""
    try:
        if (file := open_regular_file(path)) is None:
            return None
        with file:
            data = file.read(MAX_GATE_FILE_BYTES + 1)
    except OSError:
        return None
    return data if len(data) <= MAX_GATE_FILE_BYTES else None
