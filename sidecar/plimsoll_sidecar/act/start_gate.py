"""Hold the start of an engine until its devices are free."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.files import replace_file
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.start_gate import (
    GATE_ANSWER_FILE,
    GATE_QUESTION_FILE,
    MAX_GATE_REASON_CHARS,
    GateAnswer,
    Question,
    read_gate_file,
)
from plimsoll_api.supervision import Action, StartGate
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.signals.device_memory import DeviceBytes, DeviceUsers
from plimsoll_sidecar.signals.process_table import read_command_line

log = logging.getLogger(__name__)

# The larger of the two applies. The driver uses 600 MB of an H100.
MAX_IDLE_BYTES, MAX_IDLE_SHARE = 1 << 30, 0.02
MAX_NAMED_HOLDERS = 4
# After this time, the engine starts: the operator may be down, or a disruption budget may forbid
# the eviction.
POD_REPLACE_WAIT_S = 600.0


class DeviceUse(NamedTuple):
    """Memory in use on a device in bytes, and the processes that hold it."""

    name: str
    used: int
    total: int
    holders: str

    @property
    def is_free(self) -> bool:
        """Whether so little memory is in use that an engine can start."""
        return self.used <= max(MAX_IDLE_BYTES, MAX_IDLE_SHARE * self.total)


class GateOutcome(StrEnum):
    """Reason for permitting a start; the label value of a metric."""

    FREE = "free"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


GATE_REASONS = {
    GateOutcome.FREE: "its devices are free",
    GateOutcome.TIMEOUT: "its devices are still in use after the timeout",
    GateOutcome.UNKNOWN: "the memory in use on its devices is unknown",
}


class EngineStartGate:
    """Holds the start of one engine while its devices are in use.

    The engine requests its start in a file in ``run_dir``, and reads the answer from another file.
    If ``read_devices`` returns None, the use is unknown, and the engine may start.
    """

    def __init__(
        self, run_dir: Path, read_devices: Callable[[], Sequence[DeviceUse] | None]
    ) -> None:
        self._answer_file, self._read_devices = run_dir / GATE_ANSWER_FILE, read_devices
        self._question_file = run_dir / GATE_QUESTION_FILE
        self._permitted_question: str | None = None
        self._held_question, self._held_since = "", 0.0
        self._late_suspicion: Suspicion | None = None
        self._logged: str | None = None
        self.permitted_starts: list[tuple[GateOutcome, float]] = []
        """Outcome of each permitted start, and the seconds for which it was held.

        The owner clears the list."""

    def handle_start_request(
        self, policy: StartGate | None, is_engine_answering: bool, now: float
    ) -> Suspicion | None:
        """Answer an engine that requests its start.

        Args:
            policy: The configuration of the start gate; None if no start is to be held.
            is_engine_answering: Whether the engine answers a request for its status.
            now: The time in Unix seconds.

        Returns:
            A suspicion if the start has been held for longer than the policy allows, or else None.

        """
        if policy is None:
            with contextlib.suppress(OSError):
                self._answer_file.unlink(missing_ok=True)
            self._permitted_question = self._late_suspicion = None
            return None
        question = self._read_start_request()
        if self._permitted_question is None:
            # An engine that answers was permitted to start before the supervisor restarted.
            self._permit_start(question if is_engine_answering else "", now)
        if not question or question == self._permitted_question:
            self._late_suspicion = None if is_engine_answering else self._late_suspicion
            return self._late_suspicion
        if question != self._held_question:
            self._held_question, self._held_since = question, now
            self._late_suspicion = None
        held_s, uses = now - self._held_since, self._read_devices()
        if is_engine_answering or uses is None or all(use.is_free for use in uses):
            is_known = uses is not None
            self._finish_hold(
                question, GateOutcome.FREE if is_known else GateOutcome.UNKNOWN, held_s, now
            )
            self._late_suspicion = None
            return None
        reason = "; ".join(_format_use(use) for use in uses if not use.is_free)
        replaces = policy.then is Action.POD_REPLACE
        if held_s >= policy.within_s:
            self._late_suspicion = _make_suspicion(uses, reason)
        if held_s >= policy.within_s + (POD_REPLACE_WAIT_S if replaces else 0.0):
            self._finish_hold(question, GateOutcome.TIMEOUT, held_s, now)
            return self._late_suspicion
        permitted = self._permitted_question or ""
        self._write_answer(GateAnswer(now, permitted, reason[:MAX_GATE_REASON_CHARS]))
        return self._late_suspicion

    def _read_start_request(self) -> str:
        data = read_gate_file(self._question_file)
        try:
            return msgspec.convert((data or b"").decode("ascii"), Question)
        except (UnicodeDecodeError, msgspec.ValidationError):
            return ""

    def shift_times(self, step_s: float) -> None:
        """Shift the start of a hold by ``step_s`` seconds after the clock was set."""
        self._held_since += step_s

    def _finish_hold(
        self, start_request: str, outcome: GateOutcome, held_s: float, now: float
    ) -> None:
        if not self._permit_start(start_request, now):
            return
        log.info(
            "permitted the engine to start after %.1f s, because %s", held_s, GATE_REASONS[outcome]
        )
        self.permitted_starts.append((outcome, held_s))

    def _permit_start(self, start_request: str, now: float) -> bool:
        is_written = self._write_answer(GateAnswer(now, start_request))
        if is_written:
            self._permitted_question = start_request
        return is_written

    def _write_answer(self, answer: GateAnswer) -> bool:
        try:
            replace_file(self._answer_file, msgspec.json.encode(answer))
        except OSError as error:
            if error.strerror != self._logged:  # the file is written with each sample
                log.warning(
                    "cannot permit the engine to start, because writing the answer file failed: %s",
                    error,
                )
            self._logged = error.strerror
            return False
        self._logged = None
        return True


def make_device_use(name: str, memory: DeviceBytes, users: DeviceUsers | None) -> DeviceUse:
    """Return the use of the device ``name``. None as ``users`` means unknown."""
    names = (
        [f"process {pid} ({_read_program_name(pid)})" for pid in users.processes] if users else []
    )
    if users is not None and users.mps_clients:
        names.append(f"{users.mps_clients} MPS clients")
    unlisted = "another pod, or a process that has mapped the memory"
    holders = ", ".join(names[:MAX_NAMED_HOLDERS]) or unlisted
    return DeviceUse(name, memory.used, memory.total, holders)


def _read_program_name(pid: int) -> str:
    words = read_command_line(pid)
    return words[0].rsplit("/", 1)[-1][:63] if words else "ended process"


def _format_use(use: DeviceUse) -> str:
    return f"device {use.name} has {format_bytes(use.used)} in use, held by {use.holders}"


def _make_suspicion(uses: Sequence[DeviceUse], reason: str) -> Suspicion:
    used_bytes = sum(use.used for use in uses if not use.is_free)
    return Suspicion(
        kind=IncidentKind.ORPHAN_DEVICE_MEMORY,
        segment=Segment.ORPHAN,
        confidence=1.0,
        consumed_ratio=1.0,
        bytes=used_bytes,
        over_budget=True,
        growing=False,
        evidence=[f"the engine waits to start: {reason}"],
    )
