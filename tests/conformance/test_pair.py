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

from plimsoll_api.roles import PodRole
from plimsoll_sidecar.act.partner import Partners
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from tests.conformance import table
from tests.conformance.peers import NIXL, PEERS
from tests.conformance.rig import START_S, Rig, free_port, until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]

PEER = PEERS[NIXL]
REQUESTS, TOKENS = 12, 3000
HELD = 0.75 * REQUESTS * TOKENS * 2048 / (1 << 30)
"""Of the pool of 1 GiB; a token of the checkpoint has 2 KiB."""
HOLD_S = 20.0
"""Twice the time after which blocks of an idle engine count as lost, and less than the lease."""
LEASE_S = 90.0
"""Longer than all prefills and :data:`HOLD_S` take on a busy machine."""
HEALTHY_S = float(os.environ.get("PLIMSOLL_PAIR_S", "120"))
"""Time under load in which nothing may be suspected."""
CLIENTS = 2
STOPPED_S = 60.0
"""Longer than a stall takes to be confirmed."""
ASKS_FOR_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Rig]]:
    """The prefill engine and the decode engine."""
    if not PEER.ready:
        pytest.skip(f"{PEER.name} is not installed: make engines")
    rigs = [started(tmp_path_factory.mktemp(role), role) for role in ("kv_producer", "kv_consumer")]
    try:
        for rig in rigs:
            until(rig.serving, START_S, f"an engine that serves: {rig.log('engine')}")
        yield rigs[0], rigs[1]
    finally:
        for rig in rigs:
            rig.end()


def started(folder: Path, role: str) -> Rig:
    config = {
        "kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
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
        epoch=source.status().epoch, deadline_s=2 * LEASE_S,
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


def test_a_healthy_pair_under_load_is_not_suspected(pair: tuple[Rig, Rig]) -> None:
    """Each client is a small proxy: it asks the prefill engine, then the decode engine."""
    source, sink = pair
    ending, answers, failures = threading.Event(), [], []

    def client(number: int) -> None:
        while not ending.is_set():
            try:
                params = prefill(source, number)
                ending.wait(1.0)  # the blocks are held meanwhile
                answers.append(complete(sink, number, 8, params))
            except (AssertionError, urllib3.exceptions.HTTPError) as error:
                failures.append(error)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    most, suspected = 0.0, []
    for one in clients:
        one.start()
    begin = time.monotonic()
    while time.monotonic() - begin < HEALTHY_S:
        most = max(most, held(source))
        suspected += [*source.incidents(), *sink.incidents()]
        time.sleep(1.0)
    ending.set()
    for one in clients:
        one.join(120)
    assert (failures, suspected) == ([], []), source.log() + sink.log()
    assert most > 0, "leases were in flight"
    assert len(answers) > 2 * CLIENTS
    told = (
        f"{len(answers)} requests through both in {HEALTHY_S:.0f} s, 0 failed; at most"
        f" {most:.2%} of the pool held: 0 suspicions"
    )
    record("pair: healthy under load", None, told)


@pytest.mark.parametrize("role", [PodRole.PREFILL, PodRole.DECODE])
def test_a_restarted_engine_serves_together_with_its_partner(
    pair: tuple[Rig, Rig], role: PodRole
) -> None:
    """What the table of versions says of this one: the other engine connects to the new one."""
    rig, other = pair if role is PodRole.PREFILL else pair[::-1]
    partner = Partners(rig.endpoint, role, lambda: {"other": other.url})
    assert partner.meet().outcome is Outcome.SUCCEEDED
    assert (rig.adapter.can_meet_partner, rig.adapter.restart_blocker) == (True, None)
    kept, before = other.part("core"), rig.status().epoch
    command = Command(
        verb=Verb.RESTART_ENGINE, operation_id="restart", incident="person", epoch=before
    )
    assert rig.adapter.restart_engine(command).outcome is Outcome.SUCCEEDED
    begin = time.monotonic()
    until(lambda: rig.serving() and rig.status().epoch != before, START_S, "a new engine")
    started_s = time.monotonic() - begin
    met = partner.meet()
    assert met.outcome is Outcome.SUCCEEDED, met.message + other.log("engine")
    assert other.part("core") == kept, "the other engine runs on"
    assert complete(pair[1], 0, 4, prefill(pair[0], 0))["usage"]["completion_tokens"] == 4
    told = f"to a new engine; a request through both at the first try: {met.message}"
    record(f"pair: {role.lower()} restarts alone", round(started_s, 1), told)


def test_a_decode_engine_that_waits_for_a_stopped_prefill_engine_is_no_stall(
    pair: tuple[Rig, Rig],
) -> None:
    source, sink = pair
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
        assert sink.incidents() == [], sink.log()
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
