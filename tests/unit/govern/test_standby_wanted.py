"""From the suspicion to the restart a standby is wanted, and then no more.

Tests ``govern/ladder.py``.
"""

from __future__ import annotations

import msgspec
import pytest

from plimsoll_api.admin import Capability
from plimsoll_api.assessment import Segment
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_sidecar.govern.command import EngineView, Outcome, Result, Verb
from tests.unit.govern.governed import EVERYTHING, World


def wanted(world: World) -> bool:
    epoch = f"{world.boot}:{world.number}"
    return world.governor.should_prepare_standby(
        EngineView(epoch=epoch, capabilities=world.capabilities)
    )


def test_it_is_wanted_until_the_worker_was_restarted() -> None:
    world = World()
    world.suspect = False
    world.tick()
    assert not wanted(world)
    world.suspect, world.growth = True, 500_000_000
    world.tick()
    assert wanted(world), "the suspicion has opened"
    command = world.until_command()
    while command.verb is not Verb.RESTART_WORKER:
        assert wanted(world), command
        command = world.answer(command)
    assert world.governor.state.incidents[0].phase is IncidentPhase.RESTARTING
    assert wanted(world), "the restart is on its way to the engine"
    world.renew()
    world.tick()
    assert world.governor.state.incidents[0].phase is IncidentPhase.RESTARTING
    assert not wanted(world), "the worker is new, and the answer is on its way"
    world.tick(Result(operation_id=command.operation_id, outcome=Outcome.SUCCEEDED))
    assert not wanted(world)


def test_it_is_given_back_when_the_suspicion_is_gone() -> None:
    world = World()
    world.growth, world.over_budget = 500_000_000, False
    world.tick()
    assert wanted(world)
    world.suspect = False
    for _ in range(200):
        world.tick()
    assert world.governor.state.incidents == []
    assert not wanted(world)


@pytest.mark.parametrize(
    "why", ["capability", "observe", "ladder", "frontend", "orphan", "exhausted"]
)
def test_it_is_not_wanted_where_no_worker_would_be_restarted(why: str) -> None:
    policy = Supervision(mode=Mode.OBSERVE if why == "observe" else Mode.RECOVER)
    if why == "ladder":
        rungs = [rung for rung in policy.ladder if rung is not Action.WORKER_RESTART]
        policy = msgspec.structs.replace(policy, ladder=type(policy.ladder)(rungs))
    world = World(policy)
    world.growth = 500_000_000
    if why == "capability":
        world.capabilities = EVERYTHING - {Capability.STANDBY}
    if why == "frontend":
        world.process = "frontend"
    if why == "orphan":
        world.segment = Segment.SHARED_ORPHAN
    world.governor.state.exhausted = why == "exhausted"
    world.tick()
    assert len(world.governor.state.incidents) == 1
    assert not wanted(world)
