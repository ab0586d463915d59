"""Holds the start of an engine until the devices are free of what an earlier one left there."""

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
    read_file,
)
from plimsoll_api.supervision import Action, StartGate
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.signals.device_memory import DeviceBytes, DeviceUsers
from plimsoll_sidecar.signals.process_table import read_command_line

log = logging.getLogger(__name__)

FREE_BYTES, FREE_SHARE = 1 << 30, 0.02
"""A device counts as free below either: the driver itself takes about 600 MB of an H100."""
MAX_HOLDERS = 4
REPLACED_S = 600.0
"""Seconds that a start is held for a replacement of its pod. Then it starts after all, because the
operator may be away, or the disruption budget may forbid the eviction."""


class DeviceUse(NamedTuple):
    """The memory in use on a device, in bytes, and who holds it as far as the driver says."""

    name: str
    used: int
    total: int
    holders: str

    @property
    def is_free(self) -> bool:
        """Whether the device has the memory that an engine expects."""
        return self.used <= max(FREE_BYTES, FREE_SHARE * self.total)


class GateOutcome(StrEnum):
    """End of a held start, as the metric names it."""

    FREE = "free"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


class EngineStarts:
    """The gate of one engine.

    ``devices`` returns the use of its devices; None if it is unknown, which holds nothing.
    """

    def __init__(self, run_dir: Path, devices: Callable[[], Sequence[DeviceUse] | None]) -> None:
        self._answer_file, self._devices = run_dir / ANSWER_FILE, devices
        self._question_file = run_dir / QUESTION_FILE
        self._answered: str | None = None
        self._asked, self._since = "", 0.0
        self._late: Suspicion | None = None
        self.ended: list[tuple[GateOutcome, float]] = []
        """Starts that the gate has let through, each with the seconds that it was held."""

    def update(self, policy: StartGate | None, answers: bool, now: float) -> Suspicion | None:
        """Answer the engine's question. Return what still holds the devices if it took too long.

        ``answers`` is whether the engine serves its admin API, and so has started. ``now`` is in
        Unix seconds.
        """
        if policy is None:
            with contextlib.suppress(OSError):
                self._answer_file.unlink(missing_ok=True)
            self._answered = self._late = None
            return None
        asked = self._question()
        if self._answered is None:
            # An engine that runs was let through before the supervisor was started again.
            self._let_start(asked if answers else "", now)
        if not asked or asked == self._answered:
            self._late = None if answers else self._late
            return self._late
        if asked != self._asked:
            self._asked, self._since, self._late = asked, now, None
        held_s, uses = now - self._since, self._devices()
        if answers or uses is None or all(use.is_free for use in uses):
            known = uses is not None
            self._end(asked, GateOutcome.FREE if known else GateOutcome.UNKNOWN, held_s, now)
            self._late = None
            return None
        reason = "; ".join(_text(use) for use in uses if not use.is_free)
        replaces = policy.then is Action.POD_REPLACE
        if held_s >= policy.within_s:
            self._late = _suspicion(uses, reason)
        if held_s >= policy.within_s + (REPLACED_S if replaces else 0.0):
            self._end(asked, GateOutcome.TIMEOUT, held_s, now)
            return self._late
        self._write(GateAnswer(now, self._answered or "", reason[:MAX_GATE_REASON]))
        return self._late

    def _question(self) -> str:
        data = read_file(self._question_file)
        try:
            return msgspec.convert((data or b"").decode("ascii"), Question)
        except (UnicodeDecodeError, msgspec.ValidationError):
            return ""

    def _end(self, asked: str, outcome: GateOutcome, held_s: float, now: float) -> None:
        log.info("the engine may start after %.1f s: devices %s", held_s, outcome)
        self.ended.append((outcome, held_s))
        self._let_start(asked, now)

    def _let_start(self, asked: str, now: float) -> None:
        if self._write(GateAnswer(now, asked)):
            self._answered = asked

    def _write(self, answer: GateAnswer) -> bool:
        try:
            replace_file(self._answer_file, msgspec.json.encode(answer))
        except OSError as error:
            log.warning("cannot answer an engine that starts: %s", error)
            return False
        return True


def device_use(name: str, memory: DeviceBytes, users: DeviceUsers | None) -> DeviceUse:
    """Return the use of a device, with its holders by name: NVML lists those of this pod."""
    held = [f"process {pid} ({_program(pid)})" for pid in users.processes] if users else []
    if users is not None and users.mps_clients:
        held.append(f"{users.mps_clients} clients of MPS")
    unlisted = "no process of this pod: another pod, or a peer that maps it"
    return DeviceUse(name, memory.used, memory.total, ", ".join(held[:MAX_HOLDERS]) or unlisted)


def _program(pid: int) -> str:
    words = read_command_line(pid)
    return words[0].rsplit("/", 1)[-1][:63] if words else "ended"


def _text(use: DeviceUse) -> str:
    return f"device {use.name} has {format_bytes(use.used)} in use, held by {use.holders}"


def _suspicion(uses: Sequence[DeviceUse], reason: str) -> Suspicion:
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
