"""Which phase of an incident may follow which: one table, checked at every change.

::

    Open -> Trimming -> Confirmed -> AwaitingSlot -> [Draining] -> Restarting -> Verifying -> ended

A new epoch leads from any phase to Verifying. A suspicion that goes away before anything disruptive
began ends the incident. A refused restart leads back to Confirmed, and so does a restart that
returned too little: the next rung follows from there.
"""

from __future__ import annotations

from plimsoll_api.incidents import ENDED, IncidentPhase
from plimsoll_sidecar.govern.incident import Incident

FOLLOWS: dict[IncidentPhase, frozenset[IncidentPhase]] = {
    IncidentPhase.OPEN: frozenset(
        {
            IncidentPhase.TRIMMING,
            IncidentPhase.CONFIRMED,
            IncidentPhase.VERIFYING,
            IncidentPhase.RESOLVED,
        }
    ),
    IncidentPhase.TRIMMING: frozenset(
        {IncidentPhase.CONFIRMED, IncidentPhase.VERIFYING, IncidentPhase.RESOLVED}
    ),
    IncidentPhase.CONFIRMED: frozenset(
        {IncidentPhase.AWAITING_SLOT, IncidentPhase.VERIFYING, *ENDED}
    ),
    IncidentPhase.AWAITING_SLOT: frozenset(
        {
            IncidentPhase.CONFIRMED,
            IncidentPhase.DRAINING,
            IncidentPhase.RESTARTING,
            IncidentPhase.VERIFYING,
            *ENDED,
        }
    ),
    IncidentPhase.DRAINING: frozenset(
        {
            IncidentPhase.CONFIRMED,
            IncidentPhase.RESTARTING,
            IncidentPhase.VERIFYING,
            IncidentPhase.UNRESOLVED,
        }
    ),
    IncidentPhase.RESTARTING: frozenset(
        {
            IncidentPhase.CONFIRMED,
            IncidentPhase.VERIFYING,
            IncidentPhase.RESOLVED,
            IncidentPhase.UNRESOLVED,
        }
    ),
    IncidentPhase.VERIFYING: frozenset(
        {IncidentPhase.CONFIRMED, IncidentPhase.RESOLVED, IncidentPhase.UNRESOLVED}
    ),
    IncidentPhase.RESOLVED: frozenset(),
    IncidentPhase.SUPPRESSED: frozenset(),
    IncidentPhase.UNRESOLVED: frozenset(),
}


class IllegalPhaseChange(Exception):
    """A phase that cannot follow the present one: a bug of the governor."""


def move(incident: Incident, phase: IncidentPhase, now: float) -> None:
    """Bring ``incident`` into ``phase`` at ``now`` (Unix seconds); the same phase changes nothing.

    Raises :class:`IllegalPhaseChange` where :data:`FOLLOWS` does not allow it.
    """
    if phase is not incident.phase and phase not in FOLLOWS[incident.phase]:
        raise IllegalPhaseChange(
            f"incident {incident.name} is {incident.phase} and cannot become {phase}"
        )
    incident.enter(phase, now)
