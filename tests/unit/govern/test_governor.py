"""The governor against a small model of an engine: every step of an incident's life."""

import msgspec
import pytest

from plimsoll_api.admin import EngineState
from plimsoll_api.assessment import Segment, Suspicion
from plimsoll_api.incident_record import Reason, StepOutcome
from plimsoll_api.incidents import IncidentKind, IncidentPhase, WaitReason
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Action, Mode, RestartBudget, Supervision
from plimsoll_sidecar.govern.command import EventType, Outcome, Result, SlotRequest, Verb
from plimsoll_sidecar.govern.incident import SUBSIDED_AFTER_S
from plimsoll_sidecar.govern.phase_steps import NOT_GROWING_MESSAGE, WITHIN_BUDGET_MESSAGE
from plimsoll_sidecar.govern.state import FIRST_BACK_OFF_S, MAX_BACK_OFF_S, GovernorState
from plimsoll_sidecar.govern.verification import MEMORY_SETTLE_S
from tests.unit.govern.governed import BASELINE, ROUND, World, done


def test_a_leak_is_trimmed_confirmed_and_cured_by_a_worker_restart() -> None:
    world = World()
    world.growth = 500_000_000
    restart = world.to(Verb.RESTART_WORKER)
    assert world.verbs == [Verb.TRIM, Verb.DIAGNOSE, Verb.TAKE_SLOT, Verb.RESTART_WORKER]
    assert restart.epoch == "boot:1"
    assert world.open[0].phase is IncidentPhase.RESTARTING
    world.renew(growth=10_000_000)
    world.run(20, done(restart))
    (incident,) = world.ended
    assert (incident.phase, incident.reason) == (IncidentPhase.RESOLVED, Reason.WORKER_RESTART)
    assert incident.returned_bytes == 490_000_000
    assert world.governor.state.slot_holder is None
    assert world.governor.state.pending is None
    assert [e.action for e in world.events if e.type is EventType.REMEDIATION] == [
        Action.TRIM,
        Action.WORKER_RESTART,
    ]
    assert len({step.operation_id for step in incident.timeline}) == len(incident.timeline)


def test_what_is_seen_during_a_restart_does_not_rename_the_memory() -> None:
    world = World()
    world.growth = 1 << 30
    world.to(Verb.RESTART_WORKER)
    # The old worker has ended, the new one is small yet: no process has grown any more.
    world.process = None
    world.run(3)
    assert world.open[0].phase is IncidentPhase.RESTARTING
    assert world.open[0].attribution.process == "worker"


def test_a_trim_that_returns_the_growth_resolves_the_incident() -> None:
    world = World()
    world.growth = 400_000_000
    trim = world.to(Verb.TRIM)
    world.growth, world.suspect = 20_000_000, False
    world.run(ROUND + 1, done(trim))
    (incident,) = world.ended
    assert (incident.phase, incident.reason) == (IncidentPhase.RESOLVED, Reason.TRIM)
    assert incident.returned_bytes == 380_000_000
    assert world.verbs == [Verb.TRIM]


@pytest.mark.parametrize(
    ("answered", "left", "outcome"),
    [
        (Outcome.SUCCEEDED, 500_000_000, StepOutcome.FAILED),
        (Outcome.SUCCEEDED, 470_000_000, StepOutcome.FAILED),
        (Outcome.SUCCEEDED, 300_000_000, StepOutcome.SUCCEEDED),
        (Outcome.UNKNOWN, 300_000_000, StepOutcome.SUCCEEDED),
        (Outcome.UNKNOWN, 500_000_000, StepOutcome.FAILED),
        (Outcome.FAILED, 300_000_000, StepOutcome.FAILED),
    ],
)
def test_a_trim_is_judged_by_what_came_back(
    answered: Outcome, left: int, outcome: StepOutcome
) -> None:
    world = World()
    world.growth = 500_000_000
    trim = world.to(Verb.TRIM)
    world.growth = left
    world.tick(done(trim, answered))
    (incident,) = world.open
    (step,) = incident.timeline
    world.run(ROUND)
    assert step.outcome is outcome
    assert step.after_bytes == BASELINE + left
    assert ("which is too little" in step.message) == (
        outcome is StepOutcome.FAILED and answered is not Outcome.FAILED
    )


