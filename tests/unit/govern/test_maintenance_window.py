"""When a window opens, and which restarts wait for it.

Tests ``crds/plimsoll_api/maintenance_window.py`` and ``govern/phase_steps.py``.
"""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.incidents import IncidentKind, IncidentPhase, WaitReason
from plimsoll_api.maintenance_window import MaintenanceWindow
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.units import DAY_S
from plimsoll_sidecar.govern.command import Verb
from tests.unit.govern.governed import World, done

NIGHT = MaintenanceWindow(start_s=22 * 3600.0, duration_s=4 * 3600.0, days=(5,))
GIB = 1 << 30


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("now", "opens_s"),
    [
        ("2026-11-21T21:00", 3600),  # a Saturday
        ("2026-11-21T22:00", 0),
        ("2026-11-22T01:59", 0),  # it began on Saturday
        ("2026-11-22T02:00", 7 * DAY_S - 4 * 3600),
        ("2026-11-22T23:00", 6 * DAY_S - 3600),
    ],
)
def test_a_window_over_midnight_on_saturdays(now: str, opens_s: float) -> None:
    assert NIGHT.compute_seconds_until_open(at(now)) == opens_s
    assert NIGHT.opens_at == "22:00 UTC"


@given(
    st.builds(
        MaintenanceWindow,
        start_s=st.integers(0, 86_399).map(float),
        duration_s=st.integers(1, 86_400).map(float),
        days=st.sets(st.integers(0, 6)).map(lambda days: tuple(sorted(days))),
    ),
    st.integers(0, 4_000_000_000),
)
def test_every_window_opens_within_a_week_on_one_of_its_days(
    window: MaintenanceWindow, now: int
) -> None:
    wait = window.compute_seconds_until_open(now)
    assert 0 <= wait <= 7 * DAY_S
    assert window.compute_seconds_until_open(now + wait) == 0
    if wait:
        assert window.compute_seconds_until_open(now + wait - 1) == 1
        opened = datetime.fromtimestamp(now + wait, UTC)
        assert not window.days or opened.weekday() in window.days
        assert (now + wait) % DAY_S == window.start_s


def leaking(limit: int | None, rate: float | None) -> World:
    """A leak over its budget, an hour before the window opens."""
    policy = Supervision(mode=Mode.RECOVER, maintenance_window=NIGHT)
    host = MemoryBudget(growth_bytes=GIB // 4, window_s=86_400.0, limit_bytes=limit)
    world = World(policy, memory=MemoryPolicy(host=host, warmup_s=2.0))
    world.now, world.growth, world.rate = at("2026-11-21T21:00"), 500_000_000, rate
    return world


def test_a_leak_that_lasts_waits_until_the_window_opens() -> None:
    world = leaking(8 * GIB, rate=1000.0)
    diagnose = world.to(Verb.DIAGNOSE)
    world.run(3000, done(diagnose))
    assert world.open[0].phase is IncidentPhase.CONFIRMED
    assert world.open[0].message == "the restart waits for the maintenance window at 22:00 UTC"
    assert world.verbs == [Verb.TRIM, Verb.DIAGNOSE]
    slot = world.until_command(limit=1000)
    assert slot.verb is Verb.TAKE_SLOT
    assert world.now >= at("2026-11-21T22:00")
    assert world.open[0].message == ""


def test_an_incident_that_waits_for_its_budget_again_says_so() -> None:
    world = leaking(8 * GIB, rate=1000.0)
    world.run(100, done(world.to(Verb.DIAGNOSE)))
    (incident,) = world.open
    assert incident.waits is WaitReason.MAINTENANCE_WINDOW
    world.over_budget = False
    world.run(3)
    assert incident.waits is None
    assert "the leak budget is not spent" in incident.message
    world.over_budget = True
    world.run(3)
    assert incident.waits is WaitReason.MAINTENANCE_WINDOW


@pytest.mark.parametrize(
    ("limit", "rate"),
    [
        (8 * GIB, 4e6),  # 7 GB at 4 MB/s are gone in half an hour
        (None, 1000.0),  # nobody knows how long it lasts
    ],
)
def test_a_leak_that_does_not_last_is_not_waited_with(
    limit: int | None, rate: float | None
) -> None:
    world = leaking(limit, rate)
    world.to(Verb.RESTART_WORKER)
    assert world.now < at("2026-11-21T21:10")


def test_a_stall_is_not_waited_with() -> None:
    world = leaking(8 * GIB, rate=None)
    world.kind = IncidentKind.STALL
    world.to(Verb.RESTART_WORKER)
    assert world.now < at("2026-11-21T21:10")
