"""Define the governor's commands, their results, and the events of a turn."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from plimsoll_api.admin import Capability, DrainMode, EngineState, ProcessMemory
from plimsoll_api.incidents import WaitReason
from plimsoll_api.supervision import Action
from plimsoll_sidecar.govern.incident import Incident


class Verb(StrEnum):
    """Commands of the actuator, from the least to the most disruptive for requests."""

    DIAGNOSE = "diagnose"
    TRIM = "trim"
    TAKE_SLOT = "take-slot"
    LEAVE = "leave"
    DRAIN = "drain"
    RESTART_WORKER = "restart-worker"
    RESTART_ENGINE = "restart-engine"
    MEET_PARTNER = "meet-partner"


class Command(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A command to the actuator, which is written to the journal before it is sent.

    Attributes:
        operation_id: An ID that makes a repetition of the command harmless.
        incident: The name of the incident that needs the command.
        epoch: The epoch that the command is for. An engine in another epoch refuses it.
        stalled: The engine serves no requests, so waiting for other replicas or for a drain gains
            nothing.
        leaves: The slot is for an action that takes the pod out of service, which the last ready
            replica must not do.
        planned: Nothing is wrong, so the restart can wait for another ready replica.
        meets_partner: After the restart, the pod stays out of its Services until a request has
            passed through the engine and its partner.
        gives_up: This is the last such request. The pod then returns to its Services in any case.
        process: The suspected process, as incidents name it.
        deadline_s: The longest drain in seconds.
        at: The time in Unix seconds under which a restart is counted.

    """

    verb: Verb
    operation_id: str
    incident: str
    epoch: str
    stalled: bool = False
    leaves: bool = False
    planned: bool = False
    meets_partner: bool = False
    gives_up: bool = False
    process: str | None = None
    mode: DrainMode = DrainMode.FINISH
    deadline_s: float = 0.0
    at: float | None = None

    def make_result(self, outcome: Outcome, message: str = "") -> Result:
        """Return a result of this command."""
        return Result(operation_id=self.operation_id, outcome=outcome, message=message)

    def sort_suspected_first(self, processes: Iterable[ProcessMemory]) -> list[ProcessMemory]:
        """Return the processes with the suspected one first, so that bounded reports keep it."""
        return sorted(processes, key=lambda process: process.label != self.process)


class SlotRequest(msgspec.Struct, frozen=True):
    """Request for a restart slot, according to the journal.

    ``incident`` is the name of the incident that needs the slot; None if no incident needs one.
    ``taking`` is true while a command is taking the slot; the slot then depends on its result.
    """

    incident: str | None
    taking: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """Reason why a restart slot was refused.

    ``message`` is for people. It stays the same as long as the reason does.
    """

    reason: WaitReason
    message: str


class Outcome(StrEnum):
    """Outcome of a command.

    ``Refused`` means that nothing was started. ``Unknown`` means that the effect is not known, for
    example in a replay.
    """

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REFUSED = "Refused"
    UNKNOWN = "Unknown"


class Result(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Result of a command.

    ``diagnostics`` lists the files that were saved. ``waits`` is the reason for a refused slot.
    """

    operation_id: str
    outcome: Outcome
    message: str = ""
    waits: WaitReason | None = None
    diagnostics: tuple[str, ...] = ()


class EngineProcess(msgspec.Struct, frozen=True):
    """One process of the engine: its PID, and its role or the engine's own name for it."""

    role: str
    pid: int


class EngineView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """State of the engine, from the same sample as the assessment that it belongs to.

    Attributes:
        epoch: The engine's epoch; None while the engine does not answer.
        state: The state that the engine reports; None while it does not answer.
        capabilities: The last known capabilities.
        replaceable: Whether the pod can be replaced on request.
        abrupt: Whether requests still reach the pod until it has left its Services.
        manually_drained: Whether a person has taken the pod out of service and not resumed it.
        meets_partner: Whether the engine serves together with another engine, and the supervisor
            can send a request through both.
        restart_blocker: The reason not to restart the engine without that other engine; None if
            there is none.
        group: The multi-node group that restarts together with the engine; empty without one.
        idle: Whether the engine has no request; None if that is unknown.
        processes: The processes that the engine reports, the main process first; empty if it does
            not answer.

    """

    epoch: str | None
    state: EngineState | None = None
    capabilities: frozenset[Capability] = frozenset()
    replaceable: bool = False
    abrupt: bool = False
    manually_drained: bool = False
    meets_partner: bool = False
    restart_blocker: str | None = None
    group: str = ""
    idle: bool | None = None
    processes: tuple[EngineProcess, ...] = ()

    @property
    def answers(self) -> bool:
        """Whether the engine reported its status, and therefore its epoch."""
        return self.epoch is not None


class EventType(StrEnum):
    """Changes that the log, the metrics and Kubernetes report. The values are Event reasons."""

    OPENED = "Opened"
    CONFIRMED = "Confirmed"
    CLEARED = "Cleared"
    REMEDIATION = "Remediation"
    ADVANCED = "Advanced"
    ENDED = "Ended"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A change of an incident. ``action`` is set for ``Remediation``, when the action starts."""

    type: EventType
    at: float
    incident: Incident
    action: Action | None = None


class Turn(msgspec.Struct):
    """Output of one turn of the governor: at most one new command, and the events.

    ``changed`` states whether the state must be written to the journal before the command is sent.
    """

    command: Command | None = None
    events: list[Event] = []
    changed: bool = False