def test_a_trim_that_a_restart_overtakes_was_not_measured() -> None:
    world = World()
    world.growth = 500_000_000
    trim = world.to(Verb.TRIM)
    world.tick(done(trim))
    (incident,) = world.open
    world.renew()
    world.tick()
    assert incident.timeline[0].outcome is StepOutcome.UNKNOWN


def test_the_reason_is_named_until_the_leak_is_confirmed() -> None:
    world = World()
    world.growth, world.over_budget = 100_000_000, False
    world.unconfirmed = "a warm-up"
    trim = world.to(Verb.TRIM)
    world.run(50, done(trim))
    (incident,) = world.open
    assert incident.attribution.evidence == ["the suspicion is not confirmed yet: a warm-up"]
    world.unconfirmed = None
    world.run(50)
    world.unconfirmed = "load that rose with it"  # it may come back, and it is believed by now
    world.run(5)
    assert incident.phase is IncidentPhase.CONFIRMED
    assert incident.attribution.evidence == []


def test_a_spent_budget_restarts_nothing_while_memory_is_flat() -> None:
    world = World()
    world.growth, world.growing = 500_000_000, False
    world.to_confirmed()
    world.run(5)
    assert world.open[0].message == NOT_GROWING_MESSAGE
    world.run(600)
    assert world.open[0].waits is WaitReason.SUBSIDED
    assert "has not grown for 30 s" in world.open[0].message
    assert world.verbs == [Verb.TRIM]
    world.growing = True
    world.to(Verb.RESTART_WORKER)


def test_memory_that_is_flat_at_its_limit_is_restarted() -> None:
    """Nothing can grow there any more."""
    world = World()
    world.growth, world.growing = 500_000_000, False
    world.limit = BASELINE + 510_000_000
    world.to(Verb.RESTART_WORKER)


@pytest.mark.parametrize(("trimmed", "reason"), [(True, Reason.TRIM), (False, Reason.CLEARED)])
def test_lost_capacity_that_is_back_after_a_trim_was_cured_by_it(
    trimmed: bool, reason: Reason
) -> None:
    world = World()
    world.kind = IncidentKind.CAPACITY_LOSS
    trim = world.to(Verb.TRIM)
    world.suspect = False
    answer = done(trim, Outcome.SUCCEEDED if trimmed else Outcome.FAILED)
    world.run(ROUND + 1, answer)
    (incident,) = world.ended
    assert (incident.phase, incident.reason) == (IncidentPhase.RESOLVED, reason)
    assert world.verbs == [Verb.TRIM]


def test_a_suspicion_that_goes_away_by_itself_is_cleared_untouched() -> None:
    world = World()
    world.run(2)
    world.suspect = False
    world.run(ROUND)
    assert world.ended[0].reason is Reason.CLEARED
    assert world.events[-1].type is EventType.CLEARED
    assert world.commands == []


def test_no_absence_of_suspicion_counts_while_the_engine_does_not_answer() -> None:
    world = World()
    world.run(2)
    world.suspect, world.answers = False, False
    world.run(10 * ROUND)
    assert [incident.phase for incident in world.open] == [IncidentPhase.OPEN]


def test_a_confirmed_leak_within_its_budget_disturbs_nobody() -> None:
    world = World()
    world.growth, world.over_budget = 100_000_000, False
    world.to_confirmed()
    world.run(50)
    assert world.open[0].phase is IncidentPhase.CONFIRMED
    assert world.verbs == [Verb.TRIM], "even diagnostics cost it time"


@pytest.mark.parametrize(
    ("room", "restarts"), [(None, False), (100_000_000, False), (20_000_000, True)]
)
def test_only_the_end_of_the_memory_is_a_reason_to_restart_before_the_budget_is_spent(
    room: int | None, restarts: bool
) -> None:
    """At 1 MB a second, 20 MB last for 20 s, and a drain may take 30 s."""
    world = World()
    world.growth, world.over_budget, world.rate = 100_000_000, False, 1e6
    world.exhaustion_s = 1.0  # of the budget, which is no limit
    world.limit = None if room is None else BASELINE + world.growth + room
    world.to_confirmed()
    world.run(2)
    world.run(50, *(done(command) for command in world.commands if command.verb is Verb.DIAGNOSE))
    assert (Verb.TAKE_SLOT in world.verbs) == restarts
    wanted = IncidentPhase.AWAITING_SLOT if restarts else IncidentPhase.CONFIRMED
    assert world.open[0].phase is wanted


