"""Hold the start of an engine until memory that an earlier engine left on its devices is free."""

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
    ANSWER_FILE,
    MAX_GATE_REASON,
    QUESTION_FILE,
    GateAnswer,
    Question,
    read_gate_file,
)
from plimsoll_api.supervision import Action, StartGate
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.signals.device_memory import DeviceBytes, DeviceUsers
from plimsoll_sidecar.signals.process_table import read_command_line

log = logging.getLogger(__name__)

FREE_BYTES, FREE_SHARE = 1 << 30, 0.02
"""A device is free if less is in use than the larger of this size, in bytes, and this share of its
memory. The driver takes 600 MB of an H100."""
MAX_HOLDERS = 4
POD_REPLACE_WAIT_S = 600.0
"""Seconds for which a start is also held while the operator is to replace the pod. The engine then
starts, because the operator may be down, or the disruption budget may forbid the eviction."""


class DeviceUse(NamedTuple):
    """Memory in use on a device, in bytes, and its holders as far as the driver names them."""

    name: str
    used: int
    total: int
    holders: str

    @property
    def is_free(self) -> bool:
        """Whether the device has the memory that an engine expects."""
        return self.used <= max(FREE_BYTES, FREE_SHARE * self.total)


class GateOutcome(StrEnum):
    """Reason why a held start was permitted, as the metric names it."""

    FREE = "free"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


class EngineStartGate:
    """Hold the start of one engine while its devices are in use.

    ``devices`` returns the use of the engine's devices; None if it is unknown. The engine then
    starts.
    """

    def __init__(self, run_dir: Path, devices: Callable[[], Sequence[DeviceUse] | None]) -> None:
        self._answer_file, self._devices = run_dir / ANSWER_FILE, devices
        self._question_file = run_dir / QUESTION_FILE
        self._answered: str | None = None
        self._asked, self._since = "", 0.0
        self._late: Suspicion | None = None
        self.permitted_starts: list[tuple[GateOutcome, float]] = []
        """Starts permitted since the list was cleared, with the seconds that each was held."""

    def update(self, policy: StartGate | None, answers: bool, now: float) -> Suspicion | None:
        """Answer an engine that asks to start. Return a suspicion if it has been held too long.

        ``answers`` states whether the engine serves its admin API. ``now`` is in Unix seconds.
        """
        if policy is None:
            with contextlib.suppress(OSError):
                self._answer_file.unlink(missing_ok=True)
            self._answered = self._late = None
            return None
        asked = self._read_question()
        if self._answered is None:
            # An engine that runs was let through before the supervisor was started again.
            self._permit_start(asked if answers else "", now)
        if not asked or asked == self._answered:
            self._late = None if answers else self._late
            return self._late
        if asked != self._asked:
            self._asked, self._since, self._late = asked, now, None
        held_s, uses = now - self._since, self._devices()
        if answers or uses is None or all(use.is_free for use in uses):
            known = uses is not None
            self._finish_hold(
                asked, GateOutcome.FREE if known else GateOutcome.UNKNOWN, held_s, now
            )
            self._late = None
            return None
        reason = "; ".join(_format_use(use) for use in uses if not use.is_free)
        replaces = policy.then is Action.POD_REPLACE
        if held_s >= policy.within_s:
            self._late = _make_suspicion(uses, reason)
        if held_s >= policy.within_s + (POD_REPLACE_WAIT_S if replaces else 0.0):
            self._finish_hold(asked, GateOutcome.TIMEOUT, held_s, now)
            return self._late
        self._write(GateAnswer(now, self._answered or "", reason[:MAX_GATE_REASON]))
        return self._late

    def _read_question(self) -> str:
        data = read_gate_file(self._question_file)
        try:
            return msgspec.convert((data or b"").decode("ascii"), Question)
        except (UnicodeDecodeError, msgspec.ValidationError):
            return ""

    def _finish_hold(self, asked: str, outcome: GateOutcome, held_s: float, now: float) -> None:
        log.info(
            "permitted the engine to start after holding it for %.1f s; outcome: %s",
            held_s,
            outcome,
        )
        self.permitted_starts.append((outcome, held_s))
        self._permit_start(asked, now)

    def _permit_start(self, asked: str, now: float) -> None:
        if self._write(GateAnswer(now, asked)):
            self._answered = asked

    def _write(self, answer: GateAnswer) -> bool:
        try:
            replace_file(self._answer_file, msgspec.json.encode(answer))
        except OSError as error:
            log.warning(
                "cannot permit the engine to start, because the answer cannot be written: %s", error
            )
            return False
        return True


def make_device_use(name: str, memory: DeviceBytes, users: DeviceUsers | None) -> DeviceUse:
    """Return the use of a device. NVML names only the holders in this pod."""
    held = (
        [f"process {pid} ({_read_program_name(pid)})" for pid in users.processes] if users else []
    )
    if users is not None and users.mps_clients:
        held.append(f"{users.mps_clients} clients of MPS")
    unlisted = "another pod, or a process that has mapped the memory"
    return DeviceUse(name, memory.used, memory.total, ", ".join(held[:MAX_HOLDERS]) or unlisted)


def _read_program_name(pid: int) -> str:
    words = read_command_line(pid)
    return words[0].rsplit("/", 1)[-1][:63] if words else "ended"


def _format_use(use: DeviceUse) -> str:
    return f"device {use.name} has {format_bytes(use.used)} in use, held by {use.holders}"


def _make_suspicion(uses: Sequence[DeviceUse], reason: str) -> Suspicion:
    held = sum(use.used for use in uses if not use.is_free)
    return Suspicion(
        kind=IncidentKind.ORPHAN_DEVICE_MEMORY,
        segment=Segment.ORPHAN,
        confidence=1.0,
        consumed_ratio=1.0,
        bytes=held,
        over_budget=True,
        growing=False,
        evidence=[f"the engine waited to start: {reason}"],
    )
