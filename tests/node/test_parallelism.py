"""``spec.parallelism`` in pods: real vLLM in the two pods of a group, with the real controller of
LeaderWorkerSets and the real CoreDNS, by which the worker finds its leader.

The operator renders all of it; a leak in the worker is cured by one restart of the group.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from plimsoll_operator.render.paths import CLAIM_DIR
from tests.conformance import table
from tests.lab import images
from tests.lab.dns import ClusterDNS
from tests.lab.errors import MissingError
from tests.lab.kube import Kube, conditions, eventually
from tests.lab.lab import Lab
from tests.lab.leader_worker_set import LeaderWorkerSets
from tests.lab.operator import Operator
from tests.node import supervised_engines
from tests.node.supervised import ended_incident, ready_since, restarts, step_time, unix, warm
from tests.node.supervised_engines import REAL
from tests.node.visits import Visits

NAME = "tiny"
LEADER, WORKER = f"{NAME}-lws-0", f"{NAME}-lws-0-1"
OWN = f"plimsoll.dev/service={NAME}"
REPEATED_S = 60.0
"""Seconds after the incident in which a second restart would be seen."""
RESOLVE = "import os, socket; print(socket.gethostbyname(os.environ['LWS_LEADER_ADDRESS']))"
APART = '''
"""vLLM's CPU backend takes ranks with one master port for ranks of one machine, and lets them
exchange tensors through /dev/shm. Pods have a /dev/shm each: they have to use the network."""


def load():
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
'''
ENTRY_POINTS = "[vllm.general_plugins]\nranks_apart = ranks_apart:load\n"
Pods = dict[str, dict[str, Any]]


@pytest.fixture
def dns(node: Lab) -> Iterator[None]:
    if not isinstance(node, Lab):
        pytest.skip("another cluster has a DNS of its own")
    try:
        made = ClusterDNS(node)
    except MissingError as missing:
        pytest.skip(str(missing))
    made.start()
    yield
    made.stop()


@pytest.fixture
def controller(node: Lab) -> Iterator[None]:
    try:
        made = LeaderWorkerSets(node)
    except MissingError as missing:
        pytest.skip(str(missing))
    made.start()
    yield
    made.stop()


def install_plugin(folder: Path) -> None:
    """A plugin of vLLM's beside the model, in a folder of PYTHONPATH."""
    metadata = folder / "ranks_apart-1.dist-info"
    metadata.mkdir(parents=True)
    (folder / "ranks_apart.py").write_text(APART)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ranks-apart\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def service(memory: dict[str, Any]) -> dict[str, Any]:
    """One replica of two ranks, each on a node of its own."""
    model = next(at for at, word in enumerate(REAL.command) if word.startswith("--served"))
    variables = REAL.environment | {
        "PLIMSOLL_CONFORMANCE_DIR": "/tmp",
        "PYTHONPATH": f"{CLAIM_DIR}/plugin",
        # The image has no C++ compiler, and what vLLM does with ranks alone would be compiled.
        "TORCHDYNAMO_DISABLE": "1",
    }
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "pvc://models/tiny"},
            "engine": {
                "type": "vllm",
                "image": images.PEER,
                # Less memory for KV blocks, and no warm-up.
                "args": [*REAL.command[model + 1 :], "--kv-cache-memory-bytes=134217728"],
                "env": [{"name": name, "value": value} for name, value in variables.items()],
                "resources": {"limits": {"memory": "4Gi"}},
                "startupTimeout": "15m",
            },
            "parallelism": {"tensor": 2},
            "memory": memory,
            "supervision": {
                "mode": "Recover", "ladder": ["Trim", "EngineRestart"],
                "drain": {"deadline": "10s"},
            },
        },
    }  # fmt: skip


def pods(kube: Kube) -> Pods:
    return {one["metadata"]["name"]: one for one in kube.list("pods", OWN)}


def uids(kube: Kube) -> dict[str, str]:
    return {name: one["metadata"]["uid"] for name, one in pods(kube).items()}