@pytest.mark.parametrize(
    ("kind", "awaited"),
    [
        (IncidentKind.CAPACITY_LOSS, "the restart is deferred until 10% of the capacity is lost"),
        (IncidentKind.HOST_GROWTH, "the restart is deferred: the leak budget is not spent"),
    ],
)
def test_a_confirmed_incident_that_is_held_says_what_it_waits_for(
    kind: IncidentKind, awaited: str
) -> None:
    world = World()
    world.kind, world.growth, world.over_budget = kind, 100_000_000, False
    incident = world.to_confirmed()
    world.run(5)
    assert incident.phase is IncidentPhase.CONFIRMED
    assert incident.message.startswith(awaited)
    told = [e for e in world.events if e.incident is incident]
    world.run(20)
    assert [e for e in world.events if e.incident is incident] == told, "the event is emitted once"
    world.over_budget = True
    world.to(Verb.RESTART_WORKER)
    assert incident.message == ""


def test_an_incident_that_only_looks_on_delays_no_other() -> None:
    """What outlives its engine's end is watched, for as long as it takes."""
    world = World()
    held = Suspicion(IncidentKind.ORPHAN_DEVICE_MEMORY, Segment.ORPHAN, 0.7, 0.0, bytes=5 << 30)
    world.suspect, world.besides = False, [held]
    world.run(2)
    world.renew()
    world.run(ROUND)
    assert [(i.kind, i.phase) for i in world.open] == [
        (IncidentKind.ORPHAN_DEVICE_MEMORY, IncidentPhase.VERIFYING)
    ]
    world.suspect, world.growth = True, 500_000_000
    world.to(Verb.RESTART_WORKER)
    assert {i.phase for i in world.open} == {IncidentPhase.VERIFYING, IncidentPhase.RESTARTING}


def test_a_stall_does_not_wait_for_a_trim_that_hangs_with_the_engine() -> None:
    world = World()
    trim = world.to(Verb.TRIM)
    world.besides = [
        Suspicion(IncidentKind.STALL, None, 1.0, 1.0, over_budget=True, process="worker")
    ]
    diagnose = world.until_command(limit=ROUND + 1)
    assert (diagnose.verb, diagnose.stalled) == (Verb.DIAGNOSE, True)
    (growth, stall) = world.open
    steps = {step.operation_id: step for step in growth.timeline}
    assert steps[trim.operation_id].outcome is StepOutcome.UNKNOWN
    assert "the engine stalled" in steps[trim.operation_id].message
    slot = world.answer(diagnose)
    assert slot.verb is Verb.TAKE_SLOT
    world.tick(done(trim, Outcome.FAILED))  # it comes back in the end, and changes nothing
    assert world.governor.state.pending == slot
    assert world.answer(slot).verb is Verb.RESTART_WORKER
    assert stall.phase is IncidentPhase.RESTARTING


def test_no_trim_is_sent_to_an_engine_that_makes_no_step() -> None:
    world = World()
    world.is_in_long_step = True
    world.run(10 * ROUND)
    assert world.verbs == []
    world.is_in_long_step = False
    assert world.until_command().verb is Verb.TRIM


@pytest.mark.parametrize(
    ("growth", "left", "reason"),
    [
        (256 << 20, 35_000_000, Reason.ENGINE_RESTART),
        (30_000_000, 25_000_000, Reason.ENGINE_RESTART),
        (500_000_000, 200_000_000, Reason.PARTLY_RETURNED),
    ],
)
def test_two_starts_of_one_engine_differ_a_little(growth: int, left: int, reason: Reason) -> None:
    """What its successor needs more than itself is no memory that stayed, up to 4 % of it all."""
    world = World()
    world.growth, world.process = growth, "frontend"
    restart = world.to(Verb.RESTART_ENGINE)
    world.growth = 0  # the engine's processes have gone
    world.tick(done(restart))
    incident = world.open[0]
    step = next(s for s in incident.timeline if s.operation_id == restart.operation_id)
    assert step.after_bytes is None, "memory of a process that ended is not what came back"
    world.renew(left)
    world.run(int(MEMORY_SETTLE_S) + 5)
    assert world.ended[0].reason is reason
    assert step.after_bytes == BASELINE + left
    assert world.ended[0].returned_bytes == growth - left


