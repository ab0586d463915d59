"""What the governor asks for, what comes back, and what it tells."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from plimsoll_api.admin import Capability, DrainMode, EngineState, ProcessMemory
from plimsoll_api.incidents import WaitReason
from plimsoll_api.supervision import Action
from plimsoll_sidecar.govern.incident import Incident


class Verb(StrEnum):
    """What an actuator can be told to do, in the order of their effect on requests."""

    DIAGNOSE = "diagnose"
    TRIM = "trim"
    TAKE_SLOT = "take-slot"
    LEAVE = "leave"
    DRAIN = "drain"
    RESTART_WORKER = "restart-worker"
    RESTART_ENGINE = "restart-engine"


class Command(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One thing to do. It is in the journal before it is sent.

    ``epoch`` is the fence; ``operation_id`` makes a repetition harmless. ``stalled`` says that the
    engine serves nobody: nothing is gained by waiting for other replicas or for a drain. ``leaves``
    says that the slot is for an action that takes the pod out of service, which the last ready
    replica must not do. ``process`` is the one that is suspected, as incidents name it. ``at`` is
    the time under which a restart for this slot is counted.
    """

    verb: Verb
    operation_id: str
    incident: str
    epoch: str
    stalled: bool = False
    leaves: bool = False
    process: str | None = None
    mode: DrainMode = DrainMode.FINISH
    deadline_s: float = 0.0
    at: float | None = None

    def result(self, outcome: Outcome, message: str = "") -> Result:
        """Return what became of this command."""
        return Result(operation_id=self.operation_id, outcome=outcome, message=message)

    def suspected_first(self, processes: Iterable[ProcessMemory]) -> list[ProcessMemory]:
        """In the order of evidence: whatever has bounds keeps what matters most."""
        return sorted(processes, key=lambda process: process.label != self.process)


class SlotWish(msgspec.Struct, frozen=True):
    """The incident in the journal that the restart slot is for; None without one.

    While a command is ``taking`` one, that command decides.
    """

    incident: str | None
    taking: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """Why a restart slot was not taken.

    ``message`` is for people, and the same for each try as long as the reason is the same.
    """

    reason: WaitReason
    message: str


class Outcome(StrEnum):
    """``Refused``: nothing was begun, assess again. ``Unknown``: no one can say (a replay)."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REFUSED = "Refused"
    UNKNOWN = "Unknown"


class Result(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What became of a command.

    ``diagnostics`` names files that were saved, ``waits`` says why a slot was not taken.
    """

    operation_id: str
    outcome: Outcome
    message: str = ""
    waits: WaitReason | None = None
    diagnostics: tuple[str, ...] = ()


class EngineProcess(msgspec.Struct, frozen=True):
    """One process of the engine, by its role or the engine's own name for it, and PID."""

    role: str
    pid: int


class EngineView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The engine at the moment of an assessment, both from the same sample.

    ``epoch`` is null while the engine does not answer. ``capabilities`` are the last known.
    ``replaceable`` says that the pod can be replaced on request, and ``abrupt`` that requests then
    still reach it until it has left its Services. ``manually_drained`` says that a person has taken
    the pod out of service and not resumed it. ``processes`` are those that the engine names, first
    the one with which the others end; none if it does not answer.
    """

    epoch: str | None
    state: EngineState | None = None
    capabilities: frozenset[Capability] = frozenset()
    replaceable: bool = False
    abrupt: bool = False
    manually_drained: bool = False
    processes: tuple[EngineProcess, ...] = ()

    @property
    def answers(self) -> bool:
        """Whether the engine gave a status: only then is its epoch known."""
        return self.epoch is not None


class EventType(StrEnum):
    """What a turn tells the log, the metrics and Kubernetes; the values are the Events' reasons."""

    OPENED = "Opened"
    CONFIRMED = "Confirmed"
    CLEARED = "Cleared"
    REMEDIATION = "Remediation"
    ADVANCED = "Advanced"
    ENDED = "Ended"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A change in an incident's life. ``action`` is set on ``Remediation``: it is begun now."""

    type: EventType
    at: float
    incident: Incident
    action: Action | None = None


class Turn(msgspec.Struct):
    """One advance of the governor: at most one new command, and what happened.

    ``changed`` says that the state must be written to the journal before the command is sent.
    """

    command: Command | None = None
    events: list[Event] = []
    changed: bool = False
