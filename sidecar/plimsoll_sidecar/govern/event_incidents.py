"""Create incidents that only record an event: a crash, or a manual action.

Such an incident opens and ends in one turn. A crash is recorded only if the supervisor observed the
epoch that ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from plimsoll_api.admin import EngineState, Role
from plimsoll_api.assessment import Assessment
from plimsoll_api.incident_record import Attribution, Reason, StepOutcome, StepRecord
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.units import format_bytes
from plimsoll_sidecar.govern.command import EngineProcess, EngineView, Outcome
from plimsoll_sidecar.govern.incident import Incident, make_incident_name
from plimsoll_sidecar.govern.verification import get_process_epoch

ENDING_STATES = frozenset({EngineState.STOPPING, EngineState.STOPPED})
# All processes of the engine run, and have allocated their memory.
HEALTHY_STATES = frozenset({EngineState.SERVING, EngineState.DRAINING, EngineState.DRAINED})


class LastHealthyState(msgspec.Struct, frozen=True):
    """Last healthy state of an epoch.

    If the epoch was never healthy, it is the last state with the most processes. Sizes are in
    bytes; None if unknown. ``at`` is in Unix seconds.
    """

    epoch: str
    at: float
    healthy: bool = False
    processes: tuple[EngineProcess, ...] = ()
    host_bytes: int | None = None
    device_bytes: int | None = None
    ending: bool = False
    oom_killed: bool = False

    def update(self, engine: EngineView, assessment: Assessment, now: float) -> LastHealthyState:
        """Return the state after a new sample."""
        oom_killed = self.oom_killed or any(
            suspicion.kind is IncidentKind.OUT_OF_MEMORY_KILL for suspicion in assessment.suspicions
        )
        ending = self.ending or engine.state in ENDING_STATES
        flagged = msgspec.structs.replace(self, oom_killed=oom_killed, ending=ending)
        healthy = engine.state in HEALTHY_STATES
        # An engine may lose a process before it serves. The state before that loss is kept.
        fuller = not self.healthy and len(engine.processes) >= len(self.processes)
        if engine.epoch != self.epoch or not (healthy or fuller):
            return flagged
        device = assessment.reserved or assessment.device
        return msgspec.structs.replace(
            flagged,
            at=now,
            healthy=healthy,
            processes=engine.processes or self.processes,
            host_bytes=assessment.host.current if assessment.host else None,
            device_bytes=device.current if device else None,
        )


def make_crash_record(
    last_state: LastHealthyState, view: EngineView, replica: str, host_limit: int | None, now: float
) -> Incident:
    """Return the incident that records an unexpected end of an epoch.

    ``view`` is the state of the engine in the next epoch. ``host_limit`` is the limit of host
    memory in bytes; None if unknown.
    """
    engine = get_process_epoch(last_state.epoch) != get_process_epoch(view.epoch or "")
    lost = [process for process in last_state.processes if process not in view.processes]
    process = _find_ended_process(
        last_state.processes if engine else lost, Role.FRONTEND if engine else Role.WORKER
    )
    summary = (
        "the engine ended unexpectedly" if engine else "the engine's worker ended unexpectedly"
    )
    if last_state.ending:
        summary = "the engine received a signal to stop, for example after a failed probe"
    names = ", ".join(f"{process.role} (PID {process.pid})" for process in lost) or "unknown"
    evidence = [
        f"the epoch changed from {last_state.epoch} to {view.epoch}, but no restart was requested",
        f"processes that ended: {names}",
        f"memory before: {_format_memory(last_state, host_limit)}",
        f"the engine was last healthy {now - last_state.at:.0f} s earlier",
    ]
    return Incident(
        name=make_incident_name(
            replica, IncidentKind.ENGINE_CRASH, last_state.epoch, last_state.at
        ),
        kind=IncidentKind.ENGINE_CRASH,
        epoch=last_state.epoch,
        opened_at=last_state.at,
        phase=IncidentPhase.UNRESOLVED,
        phase_since=now,
        attribution=Attribution(process=process, confidence=1.0, evidence=evidence),
        timeline=[
            StepRecord(
                time=now,
                step="NewEpoch",
                outcome=StepOutcome.SUCCEEDED,
                before_bytes=last_state.host_bytes,
                message="the engine's container restarted"
                if engine
                else "the frontend started a new worker",
            )
        ],
        ended_at=now,
        reason=Reason.CONTAINER_RESTARTED if engine else Reason.WORKER_RESTARTED,
        message=summary,
    )


def _find_ended_process(processes: Sequence[EngineProcess], role: Role) -> str:
    # The processes of external engines have names instead of roles.
    names = [process.role for process in processes]
    return role.value if role in names or not names else names[0]


def _format_memory(last_state: LastHealthyState, host_limit: int | None) -> str:
    host = (
        "host unknown"
        if last_state.host_bytes is None
        else f"host {format_bytes(last_state.host_bytes)}"
    )
    if host_limit is not None:
        host += f" of {format_bytes(host_limit)}"
    device = (
        ""
        if last_state.device_bytes is None
        else f", device {format_bytes(last_state.device_bytes)}"
    )
    return host + device


REASON_BY_ACTION = {
    "trim": Reason.MANUAL_TRIM,
    "drain": Reason.MANUAL_DRAIN,
    "restart": Reason.MANUAL_RESTART,
    "resume": Reason.MANUAL_RESUME,
}
REASON_BY_FAILURE = {
    Outcome.REFUSED: Reason.REFUSED,
    Outcome.FAILED: Reason.FAILED,
    Outcome.UNKNOWN: Reason.EFFECT_UNKNOWN,
}


class ManualAction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command of the CLI, such as ``restart``. Times are in Unix seconds.

    ``outcome`` and ``finished_at`` are None while the action is in progress.
    """

    id: str
    action: str
    epoch: str
    at: float
    outcome: Outcome | None = None
    message: str = ""
    finished_at: float | None = None

    @property
    def ends_epoch(self) -> bool:
        """Whether this action has ended its epoch, or may still end it."""
        return self.action == "restart" and self.outcome in (None, Outcome.SUCCEEDED)


def make_manual_action_record(action: ManualAction, replica: str, now: float) -> Incident:
    """Return the incident that records a finished manual action."""
    outcome = action.outcome or Outcome.UNKNOWN
    ended = action.finished_at or now
    reason = REASON_BY_FAILURE.get(outcome, REASON_BY_ACTION[action.action])
    step = StepRecord(
        time=action.at,
        step=REASON_BY_ACTION[action.action].value,
        outcome=StepOutcome(outcome.value),
        operation_id=action.id,
        finished_at=ended,
        message=action.message,
    )
    evidence = [f"a person ran the command plimsoll {action.action} in epoch {action.epoch}"]
    return Incident(
        name=f"{replica[:244]}-{action.id[-8:]}",
        kind=IncidentKind.MANUAL_ACTION,
        epoch=action.epoch,
        opened_at=action.at,
        phase=IncidentPhase.RESOLVED,
        phase_since=ended,
        attribution=Attribution(confidence=1.0, evidence=evidence),
        timeline=[step],
        ended_at=ended,
        reason=reason,
        message=action.message,
    )