def test_memory_of_the_frontend_needs_an_engine_restart_with_a_drain() -> None:
    world = World()
    world.growth, world.process = 500_000_000, "frontend"
    drain = world.to(Verb.DRAIN)
    assert world.open[0].phase is IncidentPhase.DRAINING
    restart = world.answer(drain)
    assert restart.verb is Verb.RESTART_ENGINE
    assert Verb.RESTART_WORKER not in world.verbs
    assert len(world.governor.state.restarts) == 1
    world.renew()
    world.run(3, done(restart))
    assert world.ended[0].reason is Reason.ENGINE_RESTART


def test_a_restart_that_returns_too_little_leads_to_the_next_rung() -> None:
    world = World()
    world.growth = 500_000_000
    restart = world.to(Verb.RESTART_WORKER)
    world.renew(growth=400_000_000)
    drain = world.answer(restart, limit=int(MEMORY_SETTLE_S) + 10)
    assert drain.verb is Verb.DRAIN
    assert drain.epoch == "boot:2"
    engine = world.answer(drain)
    assert engine.verb is Verb.RESTART_ENGINE
    world.number, world.growth = 3, 0
    world.run(3, done(engine))
    assert world.ended[0].reason is Reason.ENGINE_RESTART
    assert world.ended[0].returned_bytes == 500_000_000


def test_a_ladder_without_a_rung_left_backs_off() -> None:
    policy = Supervision(mode=Mode.RECOVER, ladder=(Action.TRIM, Action.WORKER_RESTART))
    world = World(policy)
    world.growth = 500_000_000
    restart = world.to(Verb.RESTART_WORKER)
    world.tick(done(restart, Outcome.FAILED, "the worker did not come up"))
    world.tick()
    assert world.ended[0].reason is Reason.LADDER_EXHAUSTED
    world.run(int(FIRST_BACK_OFF_S) - 10)
    assert world.open == []
    world.run(20)
    assert len(world.open) == 1


def test_a_stall_saves_stacks_then_restarts_without_trim_or_drain() -> None:
    world = World()
    world.kind = IncidentKind.STALL
    restart = world.to(Verb.RESTART_WORKER)
    assert world.verbs == [Verb.DIAGNOSE, Verb.TAKE_SLOT, Verb.RESTART_WORKER]
    assert restart.stalled
    world.renew()
    world.run(ROUND + 3, done(restart))
    assert world.ended[0].reason is Reason.WORKER_RESTART


def test_a_frontend_that_does_not_answer_is_restarted_as_an_engine() -> None:
    world = World()
    world.tick()
    world.kind, world.answers, world.suspect = IncidentKind.STALL, False, True
    world.governor.state.incidents.clear()
    restart = world.to(Verb.RESTART_ENGINE)
    assert world.verbs == [Verb.DIAGNOSE, Verb.TAKE_SLOT, Verb.RESTART_ENGINE]
    assert restart.epoch == "boot:1"


def test_observe_records_what_it_would_have_done_and_does_nothing() -> None:
    world = World(Supervision(mode=Mode.OBSERVE))
    world.growth = 500_000_000
    world.run(200)
    (incident,) = world.ended
    assert (incident.phase, incident.reason) == (IncidentPhase.SUPPRESSED, Reason.OBSERVED)
    assert [(s.step, s.outcome) for s in incident.timeline] == [
        ("Trim", StepOutcome.WOULD),
        ("WorkerRestart", StepOutcome.WOULD),
    ]
    assert world.commands == []


