"""An incident of a multi-node group, whose leak is in another pod than the leader's:
``govern/governor.py``."""

from __future__ import annotations

import pytest

from plimsoll_api.admin import EngineState
from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incident_record import Attribution, StepOutcome
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_sidecar.govern import ladder
from plimsoll_sidecar.govern.command import EngineView, Event, Outcome, Verb
from plimsoll_sidecar.govern.governor import GROUP_RECREATION_WAIT_S, Governor
from plimsoll_sidecar.govern.incident import Incident
from tests.unit.govern.governed import EVERYTHING, World, done

POD = "llm-0-1"


def leaking_elsewhere() -> World:
    world = World()
    world.suspect, world.growth = False, 500_000_000
    world.besides = [
        Suspicion(
            IncidentKind.HOST_GROWTH, Segment.PYTHON_OBJECTS, 0.9, 2.0, 500_000_000,
            over_budget=True, process="worker", pod=POD,
        )
    ]  # fmt: skip
    return world


def test_the_leader_does_not_trim_for_it_and_restarts_the_group() -> None:
    world = leaking_elsewhere()
    command = world.until_command()
    (incident,) = world.open
    assert incident.attribution.pod == POD
    assert (command.verb, command.process) == (Verb.DIAGNOSE, None), "out of its reach"
    (trim,) = incident.timeline[:1]
    assert (trim.step, trim.outcome) == (Action.TRIM.value, StepOutcome.SKIPPED)
    assert f"pod {POD} of the group holds the memory" in trim.message
    assert incident.confirmed_at is not None
    while command.verb is not Verb.RESTART_ENGINE:
        assert command.verb not in (Verb.TRIM, Verb.RESTART_WORKER)
        command = world.answer(command)
    assert incident.phase is IncidentPhase.RESTARTING


def test_a_crash_of_the_leader_tells_its_own_memory() -> None:
    governor = Governor(Supervision(mode=Mode.RECOVER), MemoryPolicy(warmup_s=2.0), replica="llm-0")

    def tick(now: float, epoch: str) -> list[Event]:
        def seen(current: int) -> Assessment:
            return Assessment(t=now, epoch=1, warm=True, host=BudgetState(current=current))

        view = EngineView(epoch=epoch, state=EngineState.SERVING, capabilities=EVERYTHING)
        return governor.advance(seen(9 << 30), view, now, pod_assessment=seen(3 << 30)).events

    tick(1.0, "a:1")
    (crash,) = {event.incident.name: event.incident for event in tick(2.0, "b:1")}.values()
    assert crash.kind is IncidentKind.ENGINE_CRASH
    assert crash.timeline[0].before_bytes == 3 << 30


@pytest.mark.parametrize("action", [Action.TRIM, Action.WORKER_RESTART])
def test_what_another_pod_holds_needs_a_restart_of_the_group(action: Action) -> None:
    view = EngineView(
        epoch="boot:1", state=EngineState.SERVING, capabilities=EVERYTHING, replaceable=True
    )
    policy = Supervision(ladder=tuple(Action))

    def leak(pod: str | None) -> Incident:
        held = Attribution(process="worker", pod=pod)
        kind, phase = IncidentKind.HOST_GROWTH, IncidentPhase.OPEN
        return Incident(
            name="i", kind=kind, epoch="boot:1", opened_at=0.0, phase=phase, attribution=held
        )

    assert ladder.find_skip_reason(action, leak(None), policy, view) is None
    reason = ladder.find_skip_reason(action, leak(POD), policy, view)
    assert reason is not None
    assert "only a restart of the group" in reason
    assert ladder.choose_next_rung(leak(POD), policy, view) is Action.ENGINE_RESTART


@pytest.mark.parametrize("recreated", [True, False])
def test_the_slot_is_kept_while_the_group_may_still_be_recreated(recreated: bool) -> None:
    """Its engine serves again before the controller of the group replaces its pods."""
    world = World(Supervision(mode=Mode.RECOVER, ladder=(Action.ENGINE_RESTART,)))
    world.group, world.growth, world.recreated = "0", 500_000_000, recreated
    restart = world.to(Verb.RESTART_ENGINE)
    world.renew()
    world.run(10, done(restart))
    assert [one.phase for one in world.ended] == [IncidentPhase.RESOLVED]
    assert world.governor.state.slot_holder == (restart.incident if recreated else None)
    world.run(int(GROUP_RECREATION_WAIT_S))
    assert world.governor.state.slot_holder is None


def test_a_slot_without_a_restart_of_the_group_is_released_at_once() -> None:
    world = World(Supervision(mode=Mode.RECOVER, ladder=(Action.ENGINE_RESTART,)))
    world.group, world.recreated = "0", True
    world.tick()
    world.now += GROUP_RECREATION_WAIT_S
    restart = world.to(Verb.RESTART_ENGINE)
    world.run(2, done(restart, Outcome.REFUSED))
    assert world.governor.state.slot_holder is None
