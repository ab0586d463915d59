"""When a healthy engine is restarted because of its age, and when it is not.

Tests ``govern/recycle.py``.
"""

from __future__ import annotations

import msgspec
import pytest

from plimsoll_api.admin import EngineState
from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.maintenance_window import MaintenanceWindow
from plimsoll_api.supervision import Action, Mode, Recycle, RestartBudget, Supervision
from plimsoll_sidecar.govern.command import Outcome, Verb
from plimsoll_sidecar.govern.state import GovernorState
from tests.unit.govern.governed import World, done

DAY_S = 86_400.0


def world(
    mode: Mode = Mode.RECOVER,
    window: MaintenanceWindow | None = None,
    wanted: Recycle = Recycle(DAY_S),  # noqa: B008
) -> World:
    made = World(Supervision(mode=mode, recycle=wanted, maintenance_window=window))
    made.suspect = False
    made.tick()
    return made


def age(world: World, seconds: float = DAY_S) -> None:
    world.now += seconds


def test_an_old_engine_is_restarted_and_is_young_again() -> None:
    one = world()
    age(one, DAY_S - 100)
    one.run(90)
    assert one.open == []
    age(one, 20)
    slot = one.to(Verb.TAKE_SLOT)
    assert slot.planned
    assert one.verbs == [Verb.TAKE_SLOT], "no trim and no diagnostics: nothing is wrong"
    restart = one.answer(slot)
    assert restart.verb is Verb.RESTART_WORKER
    one.renew()
    one.run(20, done(restart))
    (ended,) = one.ended
    assert (ended.kind, ended.phase) == (IncidentKind.RECYCLE, IncidentPhase.RESOLVED)
    assert ended.reason is Reason.WORKER_RESTART
    assert "longer than recycle.maxAge (24h)" in ended.attribution.evidence[0]
    one.run(600)
    assert len(one.ended) == 1


def test_a_clock_that_is_set_makes_no_engine_idle_for_longer() -> None:
    one = world(wanted=Recycle(DAY_S, when_idle_for_s=600.0))
    age(one)
    one.idle = True
    one.tick()
    one.now += 3600.0
    one.governor.shift_times(3600.0)
    one.run(599)
    assert one.open == []
    one.run(5)
    assert [incident.kind for incident in one.open] == [IncidentKind.RECYCLE]


def test_a_busy_engine_waits_until_it_is_idle() -> None:
    one = world(wanted=Recycle(DAY_S, when_idle_for_s=60.0))
    for idle in (None, False):
        one.idle = idle
        age(one)
        one.run(100)
        assert one.open == [], "unknown is not idle"
    one.idle = True
    one.run(59)
    one.idle = False
    one.tick()
    one.idle = True
    one.run(59)
    assert one.open == [], "a request restarts the idle time"
    slot = one.to(Verb.TAKE_SLOT)
    one.idle = False
    one.run(10, done(slot))
    assert Verb.RESTART_WORKER not in one.verbs
    (ended,) = one.ended
    assert ended.phase is IncidentPhase.RESOLVED


def test_it_waits_for_its_window_or_that_of_all_restarts() -> None:
    night = MaintenanceWindow(start_s=2 * 3600.0, duration_s=3600.0)
    noon = MaintenanceWindow(start_s=12 * 3600.0, duration_s=3600.0)
    for one, hour in (
        (world(window=night), 2),
        (world(window=night, wanted=Recycle(DAY_S, window=noon)), 12),
    ):
        one.now = 10 * DAY_S + hour * 3600.0 - 60
        one.run(50)
        assert one.open == []
        one.run(20)
        assert one.open


@pytest.mark.parametrize("trouble", ["leak", "drained", "starting", "silent", "budget"])
def test_it_never_comes_on_top_of_trouble(trouble: str) -> None:
    one = world()
    one.suspect = trouble == "leak"
    one.over_budget = False
    one.run(20)
    one.manually_drained = trouble == "drained"
    one.answers = trouble != "silent"
    if trouble == "starting":
        one.engine_state = EngineState.STARTING
    if trouble == "budget":
        one.governor.policy = msgspec.structs.replace(
            one.governor.policy, restart_budget=RestartBudget(count=1, window_s=3600.0)
        )
        one.governor.state.exhausted = True
    age(one)
    one.run(100)
    assert IncidentKind.RECYCLE not in {incident.kind for incident in one.open}
    assert not one.governor.state.exhausted or trouble == "budget"


def test_a_slot_that_never_comes_is_waited_for() -> None:
    one = world()
    age(one)
    command = one.to(Verb.TAKE_SLOT)
    for _ in range(3):
        one.now += 1000.0
        command = one.answer(command, Outcome.REFUSED)
        assert command.verb is Verb.TAKE_SLOT
    assert one.ended == []


def test_observe_says_what_it_would_do_once_an_epoch() -> None:
    one = world(Mode.OBSERVE)
    age(one)
    one.run(600)
    (ended,) = one.ended
    assert ended.phase is IncidentPhase.SUPPRESSED
    assert one.commands == []


def test_the_age_survives_the_supervisor_and_an_older_journal() -> None:
    one = world()
    data = msgspec.json.encode(one.governor.state)
    again = World(one.governor.policy, msgspec.json.decode(data, type=GovernorState))
    again.suspect = False
    again.now = one.now
    age(again)
    again.run(10)
    assert again.open
    older = msgspec.json.decode(data, type=GovernorState)
    older.epoch_at = None
    young = World(one.governor.policy, older)
    young.suspect, young.now = False, one.now + DAY_S
    young.run(100)
    assert young.open == [], "the start is unknown, so its age counts from now"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"restart_budget": RestartBudget(window_s=2 * DAY_S)}, "at least restartBudget.window"),
        ({"restart_budget": RestartBudget(count=0)}, "restartBudget.count above 0"),
        ({"ladder": (Action.TRIM,)}, "in ladder"),
    ],
)
def test_what_could_never_recycle_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Supervision(recycle=Recycle(DAY_S), **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whenIdleFor must be shorter"):
        Recycle(60.0, when_idle_for_s=60.0)
