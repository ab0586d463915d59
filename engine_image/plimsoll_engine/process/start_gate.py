"""Start gate: wait until an earlier engine's processes have left the devices."""

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
    read_gate_file,
)

log = logging.getLogger(__name__)

SUPERVISOR_TIMEOUT_S = 15.0
"""Seconds without an answer after which the engine starts, as the supervisor may not run."""
MAX_WAIT_S = 3600.0
"""Seconds after which the engine starts although the supervisor still forbids it."""
POLL_S = 0.1


def wait_until_open(run_dir: Path) -> None:
    """Ask the supervisor whether the engine may start, and wait until it may.

    Return at once if no gate is configured, and after :data:`SUPERVISOR_TIMEOUT_S` without an
    answer.
    """
    if _read_answer(run_dir) is None:
        return
    question, start, logged = os.urandom(QUESTION_BYTES).hex(), time.time(), ""
    try:
        replace_file(run_dir / QUESTION_FILE, question.encode())
    except OSError as error:
        log.warning("cannot ask the supervisor whether the devices are free: %s", error)
        return
    while (answer := _read_answer(run_dir)) is not None and answer.answered != question:
        now = time.time()
        if now - max(start, min(answer.at, now)) > SUPERVISOR_TIMEOUT_S or now - start > MAX_WAIT_S:
            log.warning(
                "the supervisor did not answer whether the devices are free; starting the engine"
            )
            return
        if answer.reason and answer.reason != logged:
            logged = answer.reason
            log.warning("waiting for the devices before the engine starts: %s", logged)
        time.sleep(POLL_S)


def _read_answer(run_dir: Path) -> GateAnswer | None:
    data = read_gate_file(run_dir / ANSWER_FILE)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=GateAnswer)
    except msgspec.MsgspecError:
        return None
