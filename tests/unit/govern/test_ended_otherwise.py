"""Epochs that the supervisor did not end: crashes, and what persons do by hand.

Tests ``govern/event_incidents.py``.
"""

import msgspec

from plimsoll_api.admin import EngineState
from plimsoll_api.assessment import Assessment, BudgetState, Suspicion
from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_sidecar.govern.command import EngineProcess, EngineView, EventType, Outcome, Verb
from plimsoll_sidecar.govern.event_incidents import ManualAction
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.govern.restart_budget import ReplicaRestarts
from tests.unit.govern.governed import BASELINE, World, done

GIB = 1 << 30
OLD = (
    EngineProcess("frontend", 10),
    EngineProcess("weight_server", 11),
    EngineProcess("worker", 12),
)


def quiet() -> World:
    host = MemoryBudget(growth_bytes=GIB, window_s=3600.0, limit_bytes=4 * GIB)
    world = World(memory=MemoryPolicy(host=host, warmup_s=2.0))
    world.suspect = False
    world.run(3)
    return world


def by_hand(epoch: str, outcome: Outcome | None, action: str = "restart") -> ManualAction:
    return ManualAction(
        id="person-0a1b2c3d", action=action, epoch=epoch, at=1_000.0, outcome=outcome, message="m"
    )


def advance(
    world: World,
    epoch: str,
    *actions: ManualAction,
    processes: tuple[EngineProcess, ...] = (),
    killed: bool = False,
) -> list[Incident]:
    """One step with an engine in ``epoch``; the records that ended with it."""
    world.now += 1.0
    kill = Suspicion(
        kind=IncidentKind.OUT_OF_MEMORY_KILL, segment=None, confidence=1.0, consumed_ratio=0.0
    )
    assessment = Assessment(
        t=world.now, epoch=1, warm=True, suspicions=[kill] if killed else [],
        host=BudgetState(current=BASELINE),
    )  # fmt: skip
    view = EngineView(epoch=epoch, state=world.engine_state, processes=processes)
    turn = world.governor.advance(assessment, view, world.now, manual_actions=actions)
    assert turn.command is None, "nothing disruptive follows"
    return [one.incident for one in turn.events if one.type is EventType.ENDED]


def test_an_engine_that_ended_by_itself_leaves_a_record_and_nothing_follows() -> None:
    world = quiet()
    assert advance(world, "boot:1", processes=OLD) == []
    world.now += 7.0
    (crash,) = advance(world, "other:1", processes=(EngineProcess("frontend", 30),))
    assert (crash.kind, crash.phase) == (IncidentKind.ENGINE_CRASH, IncidentPhase.UNRESOLVED)
    assert crash.reason is Reason.CONTAINER_RESTARTED
    assert crash.epoch == "boot:1"
    assert crash.attribution.process == "frontend"
    evidence = "\n".join(crash.attribution.evidence)
    assert "changed from boot:1 to other:1" in evidence
    assert "frontend (PID 10), weight_server (PID 11), worker (PID 12)" in evidence
    assert "memory before: host 954 MiB of 4.0 GiB" in evidence
    assert "the engine was last healthy 8 s earlier" in evidence
    assert world.open == []
    assert world.governor.count_restarts_left(world.now) == 3, (
        "the budget is for restarts that we send"
    )


def test_a_worker_that_ended_by_itself_is_distinguished() -> None:
    world = quiet()
    advance(world, "boot:1", processes=OLD)
    (crash,) = advance(world, "boot:2", processes=(*OLD[:2], EngineProcess("worker", 40)))
    assert (crash.reason, crash.attribution.process) == (Reason.WORKER_RESTARTED, "worker")
    assert "processes that ended: worker (PID 12)" in crash.attribution.evidence


