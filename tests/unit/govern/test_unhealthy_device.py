"""An engine on an unhealthy device is not restarted there: its pod is replaced.

Tests ``govern/ladder.py``.
"""

from plimsoll_api.assessment import Segment
from plimsoll_api.incident_record import StepOutcome
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_sidecar.govern.command import Verb
from tests.unit.govern.governed import World, done

DEVICE = "example.com/gpu=gpu-0 of claim:gpu/gpu"
FORBIDDEN = {Verb.TRIM, Verb.RESTART_WORKER, Verb.RESTART_ENGINE}


def growing(*ladder: Action) -> World:
    """A world whose device memory has grown beyond its budget."""
    world = World(Supervision(mode=Mode.RECOVER, ladder=ladder))
    world.kind, world.segment = IncidentKind.DEVICE_GROWTH, Segment.NON_TORCH
    world.growth = 500_000_000
    return world


def test_the_pod_is_replaced_without_a_trim_or_a_restart() -> None:
    world = growing(*Action)
    world.unhealthy_device = DEVICE
    command = world.until_command()
    while command.verb is not Verb.TAKE_SLOT:
        command = world.answer(command)
    world.run(3, done(command))
    (incident,) = world.open
    assert (incident.phase, incident.rung) == (IncidentPhase.RESTARTING, Action.POD_REPLACE)
    assert not FORBIDDEN & {one.verb for one in world.commands}
    trim = next(one for one in incident.timeline if one.step == Action.TRIM.value)
    assert trim.outcome is StepOutcome.SKIPPED
    assert f"reports the device {DEVICE} as unhealthy" in trim.message


def test_an_engine_whose_pod_may_not_be_replaced_restarts() -> None:
    world = growing(Action.TRIM, Action.WORKER_RESTART)
    world.unhealthy_device = DEVICE
    assert world.to(Verb.RESTART_WORKER).verb is Verb.RESTART_WORKER


def test_a_stalled_engine_does_not_wait_for_a_new_pod() -> None:
    world = growing(*Action)
    world.kind, world.unhealthy_device = IncidentKind.STALL, DEVICE
    assert world.to(Verb.RESTART_WORKER).verb is Verb.RESTART_WORKER


def test_a_device_of_unknown_health_is_treated_as_before() -> None:
    world = growing(*Action)
    assert world.until_command().verb is Verb.TRIM
