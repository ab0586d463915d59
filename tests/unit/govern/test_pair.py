"""The restart of one engine of a pair: tried with its partner before clients come back.

Tests ``govern/phases.py``.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.admin import EngineState
from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.govern.governor import Governor
from plimsoll_sidecar.govern.state import (
    PARTNER_TEST_DURATION_S,
    SLOT_RETRY_INTERVAL_S,
    GovernorState,
)
from plimsoll_sidecar.govern.verification import MAX_START_DURATION_S
from tests.unit.govern.governed import World, done

LONGEST_S = MAX_START_DURATION_S + 2.0 + PARTNER_TEST_DURATION_S
"""From the restart to the end of all tries; the world warms up in two seconds."""


def restarted() -> tuple[World, Command]:
    """A world whose engine has just been restarted for a leak, and the command for that."""
    world = World()
    world.meets_partner = True
    world.growth, world.process = 500_000_000, "frontend"
    restart = world.to(Verb.RESTART_ENGINE)
    assert restart.meets_partner
    world.renew()
    world.engine_state = EngineState.STARTING
    world.warm = False
    return world, restart


def test_the_restart_is_not_over_before_a_request_went_through_the_pair() -> None:
    world, restart = restarted()
    world.run(30, done(restart))
    assert world.verbs[-1] is Verb.RESTART_ENGINE, "an engine that starts answers nobody"
    world.engine_state, world.warm = EngineState.SERVING, True
    meeting = world.until_command(limit=3)
    assert (meeting.verb, meeting.epoch, meeting.gives_up) == (
        Verb.MEET_PARTNER, "boot:2", False,
    )  # fmt: skip
    world.run(5)
    assert world.ended == []
    assert world.governor.state.slot_holder == world.open[0].name, "no partner may restart now"
    world.run(3, done(meeting))
    assert world.ended[0].reason is Reason.ENGINE_RESTART


def test_a_pair_that_does_not_connect_is_tried_again_and_then_reported() -> None:
    world, restart = restarted()
    world.engine_state, world.warm = EngineState.SERVING, True
    begin, meeting, tries = world.now, world.until_command(done(restart)), 0
    while not meeting.gives_up:
        tries += 1
        meeting = world.answer(meeting, Outcome.FAILED, limit=int(SLOT_RETRY_INTERVAL_S) + 2)
        assert meeting.verb is Verb.MEET_PARTNER
    assert (
        PARTNER_TEST_DURATION_S
        <= world.now - begin
        <= PARTNER_TEST_DURATION_S + 2 * SLOT_RETRY_INTERVAL_S
    )
    assert tries <= PARTNER_TEST_DURATION_S / SLOT_RETRY_INTERVAL_S + 1
    world.run(3, done(meeting, Outcome.FAILED, "HTTP 500 from pod d-0"))
    incident = world.ended[0]
    assert (incident.phase, incident.reason) == (IncidentPhase.UNRESOLVED, Reason.PARTNER_LOST)
    assert incident.message == "HTTP 500 from pod d-0"
    steps = [one.step for one in incident.timeline]
    assert steps.count("MeetPartner") == 2, "equal failures are one step, the last one another"


def test_a_partner_that_nobody_can_ask_does_not_make_the_restart_a_failure() -> None:
    world, restart = restarted()
    world.engine_state, world.warm = EngineState.SERVING, True
    meeting = world.until_command(done(restart))
    while not meeting.gives_up:
        meeting = world.answer(meeting, Outcome.UNKNOWN, limit=int(SLOT_RETRY_INTERVAL_S) + 2)
    world.run(3, done(meeting, Outcome.UNKNOWN, "no decode pod is ready"))
    assert world.ended[0].reason is Reason.ENGINE_RESTART


def test_an_engine_that_never_starts_is_judged_without_a_partner() -> None:
    world, restart = restarted()
    world.answers = False
    world.tick(done(restart))
    for _ in range(int(LONGEST_S) + 5):
        if world.open and world.open[0].phase is IncidentPhase.VERIFYING:
            world.tick()
    assert Verb.MEET_PARTNER not in world.verbs
    assert not world.open or world.open[0].phase is not IncidentPhase.VERIFYING


def test_an_engine_that_must_not_restart_alone_is_not_restarted() -> None:
    world = World()
    world.restart_blocker = "restart the prefill and decode pods together"
    world.growth, world.process = 500_000_000, "frontend"
    world.run(60)
    while not world.ended:
        assert world.now < 2_000
        world.tick(*(done(one) for one in world.commands[-1:]))
    incident = world.ended[0]
    assert (incident.reason, incident.message) == (Reason.REFUSED, world.restart_blocker)
    assert not {Verb.TAKE_SLOT, Verb.DRAIN, Verb.RESTART_ENGINE} & set(world.verbs)
    assert world.governor.state.restarts == []


def test_a_stalled_engine_is_restarted_although_it_has_a_partner() -> None:
    world = World()
    world.restart_blocker = "restart the prefill and decode pods together"
    world.kind = IncidentKind.STALL
    assert world.to(Verb.TAKE_SLOT).stalled


EVENTS = st.lists(
    st.sampled_from(
        ["answer", "fail", "unknown", "crash", "silent", "serve", "supervisor", "wait"]
    ),
    max_size=40,
)


@given(EVENTS, st.booleans())
def test_the_tries_end_whatever_happens(happens: list[str], known: bool) -> None:
    """Only in a new epoch that serves, one at a time, and never for longer than their bound."""
    world, restart = restarted()
    sent: Command | None = world.tick(done(restart))
    world.meets_partner = known
    outcomes = {"answer": Outcome.SUCCEEDED, "fail": Outcome.FAILED, "unknown": Outcome.UNKNOWN}

    def set_addresses(command: Command | None) -> None:
        nonlocal sent
        if command is not None and command.verb is Verb.MEET_PARTNER:
            assert sent is None, "one try at a time"
            assert world.answers
            assert world.engine_state is EngineState.SERVING
            assert command.epoch == f"boot:{world.number}" != "boot:1"
        sent = command or sent

    for what in happens:
        if what in outcomes and sent is not None:
            command, sent = sent, None
            set_addresses(world.tick(done(command, outcomes[what])))
        elif what == "crash":
            world.number += 1
        elif what == "silent":
            world.answers = False
        elif what == "serve":
            world.answers, world.warm, world.engine_state = True, True, EngineState.SERVING
        elif what == "supervisor":
            data = msgspec.json.encode(world.governor.state)
            state = msgspec.json.decode(data, type=GovernorState)
            world.governor = Governor(world.governor.policy, world.governor.memory, state, "pod-0")
        for _ in range(4):
            set_addresses(world.tick())
    for _ in range(int(LONGEST_S) + 60):
        if not any(one.meets_partner for one in world.open):
            break
        answered = [] if sent is None else [done(sent, Outcome.FAILED)]
        sent = None if answered else sent
        set_addresses(world.tick(*answered))
    assert not any(one.meets_partner for one in world.open), "a bound in time"


@pytest.mark.parametrize("group", ["", "4a"])
def test_the_restart_of_a_group_is_named_once_before_its_first_command(group: str) -> None:
    world = World()
    world.group = group
    world.growth, world.process = 500_000_000, "frontend"
    restart = world.to(Verb.RESTART_ENGINE)
    steps = [one.step for one in world.open[0].timeline]
    assert steps.count("GroupRestart") == bool(group)
    if group:
        assert steps.index("TakeSlot") < steps.index("GroupRestart") < steps.index("Drain")
    world.renew()
    world.run(3, done(restart))
    assert world.ended[0].reason is Reason.ENGINE_RESTART
    assert len(world.governor.state.restarts) == 1, "one of the budget"
