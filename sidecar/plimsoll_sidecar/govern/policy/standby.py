"""Whether the engine should have a worker prepared for a restart that may come. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_api.admin import Capability
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_sidecar.govern.command import EngineView
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.policy import ladder

BEFORE = frozenset(
    {
        IncidentPhase.OPEN,
        IncidentPhase.TRIMMING,
        IncidentPhase.CONFIRMED,
        IncidentPhase.AWAITING_SLOT,
    }
)
"""Phases of an incident that may still lead to a restart."""


def wants_standby(
    incidents: Iterable[Incident], policy: Supervision, engine: EngineView, exhausted: bool
) -> bool:
    """Whether an incident may lead to a restart of the worker, or does so now.

    Never for an engine that takes no leases, nor where nothing may be restarted.
    """
    if Capability.STANDBY not in engine.capabilities:
        return False
    if policy.mode is Mode.OBSERVE or exhausted:
        return False
    return any(_restarts_worker(incident, policy, engine) for incident in incidents)


def _restarts_worker(incident: Incident, policy: Supervision, engine: EngineView) -> bool:
    if incident.phase is IncidentPhase.RESTARTING:
        # The command may be on its way: the standby is what it is to use. In the next epoch the
        # worker is new, though the answer that says so may still be on its way.
        return incident.rung is Action.WORKER_RESTART and engine.epoch == incident.fenced_epoch
    attribution = incident.attribution
    next_rung = ladder.next_disruptive(
        incident.kind,
        attribution.process,
        incident.tried,
        policy.ladder,
        engine,
        policy.sweep_shared_memory,
        attribution.pod,
    )
    return incident.phase in BEFORE and next_rung is Action.WORKER_RESTART
