"""The last rung: a pod that nothing else has cured is replaced, by the operator.

Tests ``govern/phases.py``.
"""

import msgspec

from plimsoll_api.admin import Capability
from plimsoll_api.assessment import Segment
from plimsoll_api.incident_record import Reason, StepOutcome
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Action, Mode, RestartBudget, Supervision
from plimsoll_sidecar.govern.command import Outcome, Verb
from plimsoll_sidecar.govern.state import MAX_SLOT_WAIT_S, GovernorState
from tests.unit.govern.governed import ROUND, World, done

ALL = Supervision(mode=Mode.RECOVER, ladder=tuple(Action))
ONLY = Supervision(mode=Mode.RECOVER, ladder=(Action.TRIM, Action.POD_REPLACE))


def replacing(policy: Supervision = ONLY) -> World:
    """A world whose incident has asked for its pod to be replaced."""
    world = World(policy)
    world.growth = 500_000_000
    command = world.until_command()
    while command.verb is not Verb.TAKE_SLOT:
        command = world.answer(command)
    assert command.leaves
    world.tick(done(command))
    world.tick()
    return world


def test_it_follows_when_every_restart_returned_nothing() -> None:
    world = World(ALL)
    world.growth = 500_000_000
    drain = world.answer(world.to(Verb.RESTART_WORKER), Outcome.FAILED)
    engine = world.answer(drain)
    assert engine.verb is Verb.RESTART_ENGINE
    world.run(3, done(engine, Outcome.FAILED))
    (incident,) = world.open
    assert incident.phase is IncidentPhase.RESTARTING
    last = incident.timeline[-1]
    assert (last.step, last.outcome) == ("PodReplace", StepOutcome.REQUESTED)
    assert incident.tried == [Action.WORKER_RESTART, Action.ENGINE_RESTART, Action.POD_REPLACE]


def test_the_request_waits_for_the_operator_and_nothing_further_is_done() -> None:
    world = replacing()
    sent = len(world.commands)
    world.run(1000)
    (incident,) = world.open
    assert (incident.phase, incident.rung) == (IncidentPhase.RESTARTING, Action.POD_REPLACE)
    assert incident.timeline[-1].outcome is StepOutcome.REQUESTED
    assert world.commands[sent:] == []
    assert world.governor.state.slot_holder == incident.name


def test_a_slot_is_not_kept_for_ever_for_an_operator_that_is_away() -> None:
    world = replacing()
    sent = len(world.commands)
    world.run(int(MAX_SLOT_WAIT_S) + 10)
    assert world.governor.state.slot_holder is None
    world.run(1000)
    assert world.commands[sent:] == []
    assert world.open[0].timeline[-1].outcome is StepOutcome.REQUESTED


def test_the_request_outlives_a_restart_of_the_supervisor() -> None:
    world = replacing()
    data = msgspec.json.encode(world.governor.state)
    world.governor.state = msgspec.json.decode(data, type=GovernorState)
    sent = len(world.commands)
    world.run(50)
    assert world.open[0].timeline[-1].outcome is StepOutcome.REQUESTED
    assert world.commands[sent:] == []


def test_it_counts_as_a_restart_and_needs_budget() -> None:
    world = replacing()
    assert [r.epoch for r in world.governor.state.restarts] == ["boot:1"]
    budget = RestartBudget(count=0)
    world = World(msgspec.structs.replace(ONLY, restart_budget=budget))
    world.growth = 500_000_000
    command = world.until_command()
    while not world.ended:
        world.tick(*([done(command)] if world.governor.state.pending else []))
        command = world.governor.state.pending or command
    assert world.ended[0].reason is Reason.RESTART_BUDGET_EXHAUSTED


def test_memory_that_came_back_withdraws_the_request() -> None:
    world = replacing()
    world.growth, world.suspect = 0, False
    world.run(ROUND + 1)
    assert world.ended[0].reason in (Reason.CLEARED, Reason.TRIM)


def escalated() -> World:
    """A world in which restarts returned nothing, so that the incident waits for another pod."""
    world = World(ALL)
    world.growth = 500_000_000
    drain = world.answer(world.to(Verb.RESTART_WORKER), Outcome.FAILED)
    world.run(3, done(world.answer(drain), Outcome.FAILED))
    (incident,) = world.open
    assert (incident.escalated, incident.rung) == (True, Action.POD_REPLACE)
    return world


def test_memory_that_came_back_after_restarts_that_did_not_help_ends_the_wait() -> None:
    """A disruption budget may keep the pod for ever."""
    world = escalated()
    world.growth, world.suspect = 0, False
    world.run(ROUND + 1)
    assert (world.open, world.ended[0].reason) == ([], Reason.CLEARED)
    assert world.ended[0].returned_bytes == 500_000_000


def test_that_nobody_suspects_a_new_baseline_does_not_end_the_wait() -> None:
    world = escalated()
    world.suspect = False
    world.run(100)
    (incident,) = world.open
    assert incident.timeline[-1].outcome is StepOutcome.REQUESTED


def test_an_engine_that_started_anew_withdraws_the_request() -> None:
    world = replacing()
    world.renew()
    world.run(3)
    crash, leak = world.ended
    assert crash.kind is IncidentKind.ENGINE_CRASH
    assert leak.reason is Reason.NEW_EPOCH
    assert leak.timeline[-1].step == "NewEpoch"


