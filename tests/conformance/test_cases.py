"""The cases of every engine, in an order: each leaves an engine that serves, or will again.

They run before those of the other files, by name: the first one sees the engine start.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from plimsoll_api.admin import EngineState, Role
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_sidecar.signals.process_table import ProcessId, identify
from tests.conformance.conftest import Record
from tests.conformance.rig import START_S, Rig, until
from tests.conformance.watching import served, until_confirmed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]

QUIET_S = 90.0
LEAK_BYTES_S = 2 << 20
END_S = 60.0
LATE_S = 900.0


def until_ended(rig: Rig, everyone: set[ProcessId], limit_s: float) -> float:
    """Seconds until none of these processes lives."""
    return until(
        lambda: not any(identify(p.pid) == p for p in everyone), limit_s, f"no process: {rig.log()}"
    )


def test_found_while_it_starts(rig: Rig, record: Record) -> None:
    until(rig.processes, 60, "processes")
    begin = time.monotonic()
    assert rig.status().state is EngineState.STARTING
    until(rig.serving, START_S, f"an engine that serves: {rig.log('engine')}")
    status = rig.status()
    assert {process.pid for process in status.processes} == rig.processes()
    assert [p.role for p in status.processes].count(Role.FRONTEND) == 1
    for part in rig.peer.parts:
        assert rig.part(part).pid in {process.pid for process in status.processes}
    assert status.version.startswith(rig.peer.version)
    assert rig.incidents() == []
    record("found while it starts", time.monotonic() - begin, "until ready")


def test_requests_are_counted_while_the_core_hangs(rig: Rig, record: Record) -> None:
    until(rig.serving, START_S, "an engine that serves")
    assert rig.ask() == 200
    core = rig.part(rig.peer.core)
    until(lambda: rig.status().load.inflight == 0, 30, "rest")
    os.kill(core.pid, signal.SIGSTOP)
    try:
        clients = [threading.Thread(target=rig.ask, daemon=True) for _ in range(3)]
        for client in clients:
            client.start()
        seconds = until(lambda: rig.status().load.inflight == 3, 15, "three requests")
        assert (rig.status().load.running, rig.status().load.waiting) == (0, 0)
    finally:
        os.kill(core.pid, signal.SIGCONT)
    for client in clients:
        client.join(120)
    until(lambda: rig.status().load.inflight == 0, 30, "rest")
    record("load counted where requests enter", seconds, "until seen")


def test_quiet_under_load(rig: Rig, record: Record) -> None:
    served(rig, QUIET_S / 2)
    begin = time.monotonic()
    assert rig.ask(logprobs=3) == 200
    first_s = time.monotonic() - begin
    served(rig, QUIET_S / 2)
    assert rig.incidents() == [], rig.log()
    told = f"{sum(rig.answers.values())} requests, first with logprobs {first_s:.1f} s"
    assert set(rig.answers) == {"200"}
    record("quiet under load", QUIET_S, told)


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_stall_is_confirmed_and_ended(rig: Rig, record: Record, busy: bool) -> None:
    """After the first minute of service: within 45 s. The engine is ended with every process."""
    served(rig, 75)
    if not busy:
        rig.rest()
        until(lambda: rig.status().load.inflight == 0, 60, "rest")
        time.sleep(5)
    everyone = {p for pid in rig.processes() if (p := identify(pid)) is not None}
    since = time.time()
    os.kill(rig.part(rig.peer.core).pid, signal.SIGSTOP)
    rig.load()
    seconds, incident = until_confirmed(rig, IncidentKind.STALL, since, LATE_S)
    ended = until_ended(rig, everyone, END_S)
    name = "stall, busy" if busy else "stall, idle"
    assert seconds <= 45, incident
    record(name, seconds, f"every process ended {ended:.1f} s later")


def test_a_killed_process_leaves_none(rig: Rig, record: Record, subtests: pytest.Subtests) -> None:
    """Engines differ in what processes they have: each of them in turn."""
    for part in ("frontend", *rig.peer.parts):
        with subtests.test(part=part):
            until(rig.serving, START_S, "an engine that serves")
            rig.rest()
            everyone = {p for pid in rig.processes() if (p := identify(pid)) is not None}
            os.kill(rig.part(part).pid, signal.SIGKILL)
            seconds = until_ended(rig, everyone, 3 * END_S)
            record(f"{part} killed", seconds, "until no process of it was left")


def test_a_leak_is_confirmed_and_cured(rig: Rig, record: Record) -> None:
    """In the process that runs the model."""
    served(rig, 150)
    part = rig.peer.runner
    switch = rig.folder / f"leak-{rig.peer.role(part)}"
    switch.write_text(str(LEAK_BYTES_S))
    since = time.time()
    leaking = rig.part(part)
    try:
        seconds, incident = until_confirmed(rig, IncidentKind.HOST_GROWTH, since, LATE_S)
        until(lambda: identify(leaking.pid) != leaking, LATE_S, f"an end: {rig.log()}")
    finally:
        switch.unlink()
    record(f"leak of 2 MiB/s in {part}", seconds)
    until(rig.serving, START_S, "an engine that serves")
    name = incident.name
    until(
        lambda: any(i.name == name and i.phase is IncidentPhase.RESOLVED for i in rig.incidents()),
        LATE_S, f"a cure: {rig.log()}",
    )  # fmt: skip
    record(f"cure of a leak in {part}", None)