def test_the_restart_budget_stops_the_ladder_until_a_reset() -> None:
    policy = Supervision(mode=Mode.RECOVER, restart_budget=RestartBudget(count=1, window_s=60))
    world = World(policy)
    world.growth = 500_000_000
    restart = world.to(Verb.RESTART_WORKER)
    world.renew()
    world.run(20, done(restart))
    world.growth, world.suspect = 500_000_000, True
    sent = len(world.commands)
    while len(world.ended) < 2:
        command = world.tick(*([done(world.commands[-1])] if len(world.commands) > sent else []))
    assert world.ended[1].reason is Reason.RESTART_BUDGET_EXHAUSTED
    assert "reset" in world.ended[1].message
    world.run(10)
    before = len(world.commands)
    world.run(500)  # far longer than the window: the stop is for good
    assert len(world.commands) == before
    assert world.open == []
    assert world.governor.count_restarts_left(world.now) == 0
    world.governor.reset_restart_budget()
    command = world.to(Verb.RESTART_WORKER)
    assert command.epoch == "boot:2"


def test_a_refused_restart_is_not_counted_and_is_decided_anew() -> None:
    world = World()
    world.growth = 500_000_000
    restart = world.to(Verb.RESTART_WORKER)
    assert len(world.governor.state.restarts) == 1
    world.tick(done(restart, Outcome.REFUSED, "another operation is under way"))
    assert world.open[0].refusals == 1
    assert world.governor.state.restarts == []
    wishes = []
    while (take := world.tick()) is None:
        wishes.append(world.governor.state.slot_request)
    assert wishes == [SlotRequest(None)] * 4, "others may restart meanwhile"
    assert take.verb is Verb.TAKE_SLOT
    assert world.governor.state.slot_request == SlotRequest(None, taking=True)
    again = world.answer(take)
    assert again.verb is Verb.RESTART_WORKER
    assert again.operation_id != restart.operation_id
    assert len(world.governor.state.restarts) == 1


def test_refusals_without_end_end_the_incident() -> None:
    world = World()
    world.growth = 500_000_000
    command = world.until_command()
    while not world.ended:
        refused = command.verb is Verb.RESTART_WORKER
        outcome = Outcome.REFUSED if refused else Outcome.SUCCEEDED
        world.tick(done(command, outcome))
        if not world.ended:
            pending = world.governor.state.pending
            command = pending if pending else world.until_command()
    assert world.ended[0].reason is Reason.REFUSED
    assert world.governor.state.restarts == []
    world.run(3)
    assert world.governor.state.slot_holder is None, "or no other replica could ever restart"


def test_a_starting_engine_is_not_restarted_for_its_memory() -> None:
    world = World()
    world.growth = 500_000_000
    diagnose = world.to(Verb.DIAGNOSE)
    world.engine_state = EngineState.WARMING
    world.run(60, done(diagnose))
    assert world.open[0].phase is IncidentPhase.AWAITING_SLOT
    assert Verb.TAKE_SLOT not in [command.verb for command in world.commands]
    world.engine_state = EngineState.SERVING
    assert world.until_command().verb is Verb.TAKE_SLOT


def test_a_crash_of_the_engine_renews_the_incident_and_counts_as_no_restart() -> None:
    world = World()
    world.growth = 500_000_000
    world.to(Verb.TAKE_SLOT)
    world.renew()
    world.run(20, done(world.commands[-1]))
    assert world.governor.state.slot_holder is None
    crash, leak = world.ended
    assert (crash.kind, crash.reason) == (IncidentKind.ENGINE_CRASH, Reason.WORKER_RESTARTED)
    assert (leak.kind, leak.reason) == (IncidentKind.HOST_GROWTH, Reason.NEW_EPOCH)
    assert world.governor.state.restarts == []


def test_a_restart_whose_answer_was_lost_is_recognised_by_the_epoch() -> None:
    world = World()
    world.growth = 500_000_000
    restart = world.to(Verb.RESTART_WORKER)
    world.renew()
    world.tick()  # the new epoch is seen before the answer
    world.run(3, done(restart, Outcome.REFUSED, "decided on another epoch"))
    assert world.ended[0].reason is Reason.WORKER_RESTART
    assert len(world.governor.state.restarts) == 1


