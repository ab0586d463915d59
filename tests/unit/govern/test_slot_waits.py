"""A replica that waits for its restart slot says why, once for each reason.

Tests ``govern/governor.py``.
"""

from msgspec.structs import replace

from plimsoll_api.incident_record import Reason, StepOutcome
from plimsoll_api.incidents import IncidentPhase, WaitReason
from plimsoll_api.supervision import Action
from plimsoll_sidecar.govern.command import Command, Outcome, Result, Verb
from plimsoll_sidecar.govern.incident import MAX_STORED_STEPS
from plimsoll_sidecar.govern.state import MAX_SLOT_WAIT_S
from tests.unit.govern.governed import World, done

BUDGET = WaitReason.SERVICE_RESTART_BUDGET, "the service had 3 restarts within 3600 s"
HELD = WaitReason.SLOT_HELD, "leaky-1 holds leaky-slot-0"


def leaking() -> World:
    world = World()
    world.growth = 500_000_000
    return world


def refused(command: Command, why: tuple[WaitReason, str]) -> Result:
    return Result(
        operation_id=command.operation_id, outcome=Outcome.REFUSED, message=why[1], waits=why[0]
    )


def test_thirty_tries_for_one_reason_are_one_step() -> None:
    world = leaking()
    command = world.to(Verb.TAKE_SLOT)
    for _ in range(30):
        told = len(world.events)
        command = world.until_command(refused(command, BUDGET))
        assert command.verb is Verb.TAKE_SLOT
    assert len(world.events) == told, "nothing is published while nothing changes"
    world.tick(refused(command, BUDGET))
    (incident,) = world.open
    assert (incident.waits, incident.message) == BUDGET
    assert incident.phase is IncidentPhase.AWAITING_SLOT
    tries = [step for step in incident.timeline if step.step == "TakeSlot"]
    assert [(step.outcome, step.message) for step in tries] == [(StepOutcome.REFUSED, BUDGET[1])]


def test_another_reason_is_another_step_and_the_slot_ends_the_wait() -> None:
    world = leaking()
    command = world.to(Verb.TAKE_SLOT)
    for why in (BUDGET, BUDGET, HELD, HELD, BUDGET):
        command = world.until_command(refused(command, why))
    restart = world.answer(command)
    assert restart.verb is Verb.RESTART_WORKER
    (incident,) = world.open
    said = [step.message for step in incident.timeline if step.step == "TakeSlot"]
    assert said == [BUDGET[1], HELD[1], BUDGET[1], ""]
    assert (incident.waits, incident.message) == (None, "")


def test_no_operation_has_the_id_of_another() -> None:
    """Also when the timeline has forgotten steps: an engine answers a known id with what it did."""
    world = leaking()
    command = world.to(Verb.TAKE_SLOT)
    for number in range(3 * MAX_STORED_STEPS):
        command = world.until_command(refused(command, (BUDGET, HELD)[number % 2]))
    world.answer(command)
    ids = [command.operation_id for command in world.commands]
    assert len(set(ids)) == len(ids)


def test_a_wait_that_is_too_long_ends_with_its_reason() -> None:
    world = leaking()
    command = world.to(Verb.TAKE_SLOT)
    world.now += MAX_SLOT_WAIT_S
    world.run(5, refused(command, BUDGET))
    (incident,) = world.ended
    assert incident.reason is Reason.SLOT_TIMEOUT
    assert (incident.waits, incident.message) == BUDGET


def test_the_restart_has_the_time_under_which_its_slot_counted_it() -> None:
    world = leaking()
    take = world.to(Verb.TAKE_SLOT)
    assert take.at is not None
    world.answer(take)
    assert world.governor.copy_restarts().at == (take.at,)


def test_a_slot_goes_to_others_while_its_incident_no_longer_has_to_restart() -> None:
    """The policy is changed while the slot is asked for, and the memory falls within its budget."""
    world = leaking()
    take = world.to(Verb.TAKE_SLOT)
    policy = world.governor.policy
    world.governor.policy = replace(policy, ladder=(Action.TRIM, Action.ENGINE_RESTART))
    world.over_budget = False
    world.run(3, done(take))
    assert world.open[0].phase is IncidentPhase.CONFIRMED
    assert world.governor.state.slot_holder is None


def test_memory_that_stops_growing_while_the_slot_is_asked_for_costs_no_restart() -> None:
    world = leaking()
    take = world.to(Verb.TAKE_SLOT)
    world.growing = False
    world.run(30, done(take))
    assert world.open[0].phase is IncidentPhase.CONFIRMED
    assert world.governor.state.slot_holder is None
    assert Verb.RESTART_WORKER not in world.verbs
