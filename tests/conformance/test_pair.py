"""A real prefill and a real decode engine with NIXL between them, each with its supervisor.

Nothing but time and traffic is between the two: the prefill engine holds the blocks of requests
that nobody has read yet, and the decode engine waits for one that is stopped.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.roles import PodRole
from plimsoll_sidecar.act.partner import Partners
from plimsoll_sidecar.act.readiness import is_ready
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.signals.process_table import identify
from tests.conformance import table
from tests.conformance.peers import NIXL, PEERS
from tests.conformance.rig import START_S, Rig, until
from tests.conformance.watching import until_confirmed
from tests.ports import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]

PEER = PEERS[NIXL]
REQUESTS, TOKENS = 12, 3000
HELD = 0.75 * REQUESTS * TOKENS * 2048 / (1 << 30)
"""Of the pool of 1 GiB; a token of the checkpoint has 2 KiB."""
HOLD_S = 20.0
"""Twice the time after which blocks of an idle engine count as lost, and less than the lease."""
LEASE_DURATION_S = 90.0
"""Longer than all prefills and :data:`HOLD_S` take on a busy machine."""
HEALTHY_S = float(os.environ.get("PLIMSOLL_PAIR_S", "120"))
"""Time under load in which nothing may be suspected."""
CLIENTS = 2
STOPPED_S = 60.0
"""Longer than a stall takes to be confirmed."""
LEARNING_S = 100.0
"""Service under load before a leak: the warm-up of the memory policy, and a horizon of growth."""
LEAK_BYTES_S = 2 << 20
CONFIRMED_S, CURED_S = 300.0, 600.0
"""Longest waits; an idle machine takes 50 and 150 s."""
ASKS_FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Rig]]:
    """The prefill engine and the decode engine."""
    if not PEER.ready:
        pytest.skip(f"{PEER.name} is not installed: make engines")
    rigs: list[Rig] = []
    try:
        # One after another: a start takes all that two cores have.
        for role in ("kv_producer", "kv_consumer"):
            rigs.append(rig := started(tmp_path_factory.mktemp(role), role))
            try:
                until(rig.serving, START_S, "an engine that serves")
            except AssertionError as error:
                error.add_note(rig.log("engine"))
                raise
        yield rigs[0], rigs[1]
    finally:
        for rig in rigs:
            rig.end()


def started(folder: Path, role: str) -> Rig:
    config = {
        "kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_DURATION_S},
    }  # fmt: skip
    transports = {
        "UCX_TLS": "tcp,self,sysv,posix",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    rig = Rig(
        PEER, folder, arguments=(f"--kv-transfer-config={json.dumps(config)}",), more=transports
    )
    rig.start()
    return rig


def complete(rig: Rig, number: int, tokens: int, params: object) -> dict[str, Any]:
    body = {
        "model": "tiny", "prompt": [100 + number] * TOKENS, "max_tokens": tokens,
        "kv_transfer_params": params,
    }  # fmt: skip
    with urllib3.PoolManager(retries=False) as http:
        answer = http.request("POST", f"{rig.url}/v1/completions", json=body, timeout=120)
    assert answer.status == 200, answer.data
    return dict(answer.json())


def prefill(rig: Rig, number: int) -> object:
    return complete(rig, number, 1, ASKS_FOR_PREFILL)["kv_transfer_params"]


def held(rig: Rig) -> float:
    found = rig.status().load.kv_usage_ratio
    assert found is not None
    return found


def record(case: str, seconds: float | None, told: str) -> None:
    table.write(table.Ran(PEER.type.value, PEER.version, case, seconds, told))


def test_a_drain_waits_for_blocks_that_the_decode_engine_has_yet_to_read(
    pair: tuple[Rig, Rig],
) -> None:
    source, sink = pair
    params = [prefill(source, number) for number in range(REQUESTS)]
    until(lambda: held(source) > HELD, 60, "held blocks")
    time.sleep(HOLD_S)
    assert held(source) > HELD, "nobody has read them"
    assert source.status().load.kv_lease_s == 480.0
    assert source.incidents() == [], source.log()

    answered: list[dict[str, Any]] = []
    reader = threading.Timer(2.0, lambda: answered.append(complete(sink, 0, 4, params[0])))
    reader.start()
    begin = time.monotonic()
    command = Command(
        verb=Verb.DRAIN, operation_id="drain", incident="person",
        epoch=source.status().epoch, deadline_s=2 * LEASE_DURATION_S,
    )  # fmt: skip
    result = source.adapter.drain(command)
    seconds = time.monotonic() - begin
    reader.join()
    assert (result.outcome, result.message) == (Outcome.SUCCEEDED, "idle")
    assert held(source) < HELD / 10
    assert answered[0]["usage"]["completion_tokens"] == 4, (
        "its blocks were there until they were read"
    )
    source.adapter.resume(command.epoch)
    told = f"{HELD:.1%} of the pool or more held for {HOLD_S:.0f} s: no incident; a drain waited"
    record("pair: blocks held for a decode engine", round(seconds, 1), told)


class Traffic:
    """Clients of both engines, each with a small proxy; :meth:`end` waits for their requests.

    The proxy sends to pods that are ready alone, as a Service does. Without a prefill engine, the
    decode engine computes the prompt itself; without a decode engine, the request waits.
    """

    def __init__(self, pair: tuple[Rig, Rig]) -> None:
        self.pair = pair
        self.through_both, self.by_decode, self.longest_s = 0, 0, 0.0
        self.failures: list[Exception] = []
        self._ending = threading.Event()
        self._clients = [
            threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)
        ]
        for client in self._clients:
            client.start()

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for client in self._clients:
            client.join(START_S + 120)

    @property
    def answers(self) -> int:
        return self.through_both + self.by_decode

    def _client(self, number: int) -> None:
        while not self._ending.is_set():
            begin = time.monotonic()
            try:
                self._ask(number)
            except (AssertionError, urllib3.exceptions.HTTPError) as error:
                self.failures.append(error)
            self.longest_s = max(self.longest_s, time.monotonic() - begin)

    def _ask(self, number: int) -> None:
        source, sink = self.pair
        while True:
            until(lambda: in_service(sink), START_S, "a decode engine")
            params = prefill(source, number) if in_service(source) else None
            time.sleep(1.0)  # the blocks are held meanwhile
            if in_service(sink):
                break
        complete(sink, number, 8, params)
        if params is None:
            self.by_decode += 1
        else:
            self.through_both += 1


def in_service(rig: Rig) -> bool:
    """Whether a Service would send requests to this engine."""
    if not is_ready(str(rig.folder / "state")):
        return False
    with urllib3.PoolManager(retries=False) as http:
        try:
            return bool(http.request("GET", f"{rig.url}/health", timeout=10).status == 200)
        except urllib3.exceptions.HTTPError:
            return False


def test_a_healthy_pair_under_load_is_not_suspected(pair: tuple[Rig, Rig]) -> None:
    source, sink = pair
    most, suspected = 0.0, []
    with Traffic(pair) as traffic:
        begin = time.monotonic()
        while time.monotonic() - begin < HEALTHY_S:
            most = max(most, held(source))
            suspected += [*source.incidents(), *sink.incidents()]
            time.sleep(1.0)
    assert (traffic.failures, suspected) == ([], []), source.log() + sink.log()
    assert most > 0, "leases were in flight"
    assert traffic.through_both > 2 * CLIENTS
    told = (
        f"{traffic.through_both} requests through both in {HEALTHY_S:.0f} s, 0 failed; at most"
        f" {most:.2%} of the pool held: 0 suspicions"
    )
    record("pair: healthy under load", None, told)


@pytest.mark.parametrize("role", [PodRole.PREFILL, PodRole.DECODE])
def test_a_leak_on_one_side_is_cured_and_no_request_fails(
    pair: tuple[Rig, Rig], role: PodRole
) -> None:
    rig, other = pair if role is PodRole.PREFILL else pair[::-1]
    part = rig.peer.runner
    switch = rig.folder / f"leak-{rig.peer.role(part)}"
    before, kept = time.time(), other.part("core")
    with Traffic(pair) as traffic:
        time.sleep(LEARNING_S)
        leaking, since = rig.part(part), time.time()
        switch.write_text(str(LEAK_BYTES_S))
        try:
            seconds, incident = until_confirmed(rig, IncidentKind.HOST_GROWTH, since, CONFIRMED_S)
            until(lambda: identify(leaking.pid) != leaking, CURED_S, f"an end: {rig.log()}")
        finally:
            switch.unlink()
        begin = time.monotonic()
        until(lambda: in_service(rig), START_S, "a new engine")
        started_s = time.monotonic() - begin
        served = traffic.through_both
        until(lambda: traffic.through_both > served + CLIENTS, CURED_S, "requests through both")
        until(
            lambda: any(
                one.name == incident.name and one.phase is IncidentPhase.RESOLVED
                for one in rig.incidents()
            ),
            CURED_S, f"a cure: {rig.log()}",
        )  # fmt: skip
    assert traffic.failures == [], rig.log() + other.log()
    assert other.part("core") == kept, "the other engine runs on"
    assert [one for one in other.incidents() if one.opened_at >= before] == [], other.log()
    told = (
        f"to Confirmed, then ready {started_s:.0f} s after the end of the engine;"
        f" {traffic.through_both} requests through both and {traffic.by_decode} by decode alone,"
        f" 0 failed, the longest took {traffic.longest_s:.0f} s"
    )
    record(f"pair: leak of 2 MiB/s in {role.lower()}, cured", round(seconds, 1), told)


@pytest.mark.parametrize("role", [PodRole.PREFILL, PodRole.DECODE])
def test_a_stall_is_named_on_its_side(pair: tuple[Rig, Rig], role: PodRole) -> None:
    rig, other = pair if role is PodRole.PREFILL else pair[::-1]
    for one in pair:
        until(lambda one=one: in_service(one), START_S, "an engine that serves")  # type: ignore[misc]
    assert complete(pair[1], 0, 4, prefill(pair[0], 0))["usage"]["completion_tokens"] == 4
    kept, stalled, since = other.part("core"), rig.part("core"), time.time()
    os.kill(stalled.pid, signal.SIGSTOP)
    rig.load()
    try:
        seconds, _ = until_confirmed(rig, IncidentKind.STALL, since, CONFIRMED_S)
    finally:
        rig.rest()
    # Its frontend is ready and healthy until the restart.
    until(lambda: identify(stalled.pid) != stalled, CURED_S, f"an end: {rig.log()}")
    until(lambda: in_service(rig), START_S, "a new engine")
    assert [one for one in other.incidents() if one.opened_at >= since] == [], other.log()
    assert other.part("core") == kept, "the other engine runs on"
    told = f"named on the {role.lower()} engine; 0 incidents of the other one, which ran on"
    record(f"pair: {role.lower()} stalls", round(seconds, 1), told)


@pytest.mark.parametrize("role", [PodRole.PREFILL, PodRole.DECODE])
def test_a_restarted_engine_serves_together_with_its_partner(
    pair: tuple[Rig, Rig], role: PodRole
) -> None:
    """What the table of versions says of this one: the other engine connects to the new one."""
    rig, other = pair if role is PodRole.PREFILL else pair[::-1]
    partner = Partners(rig.endpoint, role, lambda: {"other": other.url})
    assert partner.send_test_requests().outcome is Outcome.SUCCEEDED
    assert (rig.adapter.can_test_partners, rig.adapter.restart_blocker) == (True, None)
    kept, before = other.part("core"), rig.status().epoch
    command = Command(
        verb=Verb.RESTART_ENGINE, operation_id="restart", incident="person", epoch=before
    )
    assert rig.adapter.restart_engine(command).outcome is Outcome.SUCCEEDED
    begin = time.monotonic()
    until(lambda: rig.serving() and rig.status().epoch != before, START_S, "a new engine")
    started_s = time.monotonic() - begin
    met = partner.send_test_requests()
    assert met.outcome is Outcome.SUCCEEDED, met.message + other.log("engine")
    assert other.part("core") == kept, "the other engine runs on"
    assert complete(pair[1], 0, 4, prefill(pair[0], 0))["usage"]["completion_tokens"] == 4
    told = f"to a new engine; a request through both at the first try: {met.message}"
    record(f"pair: {role.lower()} restarts alone", round(started_s, 1), told)


def test_a_decode_engine_that_waits_for_a_stopped_prefill_engine_is_no_stall(
    pair: tuple[Rig, Rig],
) -> None:
    source, sink = pair
    begun = time.time()
    # Requests of engines that have not yet met fail: NIXL gives up its first contact after a while.
    complete(sink, 0, 4, prefill(source, 0))
    params = [prefill(source, number) for number in range(3)]
    stopped = sorted(source.processes() - {source.part("frontend").pid})
    answered: list[dict[str, Any]] = []
    clients = [
        threading.Thread(target=lambda one=one: answered.append(complete(sink, 0, 4, one)))
        for one in params
    ]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        for client in clients:
            client.start()
        until(lambda: sink.status().load.deferred == 3, 60, "requests that wait")
        time.sleep(STOPPED_S)
        load = sink.status().load
        assert (load.running, load.deferred, answered) == (0, 3, [])
        assert [one for one in sink.incidents() if one.opened_at >= begun] == [], sink.log()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    for client in clients:
        client.join(120)
    assert len(answered) == 3
    told = (
        f"3 requests waited {STOPPED_S:.0f} s for it: no stall of the decode engine, all answered"
    )
    record("pair: a prefill engine that stops", None, told)
