"""A real vLLM on two nodes, started by the commands that the operator renders for
``spec.parallelism``: the leader's and a worker's, each with its supervisor.

Both run on this machine, as two groups of processes and not as pods: the leader's name is its
loopback address. ``tests/node`` has pods and their controller, with a hand-written LeaderWorkerSet.

Pipeline stages are not here: on CPUs, two stages of vLLM 0.32 form the engine, but their first
request fails with a KeyError in vLLM's own scheduler.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from plimsoll_api.admin import EngineState
from plimsoll_api.supervision import Mode
from plimsoll_operator.plans.service import parse_service
from plimsoll_operator.render import Images, render_objects
from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine
from tests.conformance import table
from tests.conformance.peers import PEERS
from tests.conformance.rig import START_S, Rig, until
from tests.ports import free_port

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3000)]

PEER = replace(PEERS["vllm-0.32.0"], parts={"worker": "VLLM::Worker"})
"""A worker's node has no EngineCore."""
OBSERVED_S = 60.0
"""Longer than a supervisor takes to suspect an engine that does not answer."""
MORE = ["--kv-cache-memory-bytes=134217728"]
"""Less memory, and no warm-up."""
ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # What vLLM does with ranks alone would be compiled.
    "TORCHDYNAMO_DISABLE": "1",
}


def render_arguments(size: str, worker: bool, master_port: int) -> tuple[str, ...]:
    """The arguments after the port, as the container of the leader or the worker gets them.

    ``size`` is the field of ``spec.parallelism`` that is 2.
    """
    wanted = parse_service(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "tiny", "namespace": "ml", "uid": "u", "generation": 1},
            "spec": {
                "model": {"uri": "file:///m"},
                "engine": {"type": "vllm", "image": "e:1", "args": MORE},
                "parallelism": {size: 2},
            },
        }
    )
    made = {one["kind"]: one for one in render_objects(wanted, Images("e:1", "s:1"))}
    group: dict[str, Any] = made["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    template = group["workerTemplate" if worker else "leaderTemplate"]
    (engine,) = template["spec"]["containers"]
    command: list[str] = engine["command"]
    assert command[:4] == ["vllm", "serve", "/m", "--served-model-name=tiny"]
    port = next(at for at, word in enumerate(command) if word.startswith("--port="))
    # The kubelet expands these, and each machine of a group has the port for itself.
    variables = {
        "LWS_LEADER_ADDRESS": "127.0.0.1",
        "LWS_GROUP_SIZE": str(group["size"]),
        "LWS_WORKER_INDEX": str(int(worker)),
    }
    words = [
        re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)
        for word in command[port + 1 :]
    ]
    return tuple(re.sub(r"^(--master-port)=.*", rf"\1={master_port}", word) for word in words)


@pytest.fixture(scope="module", params=["tensor", "data"])
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Rig, Rig]]:
    """The size that is 2, the leader and the worker."""
    if not PEER.ready:
        pytest.skip(f"{PEER.name} is not installed: make engines")
    rigs, master_port = [], free_port()
    for worker in (False, True):
        folder = tmp_path_factory.mktemp("worker" if worker else "leader")
        rig = Rig(
            PEER,
            folder,
            arguments=render_arguments(request.param, worker, master_port),
            more=ENVIRONMENT,
        )
        rig.endpoint = msgspec.structs.replace(rig.endpoint, serves=not worker)
        rig.adapter = ExternalEngine(rig.endpoint)
        rigs.append(rig)
    try:
        rigs[0].start()
        rigs[1].start_engine()
        yield request.param, rigs[0], rigs[1]
    finally:
        for rig in rigs:
            rig.end()


def test_two_nodes_are_one_engine_and_neither_is_suspected(
    group: tuple[str, Rig, Rig],
) -> None:
    size, leader, worker = group
    begin = time.monotonic()
    try:
        until(leader.serving, START_S, "a leader that serves")
    except AssertionError as error:
        error.add_note(leader.log("engine") + worker.log("engine"))
        raise
    started_s = time.monotonic() - begin
    # A worker starts until its leader serves: without a cluster, its supervisor cannot ask that.
    # It observes, as the leader acts for the group.
    worker.start_supervisor(Mode.OBSERVE)
    answers = 0
    begin = time.monotonic()
    while time.monotonic() - begin < OBSERVED_S:
        assert leader.ask() == 200, leader.log("engine")
        answers += 1
        # The worker's node has no port for health or metrics, and its supervisor asks for none.
        seen = worker.status()
        assert seen.state is EngineState.SERVING
        assert worker.part("worker").pid in {one.pid for one in seen.processes}
        assert [*leader.incidents(), *worker.incidents()] == [], leader.log() + worker.log()
        time.sleep(1.0)
    assert leader.part("worker") != worker.part("worker"), "a rank on each node"
    told = (
        f"from the start to a leader that serves; {answers} requests in {OBSERVED_S:.0f} s, 0"
        " failed, 0 incidents of either supervisor; two groups of processes, not pods"
    )
    record(f"parallelism: {size} 2 on two nodes, as the operator renders it", started_s, told)


def record(case: str, seconds: float, told: str) -> None:
    table.write(table.Ran(PEER.type.value, PEER.version, case, round(seconds, 1), told))
