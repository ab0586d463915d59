"""Start gate: wait until the processes of an earlier engine no longer use the devices."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

from plimsoll_api.files import replace_file
from plimsoll_api.start_gate import (
    GATE_ANSWER_FILE,
    GATE_QUESTION_BYTES,
    GATE_QUESTION_FILE,
    GateAnswer,
    read_gate_file,
)

log = logging.getLogger(__name__)

# The engine starts after this time without an answer, because the supervisor may not run.
SUPERVISOR_TIMEOUT_S = 15.0
# The engine starts after this time even if the supervisor does not permit it.
MAX_WAIT_S = 3600.0
POLL_INTERVAL_S = 0.1


def wait_until_open(run_dir: Path) -> None:
    """Wait until the supervisor permits the start, with a timeout.

    Return at once if no supervisor has set up a gate in ``run_dir``.
    """
    if (answer := _read_answer(run_dir)) is None:
        return
    question, start, logged = os.urandom(GATE_QUESTION_BYTES).hex(), time.monotonic(), ""
    # The supervisor's clock may differ, because it does not follow the wall clock at once.
    newest_at, renewed_at = answer.at, start
    try:
        replace_file(run_dir / GATE_QUESTION_FILE, question.encode())
    except OSError as error:
        log.warning("cannot ask the supervisor whether the devices are free: %s", error)
        return
    while (answer := _read_answer(run_dir)) is not None and answer.answered != question:
        now = time.monotonic()
        if answer.at != newest_at:
            newest_at, renewed_at = answer.at, now
        if now - renewed_at > SUPERVISOR_TIMEOUT_S or now - start > MAX_WAIT_S:
            log.warning(
                "the supervisor has not permitted the engine to start in time, so the engine "
                "starts anyway"
            )
            return
        if answer.reason and answer.reason != logged:
            logged = answer.reason
            log.warning("the engine waits for its devices before it starts: %s", logged)
        time.sleep(POLL_INTERVAL_S)


def _read_answer(run_dir: Path) -> GateAnswer | None:
    data = read_gate_file(run_dir / GATE_ANSWER_FILE)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=GateAnswer)
    except msgspec.MsgspecError:
        return None