def test_observe_withdraws_the_request_before_anybody_evicts() -> None:
    world = replacing()
    world.governor.policy = msgspec.structs.replace(ONLY, mode=Mode.OBSERVE)
    world.run(3)
    (incident, *_) = [*world.open, *world.ended]
    assert "PodReplaceWithdrawn" in [step.step for step in incident.timeline]
    assert incident.timeline[-1].outcome is not StepOutcome.REQUESTED
    assert world.governor.state.restarts == []


def test_a_pod_that_would_cut_off_its_requests_leaves_its_services_first() -> None:
    world = World(ONLY)
    world.growth, world.abrupt = 500_000_000, True
    leave = world.to(Verb.LEAVE)
    (incident,) = world.open
    assert (incident.phase, incident.timeline[-1].step) == (IncidentPhase.DRAINING, "Drain")
    assert leave.deadline_s == ONLY.drain.deadline_s
    world.tick(done(leave))
    assert incident.phase is IncidentPhase.RESTARTING
    last = incident.timeline[-1]
    assert (last.step, last.outcome) == ("PodReplace", StepOutcome.REQUESTED)
    assert incident.tried == [Action.POD_REPLACE]


def test_a_refused_leave_asks_for_no_replacement_and_counts_no_restart() -> None:
    world = World(ONLY)
    world.growth, world.abrupt = 500_000_000, True
    world.tick(done(world.to(Verb.LEAVE), Outcome.REFUSED))
    (incident,) = world.open
    assert incident.phase in (IncidentPhase.CONFIRMED, IncidentPhase.AWAITING_SLOT)
    assert "PodReplace" not in [step.step for step in incident.timeline]
    assert world.governor.state.restarts == []


def test_a_stalled_pod_is_replaced_at_once() -> None:
    world = World(ONLY)
    world.kind, world.abrupt = IncidentKind.STALL, True
    command = world.until_command()
    while command.verb is not Verb.TAKE_SLOT:
        command = world.answer(command)
    world.run(2, done(command))
    assert world.open[0].timeline[-1].outcome is StepOutcome.REQUESTED


def test_outside_of_a_cluster_the_rung_is_skipped() -> None:
    world = World(ONLY)
    world.growth, world.replaceable = 500_000_000, False
    world.run(100, done(world.to(Verb.DIAGNOSE)))
    assert world.ended[0].reason is Reason.LADDER_EXHAUSTED
    assert world.verbs == [Verb.TRIM, Verb.DIAGNOSE]


def test_observe_only_says_that_it_would() -> None:
    world = World(msgspec.structs.replace(ONLY, mode=Mode.OBSERVE))
    world.growth = 500_000_000
    world.run(200)
    steps = [(step.step, step.outcome) for step in world.ended[0].timeline]
    assert steps[-1] == ("PodReplace", StepOutcome.WOULD)


def test_a_stall_is_cured_while_the_pod_waits_for_its_operator() -> None:
    world = replacing()
    world.governor.policy = ALL
    world.kind = IncidentKind.STALL
    restart = world.to(Verb.RESTART_WORKER)
    assert restart.stalled
    world.renew()
    world.run(20, done(restart))
    # In this world a stall takes the suspicion of growth away with it.
    assert {i.reason for i in world.ended} == {Reason.WORKER_RESTART, Reason.CLEARED}


def test_the_last_ready_replica_leaves_only_where_memory_ends_before_a_drain_could() -> None:
    capabilities = frozenset({Capability.RESTART_ENGINE})
    for rate, leaves in ((1e6, True), (1e9, False), (None, True)):
        host = MemoryBudget(growth_bytes=2**28, window_s=3600.0, limit_bytes=8 * 2**30)
        policy = Supervision(mode=Mode.RECOVER, ladder=(Action.ENGINE_RESTART,))
        world = World(policy, memory=MemoryPolicy(host=host, warmup_s=2.0))
        world.growth, world.rate, world.capabilities = 500_000_000, rate, capabilities
        assert world.to(Verb.TAKE_SLOT).leaves is leaves


def orphaned(policy: Supervision) -> World:
    """A world whose shared memory is held by nobody."""
    world = World(policy)
    world.growth, world.process, world.segment = 500_000_000, None, Segment.SHARED_ORPHAN
    return world


def test_memory_that_no_process_holds_is_returned_by_a_new_pod_alone() -> None:
    world = orphaned(ALL)
    command = world.until_command()
    while command.verb is not Verb.TAKE_SLOT:
        assert command.verb is Verb.DIAGNOSE, "no trim and no restart cures it"
        command = world.answer(command)
    world.tick(done(command))
    world.tick()
    (incident,) = world.open
    assert incident.tried == [Action.POD_REPLACE]


def test_a_restart_cures_it_where_the_supervisor_sweeps_and_is_believed_when_it_is_gone() -> None:
    world = orphaned(msgspec.structs.replace(ALL, sweep_shared_memory=True))
    world.capabilities -= {Capability.DRAIN}
    engine = world.to(Verb.RESTART_ENGINE)
    world.number += 1
    world.run(30, done(engine))
    (incident,) = world.open
    assert incident.phase is IncidentPhase.VERIFYING, "it is suspected still"
    world.suspect, world.growth = False, 0
    world.run(30)
    assert not world.open
