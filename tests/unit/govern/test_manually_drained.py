"""A replica that a person drained is not restarted (``govern/phase_steps.py``)."""

from __future__ import annotations

import pytest

from plimsoll_api.incident_record import StepOutcome
from plimsoll_api.incidents import IncidentKind, IncidentPhase, WaitReason
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_sidecar.govern.command import Verb
from tests.unit.govern.governed import World, done

RESTARTS = {Verb.DRAIN, Verb.LEAVE, Verb.RESTART_WORKER, Verb.RESTART_ENGINE, Verb.TAKE_SLOT}


@pytest.fixture
def world() -> World:
    world = World()
    world.growth = 100_000_000
    return world


@pytest.mark.parametrize("kind", [IncidentKind.HOST_GROWTH, IncidentKind.STALL])
def test_its_incident_waits_for_the_resume_and_goes_on_then(
    world: World, kind: IncidentKind
) -> None:
    world.kind, world.manually_drained = kind, True
    world.run(60, done(world.to(Verb.DIAGNOSE)))
    (incident,) = world.open
    assert not RESTARTS & set(world.verbs)
    assert incident.phase is IncidentPhase.CONFIRMED
    assert incident.waits is WaitReason.MANUALLY_DRAINED
    assert "plimsoll resume" in incident.message
    told = len(world.events)
    world.run(20)
    assert len(world.events) == told, "the event is emitted once"
    world.manually_drained = False
    world.answer(world.to(Verb.TAKE_SLOT))
    assert incident.waits is None
    assert world.commands[-1].verb in RESTARTS


def test_a_slot_that_was_taken_meanwhile_goes_to_others(world: World) -> None:
    take = world.to(Verb.TAKE_SLOT)
    world.manually_drained = True
    world.run(3, done(take))
    assert world.governor.state.slot_holder is None
    assert world.open[0].waits is WaitReason.MANUALLY_DRAINED


def test_no_restart_follows_a_drain_that_a_person_joined(world: World) -> None:
    world.process = "frontend"
    drain = world.to(Verb.DRAIN)
    assert world.governor.count_restarts_left(world.now) == 2
    world.manually_drained = True
    world.run(3, done(drain))
    assert world.governor.state.slot_holder is None
    assert world.open[0].phase is IncidentPhase.CONFIRMED
    assert world.governor.count_restarts_left(world.now) == 3, "nothing was restarted"


def test_a_replacement_is_asked_for_anew_after_the_resume() -> None:
    world = World(Supervision(mode=Mode.RECOVER, ladder=(Action.POD_REPLACE,)))
    world.growth = 100_000_000
    take = world.to(Verb.TAKE_SLOT)
    world.run(2, done(take))
    (incident,) = world.open
    assert incident.timeline[-1].outcome is StepOutcome.REQUESTED
    world.manually_drained = True
    world.run(3)
    assert incident.timeline[-1].outcome is not StepOutcome.REQUESTED, "the operator evicts nobody"
    assert incident.waits is WaitReason.MANUALLY_DRAINED
    world.manually_drained = False
    world.run(3, done(world.to(Verb.TAKE_SLOT)))
    assert incident.timeline[-1].outcome is StepOutcome.REQUESTED
