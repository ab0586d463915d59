"""Wait at startup until the devices are free of an earlier engine's processes and memory."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

from plimsoll_api.files import replace_file
from plimsoll_api.start_gate import (
    ANSWER_FILE,
    QUESTION_BYTES,
    QUESTION_FILE,
    GateAnswer,
    read_file,
)

log = logging.getLogger(__name__)

SILENT_S = 15.0
"""Seconds without an answer after which the engine starts, because the supervisor may be gone."""
MAX_S = 3600.0
POLL_S = 0.1


def wait_until_open(run_dir: Path) -> None:
    """Ask the supervisor whether the engine may start, and wait until it may.

    Return immediately if no gate is configured, and after :data:`SILENT_S` without a supervisor.
    """
    if _read(run_dir) is None:
        return
    question, since, told = os.urandom(QUESTION_BYTES).hex(), time.time(), ""
    try:
        replace_file(run_dir / QUESTION_FILE, question.encode())
    except OSError as error:
        log.warning("cannot ask the supervisor whether the devices are free: %s", error)
        return
    while (answer := _read(run_dir)) is not None and answer.answered != question:
        now = time.time()
        if now - max(since, min(answer.at, now)) > SILENT_S or now - since > MAX_S:
            log.warning(
                "the supervisor did not answer whether the devices are free; starting the engine"
            )
            return
        if answer.reason and answer.reason != told:
            told = answer.reason
            log.warning("the engine waits to start: %s", told)
        time.sleep(POLL_S)


def _read(run_dir: Path) -> GateAnswer | None:
    data = read_file(run_dir / ANSWER_FILE)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=GateAnswer)
    except msgspec.MsgspecError:
        return None