def test_a_worker_that_was_lost_before_it_served_is_known() -> None:
    world = World(memory=MemoryPolicy(host=MemoryBudget(growth_bytes=GIB, window_s=3600.0)))
    world.suspect = False
    world.engine_state = EngineState.WARMING
    assert advance(world, "boot:1", processes=OLD[:1]) == []
    assert advance(world, "boot:1", processes=OLD) == []
    assert advance(world, "boot:1", processes=OLD[:2]) == [], "seen without it, not yet replaced"
    (crash,) = advance(world, "boot:2", processes=(*OLD[:2], EngineProcess("worker", 40)))
    assert "processes that ended: worker (PID 12)" in crash.attribution.evidence
    assert "memory before: host 954 MiB" in crash.attribution.evidence


def test_our_own_restart_is_no_crash() -> None:
    world = World()
    world.growth = 500_000_000
    restart = world.to(Verb.RESTART_WORKER)
    world.renew()
    world.run(20, done(restart))
    assert [incident.kind for incident in world.ended] == [IncidentKind.HOST_GROWTH]


def test_a_restart_by_hand_is_no_crash_and_is_recorded_and_counted() -> None:
    world = quiet()
    assert advance(world, "boot:1", by_hand("boot:1", None)) == []
    assert advance(world, "boot:2") == []
    (record,) = advance(world, "boot:2", by_hand("boot:1", Outcome.SUCCEEDED))
    assert (record.kind, record.phase) == (IncidentKind.MANUAL_ACTION, IncidentPhase.RESOLVED)
    assert record.reason is Reason.MANUAL_RESTART
    assert record.name == "pod-0-0a1b2c3d"
    assert [step.step for step in record.timeline] == ["ManualRestart"]
    assert world.governor.count_restarts_left(world.now) == 2


def test_a_restart_by_hand_that_ended_before_it_was_seen_is_no_crash() -> None:
    world = quiet()
    (record,) = advance(world, "boot:1", by_hand("boot:1", Outcome.SUCCEEDED))
    assert record.reason is Reason.MANUAL_RESTART
    assert advance(world, "boot:2") == []


def test_a_crash_after_a_restart_by_hand_was_refused_is_a_crash() -> None:
    world = quiet()
    advance(world, "boot:1", by_hand("boot:1", None))
    (record,) = advance(world, "boot:1", by_hand("boot:1", Outcome.REFUSED))
    assert record.reason is Reason.REFUSED
    (crash,) = advance(world, "boot:2")
    assert crash.kind is IncidentKind.ENGINE_CRASH


def test_a_trim_by_hand_is_recorded_and_does_not_count() -> None:
    world = quiet()
    (record,) = advance(world, "boot:1", by_hand("boot:1", Outcome.SUCCEEDED, "trim"))
    assert record.reason is Reason.MANUAL_TRIM
    assert world.governor.count_restarts_left(world.now) == 3
    (crash,) = advance(world, "boot:2")
    assert crash.kind is IncidentKind.ENGINE_CRASH


def test_a_kill_for_memory_is_an_incident_of_its_own() -> None:
    world = quiet()
    advance(world, "boot:1", killed=True)
    assert [one.kind for one in advance(world, "boot:2")] == []
    assert [incident.kind for incident in world.open] == [IncidentKind.OUT_OF_MEMORY_KILL]


def test_a_supervisor_that_was_away_does_not_know() -> None:
    world = quiet()
    state = msgspec.json.decode(
        msgspec.json.encode(world.governor.state), type=type(world.governor.state)
    )
    world.governor = Governor(world.governor.policy, world.governor.memory, state, "pod-0")
    assert advance(world, "boot:2") == []
    assert world.governor.count_restarts_left(world.now) == 3


def test_what_the_lease_counts_joins_the_journal() -> None:
    world = quiet()
    governor = world.governor
    assert governor.merge_restarts(ReplicaRestarts((world.now - 20, world.now - 10))) == 2
    assert governor.count_restarts_left(world.now) == 1
    assert governor.merge_restarts(governor.copy_restarts()) == 0, "the same restart counts once"
    assert governor.merge_restarts(ReplicaRestarts((), exhausted=True)) == 0
    assert governor.count_restarts_left(world.now) == 0
    governor.reset_restart_budget()
    assert governor.copy_restarts() == ReplicaRestarts()
