"""Define the governor's commands, their results, and the output of a turn."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from plimsoll_api.admin import Capability, DrainMode, EngineState, ProcessMemory
from plimsoll_api.incidents import WaitReason
from plimsoll_api.supervision import Action
from plimsoll_sidecar.govern.incident import Incident


class Verb(StrEnum):
    """Kind of a command to the actuator, in the order of a remediation."""

    DIAGNOSE = "diagnose"
    TRIM = "trim"
    TAKE_SLOT = "take-slot"
    LEAVE = "leave"
    DRAIN = "drain"
    RESTART_WORKER = "restart-worker"
    RESTART_ENGINE = "restart-engine"
    MEET_PARTNER = "meet-partner"


class Command(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A command to the actuator, which the journal stores before it is sent.

    Attributes:
        operation_id: The ID of the command, also if it is sent again.
        incident: The name of the incident that needs the command.
        epoch: The epoch that the command is for. An engine in another epoch refuses it.
        stalled: Whether the engine serves no requests, so that the command waits neither for other
            replicas nor for a drain.
        leaves: Whether the slot is for an action that takes the pod out of service. The last ready
            replica must not do this.
        planned: Whether the restart has no fault as its cause, and can wait for another ready
            replica.
        meets_partner: Whether the pod stays out of its Services after the restart, until a request
            has passed through the engine and its partner.
        gives_up: Whether this is the last test with the partner. The pod then returns to its
            Services in any case.
        process: The suspected process, as incidents name it; None if unknown.
        mode: What a drain does with running requests.
        deadline_s: The longest drain in seconds.
        at: The time at which a restart is counted, in Unix seconds; None if none is counted.

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
        """Return ``processes`` with the suspected one first, as reports have a limited size."""
        return sorted(processes, key=lambda process: process.label != self.process)


class SlotRequest(msgspec.Struct, frozen=True):
    """Request for a restart slot; without an incident, the slot is released.

    ``taking`` is true while a command that takes the slot is in progress.
    """

    incident: str | None
    taking: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """Refusal of a restart slot. ``message`` changes only if the cause changes."""

    reason: WaitReason
    message: str


class Outcome(StrEnum):
    """Outcome of a command. ``REFUSED`` means that nothing was started."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REFUSED = "Refused"
    UNKNOWN = "Unknown"


class Result(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Result of a command, with the names of saved diagnostics.

    ``waits`` is the reason for the refusal of a slot; None if no slot was refused.
    """

    operation_id: str
    outcome: Outcome
    message: str = ""
    waits: WaitReason | None = None
    diagnostics: tuple[str, ...] = ()


class EngineProcess(msgspec.Struct, frozen=True):
    """One process of the engine, with its role or the name that an external engine gives it."""

    role: str
    pid: int


class EngineView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """State of the engine, from the same sample as the assessment of a turn.

    Attributes:
        epoch: The engine's epoch; None while the engine does not answer.
        state: The state that the engine reports; None while it does not answer.
        capabilities: The last known capabilities.
        replaceable: Whether the operator replaces the pod on request.
        abrupt: Whether requests still reach the pod after its eviction, until it has left its
            Services.
        manually_drained: Whether a person has taken the pod out of service and not resumed it.
        meets_partner: Whether the engine serves together with another engine, its partner, and the
            supervisor can send a request through both.
        restart_blocker: The reason why the engine must not restart without its partner; None if it
            may restart.
        group: The multi-node group that restarts together with the engine; empty without a group.
        recreated: Whether a controller may replace all pods of the group after the engine's
            container was started again.
        idle: Whether the engine has no request; None if unknown.
        processes: The processes that the engine reports, the main process first; empty if the
            engine does not answer.

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
    recreated: bool = False
    idle: bool | None = None
    processes: tuple[EngineProcess, ...] = ()

    @property
    def answers(self) -> bool:
        """Whether the engine answered the request for its status."""
        return self.epoch is not None


class EventType(StrEnum):
    """Type of a change of an incident: the reason of the Kubernetes Event."""

    OPENED = "Opened"
    CONFIRMED = "Confirmed"
    CLEARED = "Cleared"
    REMEDIATION = "Remediation"
    ADVANCED = "Advanced"
    ENDED = "Ended"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A change of an incident at the time ``at``, in Unix seconds."""

    type: EventType
    at: float
    incident: Incident
    action: Action | None = None


class Turn(msgspec.Struct):
    """Output of one turn of the governor: at most one new command, and the events.

    If ``changed``, the journal must store the state before the command is sent.
    """

    command: Command | None = None
    events: list[Event] = []
    changed: bool = False