def ready(kube: Kube) -> bool:
    found = pods(kube)
    both = set(found) == {LEADER, WORKER} and all(map(ready_since, found.values()))
    said = {one["type"]: one["status"] for one in conditions(kube.get("plinf", NAME) or {})}
    return both and said.get("Ready") == "True"


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_a_group_of_vllm_forms_in_two_pods_and_a_leak_restarts_it_once(
    node: Lab,
    kube: Kube,
    operator: Callable[..., Operator],
    dns: None,
    controller: None,
    tmp_path: Path,
) -> None:
    engine = supervised_engines.vllm(node)
    supervised_engines.install(node, engine)
    install_plugin(tmp_path / "models" / "plugin")
    engine.prepare(kube, tmp_path)
    operator()
    begin = time.monotonic()
    kube.apply(service(engine.memory))
    eventually(partial(ready, kube), "the group is ready", engine.start_s)
    started_s = time.monotonic() - begin
    print(f"ready after {started_s:.0f} s")
    before = pods(kube)
    leader_ip = before[LEADER]["status"]["podIP"]
    resolved = kube("exec", WORKER, "-c", "engine", "--", "python", "-c", RESOLVE)
    assert resolved.strip() == leader_ip, "the worker finds its leader by name"
    for name, pod in before.items():
        eventually(partial(warm, pod), f"a baseline of {name}", engine.start_s)

    address = (kube.get("service", NAME) or {})["spec"]["clusterIP"]
    url = f"http://{address}"
    with Visits(partial(engine.ask, url)) as healthy:
        eventually(lambda: healthy.answered >= 40, "completions", engine.story_s)
    assert healthy.failures == []
    print(f"{healthy.answered} requests answered")
    since = time.time()
    kube("exec", WORKER, "-c", "engine", "--", "sh", "-c", engine.leak)
    incident = eventually(lambda: ended_incident(kube), "the incident ends", 2 * engine.story_s)
    print(json.dumps(incident, indent=1))
    assert incident is not None
    eventually(partial(ready, kube), "the group is ready again", engine.start_s)
    after = pods(kube)
    with Visits(partial(engine.ask, url)) as cured:
        eventually(lambda: cured.answered >= 40, "completions again", engine.story_s)
    assert cured.failures == []
    confirmed = unix(incident["status"]["confirmedAt"]) - since
    restarted = unix(step_time(incident, "EngineRestart"))
    back = max(unix(ready_since(one)) for one in after.values()) - restarted
    told = (
        f"to a group that is ready; leak in the worker confirmed after {confirmed:.0f} s, from"
        f" SIGTERM to a ready group {back:.0f} s; {healthy.answered} and {cured.answered} requests"
        " before and after, 0 failed"
    )
    print(told)

    the_incident_is_the_groups(incident)
    assert not set(uids(kube).values()) & {one["metadata"]["uid"] for one in before.values()}
    time.sleep(REPEATED_S)
    assert uids(kube) == {name: one["metadata"]["uid"] for name, one in after.items()}, "once"
    for pod in pods(kube).values():
        assert set(restarts(pod).values()) == {0}
    assert len(kube.list("leakincidents")) == 1, "one for the group"
    case = "parallelism: tensor 2 in two pods, as the operator renders it"
    table.write(table.Ran(REAL.type.value, REAL.version, case, round(started_s, 1), told))


def the_incident_is_the_groups(incident: dict[str, Any]) -> None:
    spec, found = incident["spec"], incident["status"]
    assert re.fullmatch("[0-9a-f]{40}", spec["podGroup"]), "the group's key"
    assert (spec["kind"], spec["pod"]) == ("HostGrowth", LEADER)
    assert found["attribution"]["pod"] == WORKER
    assert (found["phase"], found["outcome"]) == ("Resolved", "EngineRestart")
    names = [one["step"] for one in found["timeline"]]
    assert names.index("GroupRestart") < names.index("Drain") < names.index("EngineRestart")
