"""What holds KV blocks of a real vLLM for nobody: prefills that never come, sessions left open.

An engine of its own, since neither gives the blocks back before it ends.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator

import pytest
import urllib3

from plimsoll_api.engines import EngineType
from plimsoll_api.incidents import IncidentKind
from tests.conformance import table
from tests.conformance.conftest import Started
from tests.conformance.peers import PEERS
from tests.conformance.rig import START_S, Rig, until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]

CONNECTOR = {
    "kv_connector": "LostPrefill",
    "kv_connector_module_path": "plimsoll_lost_prefill",
    "kv_role": "kv_both",
}
REQUESTS, TOKENS = 8, 3000
LEAVES_S = 5.0
QUIET_S = 60.0
"""Longer than a stall takes to be confirmed."""
HELD = 0.75 * REQUESTS * TOKENS * 2048 / (1 << 30)
"""Of the pool of 1 GiB; a token of the checkpoint has 2 KiB."""


@pytest.fixture(
    scope="module", params=[name for name, peer in PEERS.items() if peer.type is EngineType.VLLM]
)
def rig(request: pytest.FixtureRequest, started: Started) -> Iterator[Rig]:
    peer = PEERS[request.param]
    command = (*peer.command, f"--kv-transfer-config={json.dumps(CONNECTOR)}")
    with started(dataclasses.replace(peer, command=command)) as one:
        until(one.serving, START_S, f"an engine that serves: {one.log('engine')}")
        yield one


def usage(rig: Rig) -> float:
    """The part of the KV pool that requests hold."""
    found = rig.status().load.kv_usage_ratio
    assert found is not None
    return found


def leave(rig: Rig, number: int, **params: object) -> None:
    """A client that goes away after a while."""
    body = {"model": "tiny", "prompt": [100 + number] * TOKENS, "max_tokens": 4, **params}
    with urllib3.PoolManager(retries=False) as http, pytest.raises(urllib3.exceptions.TimeoutError):
        http.request("POST", f"{rig.url}/v1/completions", json=body, timeout=LEAVES_S)


def scraped_since(rig: Rig, begun: float) -> bool:
    """Whether the engine's gauges were read after ``begun`` (monotonic seconds)."""
    age_s = rig.status().load_age_s
    return age_s is not None and age_s < time.monotonic() - begun


def at_rest(rig: Rig) -> None:
    until(lambda: rig.status().load.inflight == 0, 60, "rest")
    begun = time.monotonic()
    until(lambda: scraped_since(rig, begun), 60, "gauges of after that")


def capacity_loss(rig: Rig) -> bool:
    return any(i.kind is IncidentKind.CAPACITY_LOSS and i.confirmed_at for i in rig.incidents())


def record(rig: Rig, case: str, seconds: float | None, told: str) -> None:
    taken = None if seconds is None else round(seconds, 1)
    table.write(table.Ran(rig.peer.type.value, rig.peer.version, case, taken, told))


def test_blocks_wait_for_a_prefill_that_never_comes(rig: Rig) -> None:
    assert rig.ask(prompt=[7] * TOKENS) == 200
    at_rest(rig)
    before = usage(rig)
    assert before < HELD / 10, "a request that ended holds nothing"
    begin = time.monotonic()
    clients = [
        threading.Thread(
            target=leave, args=(rig, number), kwargs={"kv_transfer_params": {"lost": True}}
        )
        for number in range(REQUESTS)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    until(lambda: usage(rig) - before > HELD, 60, f"held blocks: {rig.log('engine')}")
    at_rest(rig)
    held = usage(rig) - before
    assert held > HELD, "their clients have left"
    assert (rig.status().load.running, rig.ask()) == (0, 200)
    until(lambda: capacity_loss(rig), 120, f"a capacity loss: {rig.log()}")
    seconds = time.monotonic() - begin
    told = f"{held:.1%} of the pool after {REQUESTS} clients left, confirmed as CapacityLoss"
    record(rig, "fault: prefills that never come hold blocks", seconds, told)


def test_sessions_that_nobody_closes_hold_blocks(rig: Rig) -> None:
    assert rig.ask() == 200
    at_rest(rig)
    before = usage(rig)
    (rig.folder / "sessions").write_text(str(REQUESTS))
    # The frontend looks for the file every second, and the gauges follow a step.
    until(
        lambda: rig.ask() == 200 and usage(rig) - before > HELD,
        120,
        f"sessions: {rig.log('engine')}",
    )
    # vLLM counts them as waiting: for their client, not for the engine.
    until(lambda: rig.status().load.running == 0, 60, "rest")
    time.sleep(QUIET_S)
    held = usage(rig) - before
    assert held > HELD
    load = rig.status().load
    assert (load.running, load.waiting, rig.ask()) == (0, REQUESTS, 200)
    assert not any(incident.kind is IncidentKind.STALL for incident in rig.incidents()), rig.log()
    told = f"{held:.1%} of the pool for {REQUESTS} sessions"
    record(rig, "fault: sessions left open hold blocks", None, told)
