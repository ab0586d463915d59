"""What budgets learn from a service's own days, and when a leak is acted on by them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plimsoll_api.assessment import Assessment, BudgetState
from plimsoll_api.incident_record import Reason, StepOutcome
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.learned import (
    MAX_DAILY_FALL_FACTOR,
    MAX_DAILY_RISE_FACTOR,
    MAX_OBSERVED_H,
    LearnedMemory,
    LearnedWorkload,
)
from plimsoll_api.memory_policy import (
    AutoBudgets,
    MemoryBudget,
    MemoryPolicy,
    compute_provisional_budget,
    parse_growth_budget,
)
from plimsoll_sidecar.govern.auto_budget import (
    MAX_SHARE_OF_HEADROOM,
    MIN_SHARE_OF_LIMIT,
    SECONDS_PER_HOUR,
    HourGrowth,
    LearnedBudgets,
    LearnedHistory,
    compute_quantile,
    list_growth_within,
    propose_budget,
    select_healthy_hours,
)
from plimsoll_sidecar.govern.command import Verb
from tests.unit.govern.governed import World

MIB, GIB = 1 << 20, 1 << 30
LIMIT, BASE = 16 * GIB, 4 * GIB
HOST = msgspec.structs.replace(parse_growth_budget("Auto"), limit_bytes=LIMIT)
MEMORY = MemoryPolicy(host=HOST)
STEP_S = 60.0


def state(grown: int) -> BudgetState:
    return BudgetState(current=BASE + grown, baseline=BASE, unexplained=grown, limit=LIMIT)


def live(learned: LearnedHistory, start: float, grown: list[int], incident: bool = False) -> float:
    """Let the learner see one growth a minute; return the time after the last one."""
    for minute, size in enumerate(grown):
        learned.observe(start + minute * STEP_S, "epoch", "r1", state(size), incident)
    return start + len(grown) * STEP_S


def day(most: int) -> list[int]:
    """Growth that rises to ``most`` and falls back each hour, for a day."""
    return [most * (minute % 60) // 59 for minute in range(24 * 60)]


def test_a_day_of_growth_sets_the_budget() -> None:
    learned, now = LearnedHistory(), 40 * 365 * 24 * SECONDS_PER_HOUR
    assert not learned.update_budget(now, HOST, MEMORY.auto)
    now = live(learned, now, day(400 * MIB))
    assert not learned.is_learned(MEMORY.auto), "a minute of the day is missing"
    now = live(learned, now, [0, 0])
    assert learned.update_budget(now, HOST, MEMORY.auto)
    assert learned.budget == 600 * MIB
    assert learned.starts == [BASE]


@pytest.mark.parametrize("step_s", [1.0, 60.06, 120.0])
def test_a_budget_is_learned_at_any_sampling_interval(step_s: float) -> None:
    learned, now = LearnedHistory(), 40 * 365 * 24 * SECONDS_PER_HOUR
    for sample in range(int(24 * SECONDS_PER_HOUR / step_s) + 2):
        learned.observe(now + sample * step_s, "epoch", "r1", state(0), has_incident=False)
    assert learned.is_learned(MEMORY.auto)


def test_a_long_name_of_the_model_is_one_revision() -> None:
    learned = LearnedHistory()
    for minute in range(60):
        learned.observe(1e9 + 60 * minute, "e" * 300, f"{'m' * 300} 1.0", state(MIB), False)
    assert sum(hour.seen_s for hour in learned.hours) == 59 * 60
    assert len(learned.starts) <= 1


def test_a_quiet_day_leaves_the_floor() -> None:
    learned = LearnedHistory()
    now = live(learned, 0.0, [*day(MIB), 0, 0])
    learned.update_budget(now, HOST, MEMORY.auto)
    assert learned.budget == int(MIN_SHARE_OF_LIMIT * LIMIT)


def test_a_day_with_an_incident_teaches_nothing() -> None:
    learned = LearnedHistory()
    now = live(learned, 0.0, day(100 * MIB))
    now = live(learned, now, [8 * GIB] * 60, incident=True)
    now = live(learned, now, [8 * GIB] * 23 * 60)
    assert select_healthy_hours(learned.hours) == learned.hours[:1]
    now = live(learned, now, day(100 * MIB)[:120])
    assert {one.at for one in select_healthy_hours(learned.hours)} >= {0, 48, 49}
    assert (
        max(list_growth_within(select_healthy_hours(learned.hours), 24 * SECONDS_PER_HOUR))
        < 8 * GIB + 1
    )
    assert propose_budget(learned, HOST) is not None


def test_learning_ends_by_time_though_every_hour_had_an_incident() -> None:
    learned = LearnedHistory()
    now = live(learned, 0.0, [*day(GIB), 0, 0], incident=True)
    assert learned.is_learned(MEMORY.auto)
    learned.update_budget(now, HOST, MEMORY.auto)
    assert learned.budget == compute_provisional_budget(LIMIT) == 2 * GIB


def test_the_next_revision_begins_with_the_budget_of_the_one_before() -> None:
    learned = LearnedHistory()
    now = live(learned, 0.0, [*day(400 * MIB), 0, 0])
    learned.update_budget(now, HOST, MEMORY.auto)
    learned.observe(now, "another", "r2", state(0), False)
    assert learned.is_learned(MEMORY.auto)
    assert learned.budget == 600 * MIB
    assert [one.at for one in learned.hours] == [24], "its hours are its own"


def inherited(known: LearnedMemory, limit: int | None = LIMIT) -> LearnedHistory:
    """What a new replica makes of what the others have learned, after one sample."""
    found = LearnedBudgets()
    found.inherit(LearnedWorkload("", "64d8", 0, host=known))
    seen = msgspec.structs.replace(state(0), limit=limit)
    found.host.observe(0.0, "epoch", "r1", seen, False)
    return found.host


def test_a_new_pod_acts_by_the_budget_that_the_others_have_learned() -> None:
    found = inherited(LearnedMemory(86400, (1, 2, 400 * MIB), BASE, 600 * MIB))
    assert found.is_learned(MEMORY.auto)
    found.update_budget(0.0, HOST, MEMORY.auto)
    assert found.budget == 600 * MIB
    now = live(found, STEP_S, day(100 * MIB)[:120])
    found.update_budget(now, HOST, MEMORY.auto)
    assert found.budget == 600 * MIB, "two hours change nothing"
    found.inherit(LearnedMemory(86400, (0, 0, 0), BASE, 10 * GIB))
    assert found.budget == 600 * MIB, "it has one of its own"


def test_an_inherited_budget_is_at_most_half_of_the_room() -> None:
    found = inherited(LearnedMemory(86400, (0, 0, 0), BASE, 1 << 49))
    found.update_budget(0.0, HOST, MEMORY.auto)
    assert found.budget == MAX_SHARE_OF_HEADROOM * (LIMIT - BASE)


def test_pods_that_live_for_hours_learn_a_day_together() -> None:
    first = LearnedHistory()
    live(first, 0.0, day(400 * MIB)[: 20 * 60])
    lesson = first.make_report(MEMORY.auto)
    assert lesson == LearnedMemory(20 * 3600 - 60, (400 * MIB,) * 3, BASE)
    second = inherited(lesson)
    assert not second.is_learned(MEMORY.auto)
    now = live(second, STEP_S, day(100 * MIB)[: 4 * 60 + 2])
    second.update_budget(now, HOST, MEMORY.auto)
    assert second.budget == 600 * MIB
    again = second.make_report(MEMORY.auto)
    assert again is not None
    assert again.budget == 600 * MIB


def test_a_pod_that_has_begun_to_learn_takes_only_the_budget() -> None:
    found = LearnedHistory()
    now = live(found, 0.0, day(100 * MIB)[:120])
    found.inherit(LearnedMemory(36000, (GIB, GIB, GIB), BASE))
    assert found.inherited is None, "that growth may be its own"
    found.inherit(LearnedMemory(86400, (GIB, GIB, GIB), BASE, 600 * MIB))
    found.update_budget(now, HOST, MEMORY.auto)
    assert found.budget == 600 * MIB
    lesson = found.make_report(MEMORY.auto)
    assert lesson is not None
    assert (lesson.gains[2], lesson.budget) == (100 * MIB, None)


def test_a_budget_rises_and_falls_slowly_and_the_owner_raises_it_at_once() -> None:
    learned = LearnedHistory()
    now = live(learned, 0.0, [*day(800 * MIB), 0, 0])
    learned.update_budget(now, HOST, MEMORY.auto)
    before = learned.budget
    assert before == 1200 * MIB
    learned.hours = []
    now = live(learned, now, [*day(MIB), 0, 0])
    learned.update_budget(now, HOST, MEMORY.auto)
    assert learned.budget == pytest.approx(before * MAX_DAILY_FALL_FACTOR, rel=0.01)
    raised = msgspec.structs.replace(HOST, minimum_bytes=3 * GIB)
    found = LearnedBudgets(host=learned).resolve_budgets(MemoryPolicy(host=raised)).memory.host
    assert found is not None
    assert found.growth_bytes == 3 * GIB


def test_what_was_learned_is_the_same_after_a_restart_of_the_supervisor() -> None:
    one, other = LearnedBudgets(), LearnedBudgets()
    for minute, size in enumerate(day(300 * MIB)[:300]):
        seen = Assessment(t=0.0, epoch=1, warm=True, host=state(size))
        for learner in (one, other):
            learner.observe(minute * STEP_S, "epoch", "r1", seen, frozenset())
        other = msgspec.json.decode(msgspec.json.encode(other), type=LearnedBudgets)
    assert msgspec.json.encode(one) == msgspec.json.encode(other)


def test_an_engine_that_has_not_said_its_version_is_no_other_revision() -> None:
    """A new supervisor asks while the engine starts, or while it is too busy to answer."""
    learned = LearnedHistory()
    now = live(learned, 0.0, [*day(400 * MIB), 0, 0])
    for revision in ("m 1.0", "m ", "m 1.0"):
        learned.revision = learned.revision.replace("r1", "m ")
        learned.observe(now, "epoch", revision, state(0), False)
        assert learned.revision == "m 1.0"
        assert len(learned.hours) == 25
    learned.observe(now, "epoch", "m 1.1", state(0), False)
    assert len(learned.hours) == 1


@pytest.mark.parametrize("step_s", [-30 * 86400.0, -5000.0, 5000.0, 30 * 86400.0])
def test_a_clock_that_is_set_costs_no_learned_hour(step_s: float) -> None:
    learned, now = LearnedBudgets(), 40 * 365 * 86400.0
    now = live(learned.host, now, [*day(400 * MIB), 0, 0])
    learned.host.update_budget(now, HOST, MEMORY.auto)
    learned.shift_times(step_s)
    now = live(learned.host, now + step_s, day(800 * MIB))
    assert len(learned.host.hours) in (48, 49)
    assert len(learned.host.starts) == 1
    assert learned.host.update_budget(now, HOST, MEMORY.auto)
    assert learned.host.budget == pytest.approx(600 * MIB * MAX_DAILY_RISE_FACTOR, rel=0.02)


def test_a_clock_that_is_set_back_while_no_supervisor_runs_ends_no_learning() -> None:
    learned, year = LearnedHistory(), 365 * 86400.0
    now = live(learned, 41 * year, [*day(400 * MIB), 0, 0])
    learned.update_budget(now, HOST, MEMORY.auto)
    now = live(learned, 40 * year, [*day(800 * MIB), 0, 0])
    assert learned.update_budget(40 * year, HOST, MEMORY.auto)
    assert learned.budget == 600 * MIB, "not by more than within a day"
    now = live(learned, now, [*day(800 * MIB), 0, 0])
    assert learned.update_budget(now, HOST, MEMORY.auto)
    assert learned.budget > 700 * MIB


@given(st.lists(st.integers(0, 1 << 50), min_size=1), st.floats(0.01, 1.0))
def test_a_level_is_a_gain_that_was_seen(gains: list[int], share: float) -> None:
    found = compute_quantile(gains, share)
    assert found in gains
    assert sum(gain <= found for gain in gains) >= share * len(gains) - 1e-6


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), unique_by=lambda one: one[0]))
def test_no_hour_within_a_day_of_an_incident_is_healthy(seen: list[tuple[int, bool]]) -> None:
    hours = [HourGrowth(at, 3600.0, (1, 1, 1), incident) for at, incident in sorted(seen)]
    for one in select_healthy_hours(hours):
        assert not any(other.incident and abs(other.at - one.at) < 24 for other in hours)


@given(st.lists(st.integers(0, 20 * GIB), min_size=2, max_size=80), st.integers(GIB, 100 * GIB))
def test_a_proposal_stays_between_the_floor_and_half_of_the_room(
    grown: list[int], limit: int
) -> None:
    learned = LearnedHistory()
    live(learned, 0.0, grown)
    found = propose_budget(learned, msgspec.structs.replace(HOST, limit_bytes=limit))
    assert found is not None
    room = int(MAX_SHARE_OF_HEADROOM * max(0, limit - BASE))
    assert 1 <= found <= max(1, room)
    assert found >= min(int(MIN_SHARE_OF_LIMIT * limit), max(1, room))


class Learning(RuleBasedStateMachine):
    """A replica whose memory, clock, epochs and revisions do as they like."""

    @initialize()
    def begin(self) -> None:
        self.learned, self.now, self.epoch, self.revision = LearnedHistory(), 1e9, 0, 0
        self.budget: int | None = None
        self.days = 0.0

    @rule(
        grown=st.integers(0, 32 * GIB),
        minutes=st.integers(1, 90),
        incident=st.booleans(),
    )
    def serve(self, grown: int, minutes: int, incident: bool) -> None:
        for _ in range(minutes):
            self.now += STEP_S
            self.learned.observe(
                self.now, str(self.epoch), str(self.revision), state(grown), incident
            )

    @rule(incident=st.booleans())
    def warm_up(self, incident: bool) -> None:
        self.now += STEP_S
        self.learned.observe(self.now, str(self.epoch), str(self.revision), None, incident)

    @rule(seconds=st.floats(-1e6, 1e6))
    def step_of_the_clock(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def restart(self) -> None:
        self.epoch += 1

    @rule()
    def next_revision(self) -> None:
        self.epoch, self.revision = self.epoch + 1, self.revision + 1

    @rule()
    def revise(self) -> None:
        before, at = self.learned.budget, self.learned.budget_at
        self.learned.update_budget(self.now, HOST, AutoBudgets(learning_s=3600.0))
        after = self.learned.budget
        if before is None or after is None:
            return
        days = max(0.0, (int(self.now // SECONDS_PER_HOUR) - at) / 24)
        assert after <= before * MAX_DAILY_RISE_FACTOR**days + 1
        assert after >= before * MAX_DAILY_FALL_FACTOR**days - 1

    @invariant()
    def is_bounded(self) -> None:
        learned = self.learned
        assert len(learned.hours) <= MAX_OBSERVED_H
        assert len(learned.lows) <= 25
        assert len(learned.starts) <= 8
        assert all(gain >= 0 for one in learned.hours for gain in one.gains)
        assert all(one.gains[0] <= one.gains[1] <= one.gains[2] for one in learned.hours)
        assert all(0 <= one.seen_s <= SECONDS_PER_HOUR for one in learned.hours)
        hours = [one.at for one in learned.hours]
        assert hours == sorted(set(hours))
        assert learned.budget is None or 1 <= learned.budget <= LIMIT


TestLearning = Learning.TestCase
TestLearning.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


# ---- what the governor makes of it


def leaking(rate: float | None, learning: bool = False) -> World:
    """Return a leak that has spent a budget that sets itself, at ``rate`` bytes a second."""
    world = World(memory=MemoryPolicy(host=HOST, warmup_s=2.0))
    if learning:
        world.governor.learning = frozenset({IncidentKind.HOST_GROWTH})
    world.growth, world.rate = 3 * GIB, rate
    world.limit = LIMIT
    return world


def test_a_leak_is_only_reported_while_its_budget_is_learned() -> None:
    world = leaking(rate=100 * MIB, learning=True)
    world.run(40)
    assert world.commands == [], "not even a trim"
    record = world.events[-1].incident
    assert (record.phase, record.reason) == (IncidentPhase.SUPPRESSED, Reason.OBSERVED)
    steps = {(step.step, step.outcome, step.message) for step in record.timeline}
    assert all(outcome is StepOutcome.WOULD for _, outcome, _ in steps)
    assert {message for _, _, message in steps} == {
        "growthBudget is Auto, and the usual growth of this service is not learned yet"
    }
    world.governor.apply_budgets(
        LearnedBudgets().resolve_budgets(MemoryPolicy(host=MemoryBudget(GIB)))
    )
    assert world.to(Verb.TRIM), "once it is learned, a leak that goes on opens again"


def test_a_leak_that_reaches_the_limit_soon_is_restarted() -> None:
    room = LIMIT - 3 * GIB - 1_000_000_000
    world = leaking(rate=room / (3.9 * SECONDS_PER_HOUR))
    assert world.to(Verb.RESTART_WORKER)


@pytest.mark.parametrize("hours", [4.1, 400.0])
def test_a_leak_that_reaches_the_limit_late_is_not_restarted(hours: float) -> None:
    room = LIMIT - 3 * GIB - 1_000_000_000
    world = leaking(rate=room / (hours * SECONDS_PER_HOUR))
    world.to_confirmed()
    world.run(600)
    assert world.open[0].phase is IncidentPhase.CONFIRMED
    assert world.open[0].message == (
        "the restart is deferred: the leak budget is spent, but memory does not reach a known "
        "limit within 4h"
        " (spec.memory.auto.limitWithin)"
    )


def test_a_leak_towards_an_unknown_limit_is_not_restarted() -> None:
    world = leaking(rate=100.0 * MIB)
    world.limit = None
    world.to_confirmed()
    world.run(600)
    assert world.open[0].phase is IncidentPhase.CONFIRMED


def test_a_fixed_budget_does_not_ask_for_the_limit() -> None:
    world = leaking(rate=1000.0)
    fixed = MemoryBudget(growth_bytes=2 * GIB, limit_bytes=LIMIT)
    world.governor.memory = MemoryPolicy(host=fixed, warmup_s=2.0)
    assert world.to(Verb.RESTART_WORKER)
