"""What a restart brought back is judged by how much the engine's own starts differ.

Tests ``govern/verification.py``.
"""

import msgspec
import pytest

from plimsoll_api.assessment import Assessment, BudgetState
from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind
from plimsoll_sidecar.govern.command import Verb
from plimsoll_sidecar.govern.state import GovernorState
from plimsoll_sidecar.govern.verification import (
    MAX_NOISE_SHARE_OF_BASELINE,
    MAX_STORED_STARTS,
    MEMORY_SETTLE_S,
    NUM_LEARNING_ASSESSMENTS,
    PRIOR_NOISE_SHARE_OF_BASELINE,
    StartHistory,
)
from tests.unit.govern.governed import BASELINE, World, done

MB = 1_000_000


def lived(world: World, *levels: int) -> World:
    """``world`` after one start a level, each of which needed so much more than the baseline."""
    world.suspect = False
    for number, level in enumerate(levels):
        world.boot = f"engine-{number}"
        world.growth = level
        world.run(NUM_LEARNING_ASSESSMENTS + 1)
    return world


def judged(world: World, left: int) -> Reason | None:
    """How a leak of 256 MB ends of which the next start has ``left``."""
    world.suspect, world.growth, world.process = True, 256 * MB, "frontend"
    restart = world.to(Verb.RESTART_ENGINE)
    world.growth = 0
    world.tick(done(restart))
    world.boot, world.growth, world.suspect = "successor", left, False
    world.run(int(MEMORY_SETTLE_S) + 5)
    return world.ended[-1].reason


@pytest.mark.parametrize(
    ("levels", "left", "reason"),
    [
        ((), 35 * MB, Reason.ENGINE_RESTART),
        ((0,), 35 * MB, Reason.ENGINE_RESTART),
        ((0, 1 * MB, 0), 35 * MB, Reason.PARTLY_RETURNED),
        ((0, 1 * MB, 0), 24 * MB, Reason.ENGINE_RESTART),
        ((0, 50 * MB, 20 * MB), 70 * MB, Reason.ENGINE_RESTART),
        ((0, 50 * MB, 20 * MB), 80 * MB, Reason.PARTLY_RETURNED),
    ],
)
def test_what_stays_is_judged_by_the_engine_s_own_starts(
    levels: tuple[int, ...], left: int, reason: Reason
) -> None:
    assert judged(lived(World(), *levels), left) is reason


def test_a_start_that_did_not_bring_it_back_teaches_nothing() -> None:
    world = lived(World(), 0, 1 * MB)
    before = world.governor.state.starts.host
    assert judged(world, 100 * MB) is Reason.PARTLY_RETURNED
    world.run(2 * NUM_LEARNING_ASSESSMENTS)
    assert world.governor.state.starts.host == before


def test_a_new_worker_is_no_start_of_the_engine() -> None:
    world = World()
    world.suspect = False
    world.run(NUM_LEARNING_ASSESSMENTS + 1)
    world.renew()
    world.run(2 * NUM_LEARNING_ASSESSMENTS)
    assert len(world.governor.state.starts.host) == 1


def seen(starts: StartHistory, *levels: int) -> None:
    for number, level in enumerate(levels):
        starts.begin_start(f"engine-{number}")
        state = BudgetState(current=level, baseline=level, explained=0)
        for _ in range(NUM_LEARNING_ASSESSMENTS):
            starts.add_assessment(Assessment(t=0.0, epoch=number, warm=True, device=state))


def test_the_prior_holds_until_two_starts_were_seen_and_the_bounds_ever_after() -> None:
    starts = StartHistory()
    seen(starts, BASELINE)
    assert (
        starts.estimate_noise(IncidentKind.DEVICE_GROWTH, BASELINE)
        == PRIOR_NOISE_SHARE_OF_BASELINE * BASELINE
    )
    seen(starts, *(BASELINE + i * 90 * MB for i in range(MAX_STORED_STARTS)))
    assert (
        starts.estimate_noise(IncidentKind.DEVICE_GROWTH, BASELINE)
        == MAX_NOISE_SHARE_OF_BASELINE * BASELINE
    )
    assert (
        starts.estimate_noise(IncidentKind.HOST_GROWTH, BASELINE)
        == PRIOR_NOISE_SHARE_OF_BASELINE * BASELINE
    )


def test_only_the_newest_are_kept_and_those_of_one_engine_alone() -> None:
    starts = StartHistory()
    seen(starts, *([BASELINE] * 3 * MAX_STORED_STARTS))
    assert len(starts.device) == MAX_STORED_STARTS
    seen(starts, 2 * BASELINE)
    assert len(starts.device) == 1


def test_a_supervisor_that_starts_again_goes_on_learning() -> None:
    world = lived(World(), 0)
    world.boot, world.growth = "engine-1", 30 * MB
    world.run(NUM_LEARNING_ASSESSMENTS // 2)
    state = msgspec.json.decode(msgspec.json.encode(world.governor.state), type=GovernorState)
    again = World(state=state)
    again.suspect, again.boot, again.growth = False, "engine-1", 30 * MB
    again.run(NUM_LEARNING_ASSESSMENTS // 2)
    assert [start.least for start in again.governor.state.starts.host] == [
        BASELINE,
        BASELINE + 30 * MB,
    ]
