"""The governor against a small model of an engine: every step of an incident's life."""

import msgspec
import pytest
from governed import World, done

from plimsoll_api.admin import EngineState
from plimsoll_api.supervision import Action, Mode, RestartBudget, Supervision
from plimsoll_sidecar.detect.assessment import Kind
from plimsoll_sidecar.govern.command import Happening, Outcome, Result, Verb
from plimsoll_sidecar.govern.incident import Phase, Reason, StepOutcome
from plimsoll_sidecar.govern.state import BACK_OFF_MAX_S, BACK_OFF_S, ROUND, SETTLE_S, GovernorState


def test_a_leak_is_trimmed_confirmed_and_cured_by_a_worker_restart() -> None:
    world = World()
    world.growth = 500_000_000
    restart = world.to(Verb.RESTART_WORKER)
    assert world.verbs == [Verb.TRIM, Verb.DIAGNOSE, Verb.TAKE_SLOT, Verb.RESTART_WORKER]
    assert restart.epoch == "boot:1"
    assert world.open[0].phase is Phase.RESTARTING
    world.renew(growth=10_000_000)
    release = world.answer(restart)
    assert release.verb is Verb.RELEASE_SLOT
    world.tick(done(release))
    (incident,) = world.ended
    assert (incident.phase, incident.reason) == (Phase.RESOLVED, Reason.WORKER_RESTART)
    assert incident.returned_bytes == 490_000_000
    assert world.governor.state.slot_holder is None
    assert world.governor.state.pending is None
    assert [e.action for e in world.events if e.happening is Happening.REMEDIATION] == [
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
    assert world.open[0].phase is Phase.RESTARTING
    assert world.open[0].attribution.process == "worker"


def test_a_trim_that_returns_the_growth_resolves_the_incident() -> None:
    world = World()
    world.growth = 400_000_000
    trim = world.to(Verb.TRIM)
    world.growth, world.suspect = 20_000_000, False
    world.run(ROUND + 1, done(trim))
    (incident,) = world.ended
    assert (incident.phase, incident.reason) == (Phase.RESOLVED, Reason.TRIM)
    assert incident.returned_bytes == 380_000_000
    assert world.verbs == [Verb.TRIM]


@pytest.mark.parametrize(("trimmed", "reason"), [(True, Reason.TRIM), (False, Reason.CLEARED)])
def test_lost_capacity_that_is_back_after_a_trim_was_cured_by_it(
    trimmed: bool, reason: Reason
) -> None:
    world = World()
    world.kind = Kind.CAPACITY_LOSS
    trim = world.to(Verb.TRIM)
    world.suspect = False
    answer = done(trim, Outcome.SUCCEEDED if trimmed else Outcome.FAILED)
    world.run(ROUND + 1, answer)
    (incident,) = world.ended
    assert (incident.phase, incident.reason) == (Phase.RESOLVED, reason)
    assert world.verbs == [Verb.TRIM]


def test_a_suspicion_that_goes_away_by_itself_is_cleared_untouched() -> None:
    world = World()
    world.run(2)
    world.suspect = False
    world.run(ROUND)
    assert world.ended[0].reason is Reason.CLEARED
    assert world.events[-1].happening is Happening.CLEARED
    assert world.commands == []


def test_no_absence_of_suspicion_counts_while_the_engine_does_not_answer() -> None:
    world = World()
    world.run(2)
    world.suspect, world.answers = False, False
    world.run(10 * ROUND)
    assert [incident.phase for incident in world.open] == [Phase.OPEN]


def test_a_confirmed_leak_within_its_budget_disturbs_nobody() -> None:
    world = World()
    world.growth, world.over_budget = 100_000_000, False
    diagnose = world.to(Verb.DIAGNOSE)
    world.run(50, done(diagnose))
    assert world.open[0].phase is Phase.CONFIRMED
    assert world.verbs == [Verb.TRIM, Verb.DIAGNOSE]


def test_memory_of_the_frontend_needs_an_engine_restart_with_a_drain() -> None:
    world = World()
    world.growth, world.process = 500_000_000, "frontend"
    drain = world.to(Verb.DRAIN)
    assert world.open[0].phase is Phase.DRAINING
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
    drain = world.answer(restart, limit=int(SETTLE_S) + 10)
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
    world.run(int(BACK_OFF_S) - 10)
    assert world.open == []
    world.run(20)
    assert len(world.open) == 1


def test_a_stall_saves_stacks_then_restarts_without_trim_or_drain() -> None:
    world = World()
    world.kind = Kind.STALL
    restart = world.to(Verb.RESTART_WORKER)
    assert world.verbs == [Verb.DIAGNOSE, Verb.TAKE_SLOT, Verb.RESTART_WORKER]
    assert restart.stalled
    world.renew()
    world.run(ROUND + 3, done(restart))
    assert world.ended[0].reason is Reason.WORKER_RESTART


def test_a_frontend_that_does_not_answer_is_restarted_as_an_engine() -> None:
    world = World()
    world.tick()
    world.kind, world.answers, world.suspect = Kind.STALL, False, True
    world.governor.state.incidents.clear()
    restart = world.to(Verb.RESTART_ENGINE)
    assert world.verbs == [Verb.DIAGNOSE, Verb.TAKE_SLOT, Verb.RESTART_ENGINE]
    assert restart.epoch == "boot:1"


def test_observe_records_what_it_would_have_done_and_does_nothing() -> None:
    world = World(Supervision(mode=Mode.OBSERVE))
    world.growth = 500_000_000
    world.run(200)
    (incident,) = world.ended
    assert (incident.phase, incident.reason) == (Phase.SUPPRESSED, Reason.OBSERVED)
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
    world.answer(restart)
    world.tick(done(world.commands[-1]))
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
    assert world.governor.restarts_left(world.now) == 0
    world.governor.reset()
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
    release = world.governor.state.pending
    assert release is not None
    assert release.verb is Verb.RELEASE_SLOT, "others may restart meanwhile"
    take = world.answer(release)
    assert take.verb is Verb.TAKE_SLOT
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
    assert world.commands[-1].verb is Verb.RELEASE_SLOT, "or no other replica could ever restart"


def test_a_starting_engine_is_not_restarted_for_its_memory() -> None:
    world = World()
    world.growth = 500_000_000
    diagnose = world.to(Verb.DIAGNOSE)
    world.engine_state = EngineState.WARMING
    world.run(60, done(diagnose))
    assert world.open[0].phase is Phase.AWAITING_SLOT
    assert Verb.TAKE_SLOT not in [command.verb for command in world.commands]
    world.engine_state = EngineState.SERVING
    assert world.until_command().verb is Verb.TAKE_SLOT


def test_a_crash_of_the_engine_renews_the_incident_and_counts_as_a_restart() -> None:
    world = World()
    world.growth = 500_000_000
    world.to(Verb.TAKE_SLOT)
    world.renew()
    release = world.answer(world.commands[-1])
    assert release.verb is Verb.RELEASE_SLOT
    assert world.ended[0].reason is Reason.NEW_EPOCH
    assert [r.epoch for r in world.governor.state.restarts] == ["boot:1"]


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
    world.answer(restart, Outcome.UNKNOWN)
    assert world.ended[0].reason is Reason.EFFECT_UNKNOWN
    world.run(100, done(world.commands[-1]))
    assert world.open == []


def test_a_hold_follows_incidents_and_sends_nothing() -> None:
    world = World()
    world.growth, world.hold = 500_000_000, "the journal cannot be written"
    world.run(200)
    assert world.commands == []
    assert world.open[0].phase is Phase.CONFIRMED
    world.hold = None
    assert world.to(Verb.RESTART_WORKER)


def test_kinds_that_no_action_cures_are_reported_only() -> None:
    world = World()
    world.kind = Kind.ORPHAN_DEVICE_MEMORY
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
    world.run(int(BACK_OFF_MAX_S) + 2)
    assert len(world.open) == 1, "the back-off is an hour at most"
    world.now -= 86_400.0
    command = world.commands[-1]
    while command.verb is not Verb.TAKE_SLOT:  # an open incident goes on as well
        command = world.answer(command)