def test_an_unknown_effect_ends_the_incident_as_in_a_replay() -> None:
    world = World()
    world.growth = 500_000_000
    restart = world.to(Verb.RESTART_WORKER)
    world.run(3, done(restart, Outcome.UNKNOWN))
    assert world.ended[0].reason is Reason.EFFECT_UNKNOWN
    world.run(100)
    assert world.open == []


def test_a_hold_follows_incidents_and_sends_nothing() -> None:
    world = World()
    world.growth, world.hold = 500_000_000, "the journal is not writable"
    world.run(200)
    assert world.commands == []
    assert world.open[0].phase is IncidentPhase.CONFIRMED
    world.hold = None
    assert world.to(Verb.RESTART_WORKER)


def test_kinds_that_no_action_cures_are_reported_only() -> None:
    world = World()
    world.kind = IncidentKind.ORPHAN_DEVICE_MEMORY
    diagnose = world.until_command()
    assert diagnose.verb is Verb.DIAGNOSE
    world.run(100, done(diagnose))
    assert len(world.ended) == 1
    assert world.ended[0].reason is Reason.LADDER_EXHAUSTED
    assert world.verbs == [Verb.DIAGNOSE]


def test_the_state_survives_the_journal_at_every_step() -> None:
    """Encoded and decoded after every assessment, the story is the same."""
    world = World()
    world.growth = 500_000_000
    results: list[Result] = []
    while not world.ended:
        data = msgspec.json.encode(world.governor.state)
        world.governor.state = msgspec.json.decode(data, type=GovernorState)
        command = world.tick(*results)
        results = [done(command)] if command else []
        if command and command.verb is Verb.RESTART_WORKER:
            world.renew()
    assert world.ended[0].reason is Reason.WORKER_RESTART
    assert world.verbs.count(Verb.RESTART_WORKER) == 1


def test_a_clock_that_was_set_back_while_the_supervisor_was_away_makes_no_wait_endless() -> None:
    policy = Supervision(mode=Mode.RECOVER, ladder=(Action.TRIM, Action.WORKER_RESTART))
    world = World(policy)
    world.growth = 500_000_000
    world.run(2, done(world.to(Verb.RESTART_WORKER), Outcome.FAILED, "it hangs"))
    assert world.ended[0].reason is Reason.LADDER_EXHAUSTED
    world.now -= 86_400.0
    world.run(int(MAX_BACK_OFF_S) + 2)
    assert len(world.open) == 1, "the back-off is an hour at most"
    world.now -= 86_400.0
    command = world.commands[-1]
    while command.verb is not Verb.TAKE_SLOT:  # an open incident goes on as well
        command = world.answer(command)


def test_a_confirmed_leak_whose_odds_fall_subsides_and_comes_back() -> None:
    """Growth in a stair that ends at half of the budget, and later goes on."""
    world = World()
    world.over_budget = False
    incident = world.to_confirmed()
    world.run(2)
    assert incident.message == WITHIN_BUDGET_MESSAGE
    world.confidence = 0.27
    world.run(int(SUBSIDED_AFTER_S) + 1)
    assert (incident.phase, incident.waits) == (IncidentPhase.CONFIRMED, WaitReason.SUBSIDED)
    assert "27%" in incident.message
    told = len(world.events)
    world.confidence, world.over_budget = 0.2, True
    world.run(20)
    assert len(world.events) == told, "its chance changes with every sample"
    assert world.verbs == [Verb.TRIM], "spent, but not by a leak"
    world.confidence = 0.9
    assert world.answer(world.until_command()).verb is Verb.TAKE_SLOT
    assert incident.waits is None


def test_a_leak_that_has_subsided_is_restarted_at_the_memory_limit() -> None:
    world = World(memory=MemoryPolicy(host=MemoryBudget(100_000_000, 3600.0, 1_200_000_000)))
    world.over_budget = False
    world.to_confirmed()
    world.confidence = 0.2
    world.run(int(SUBSIDED_AFTER_S) + 1)
    world.over_budget = True
    world.run(20)
    assert world.verbs == [Verb.TRIM]
    world.growth = 190_000_000
    assert world.answer(world.until_command()).verb is Verb.TAKE_SLOT
