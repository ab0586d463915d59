"""A SupervisionPolicy over a LeaderWorkerSet, with its real controller: two groups of two pods.

A leak in a worker is its group's: one incident, the leader's slot, one restart of the whole group,
while the other group serves.
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

from tests.conformance import table
from tests.lab.errors import MissingError
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.leader_worker_set import LeaderWorkerSets
from tests.lab.operator import Operator
from tests.node import supervised_engines
from tests.node.supervised import (
    AFTER,
    LISTED_S,
    POLICY,
    counts,
    ended_incident,
    held_slots,
    injects,
    older_pod,
    policy,
    ready_since,
    restarts,
    status,
    step_time,
    supervised,
    unix,
    warm,
)
from tests.node.supervised_engines import CONTAINER, MASTER_PORT, PORT, WORKERS_PORT, Engine
from tests.node.visits import Visits

NAME = "llm"
TEAM = {"team": "inference"}
PREFIX = "leaderworkerset.sigs.k8s.io"
OF_SET = f"{PREFIX}/name={NAME}"
GROUPS = {"0": {"llm-0", "llm-0-1"}, "1": {"llm-1", "llm-1-1"}}
LEADER, WORKER = "llm-0", "llm-0-1"
RECREATE = ("RecreateGroupOnPodRestart", ("Trim", "EngineRestart"), "EngineRestart")
Pods = dict[str, dict[str, Any]]


@pytest.fixture
def controller(node: Lab) -> Iterator[None]:
    if not isinstance(node, Lab):
        pytest.skip("the controller of LeaderWorkerSets runs beside the lab's own API server")
    try:
        made = LeaderWorkerSets(node)
    except MissingError as missing:
        pytest.skip(str(missing))
    made.start()
    yield
    made.stop()


def workload(engine: Engine, restart_policy: str) -> list[dict[str, Any]]:
    """A LeaderWorkerSet that consents, its leaders' Service, and one with each leader's name."""
    metadata = {"labels": TEAM, "annotations": {"plimsoll.dev/allow-group-restarts": "true"}}
    leader, worker = (
        engine.pod_spec | {"containers": [one]} for one in engine.pair(engine.container)
    )
    group = {
        "size": 2,
        "restartPolicy": restart_policy,
        "leaderTemplate": {"metadata": metadata, "spec": leader},
        "workerTemplate": {"metadata": metadata, "spec": worker},
    }
    leaders = {f"{PREFIX}/name": NAME, f"{PREFIX}/worker-index": "0"}
    of_groups = [
        {
            "selector": leaders | {f"{PREFIX}/group-index": index},
            "ports": [{"port": WORKERS_PORT, "targetPort": MASTER_PORT}],
            "publishNotReadyAddresses": True,  # a leader is ready when its workers have joined
        }
        for index in GROUPS
    ]
    return [
        _service("leaders", {"selector": leaders, "ports": [{"port": 80, "targetPort": PORT}]}),
        *(_service(f"{NAME}-{index}", spec) for index, spec in enumerate(of_groups)),
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": NAME},
            "spec": {"replicas": 2, "leaderWorkerTemplate": group},
        },
    ]


def _service(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def pods(kube: Kube) -> Pods:
    return {one["metadata"]["name"]: one for one in kube.list("pods", OF_SET)}


def ready(kube: Kube) -> bool:
    found = pods(kube)
    return set(found) == GROUPS["0"] | GROUPS["1"] and all(map(ready_since, found.values()))


def uids(found: Pods, group: str) -> dict[str, str]:
    return {name: found[name]["metadata"]["uid"] for name in GROUPS[group]}


@pytest.mark.parametrize(
    ("make_engine", "restart_policy", "ladder", "outcome"),
    [
        pytest.param(supervised_engines.standin, *RECREATE, id="standin-recreate"),
        pytest.param(
            supervised_engines.vllm, *RECREATE, id="vllm-recreate",
            marks=[pytest.mark.long, pytest.mark.timeout(5400)],
        ),
        # The leader's restart alone does not return the worker's memory: its pod's replacement
        # recreates the group under every restart policy.
        pytest.param(
            supervised_engines.standin, "None", ("EngineRestart", "PodReplace"), "PodReplaced",
            id="standin-none", marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_a_leak_in_a_worker_restarts_its_group_while_the_other_serves(
    node: Lab,
    kube: Kube,
    operator: Callable[..., Operator],
    webhook: tuple[str, ...],
    controller: None,
    tmp_path: Path,
    make_engine: Callable[[Lab], Engine],
    restart_policy: str,
    ladder: tuple[str, ...],
    outcome: str,
) -> None:
    engine = make_engine(node)
    supervised_engines.install(node, engine)
    engine.prepare(kube, tmp_path)
    operator(*webhook)
    kube.apply(policy(TEAM, engine.memory, ladder=list(ladder)))
    eventually(lambda: injects(kube, older_pod(node, TEAM)), "pods are injected", LISTED_S)
    kube.apply(*workload(engine, restart_policy))
    eventually(partial(ready, kube), "both groups are ready", engine.start_s)
    eventually(lambda: counts(kube) == (4, 4, 0, 0), "all pods are supervised", LISTED_S)
    before = pods(kube)
    assert all(map(supervised, before.values()))
    for name, pod in before.items():
        eventually(partial(warm, pod), f"a baseline of {name}", engine.start_s)

    address = (kube.get("service", "leaders") or {})["spec"]["clusterIP"]
    with Visits(partial(engine.ask, f"http://{address}")) as visits:
        since = time.time()
        kube("exec", WORKER, "-c", CONTAINER, "--", "sh", "-c", engine.leak)
        eventually(lambda: LEADER in held_slots(kube), "the leader has the slot", engine.story_s)
        incident = eventually(lambda: ended_incident(kube), "the incident ends", 2 * engine.story_s)
        eventually(partial(ready, kube), "both groups are ready again", engine.start_s)
        goal = visits.answered + AFTER
        eventually(lambda: visits.answered >= goal, "answers after the incident", engine.story_s)
    assert incident is not None
    print(json.dumps(incident, indent=1))
    confirmed = unix(incident["status"]["confirmedAt"]) - since
    after = pods(kube)
    restarted = unix(step_time(incident, "EngineRestart"))
    back = max(unix(ready_since(after[name])) for name in GROUPS["0"]) - restarted
    print(
        f"confirmed after {confirmed:.0f} s; from SIGTERM to a ready group {back:.0f} s;"
        f" {visits.answered} requests, {len(visits.failures)} failed"
    )
    assert visits.failures == []

    the_incident_is_the_groups(incident, outcome)
    assert len(kube.list("leakincidents")) == 1, "one for the group"
    assert not set(uids(after, "0").values()) & set(uids(before, "0").values()), "all anew"
    assert uids(after, "1") == uids(before, "1")
    for name in GROUPS["1"]:
        assert restarts(after[name]) == {CONTAINER: 0, "supervisor": 0}
        assert ready_since(after[name]) == ready_since(before[name]) != ""
    eventually(lambda: not held_slots(kube), "the slot is free again", LISTED_S)
    eventually(lambda: status(kube).get("openIncidents") == 0, "it is over", LISTED_S)
    eventually(lambda: counts(kube) == (4, 4, 0, 0), "the new pods are supervised", LISTED_S)
    if engine.peer is not None:
        case = "policy: leak in a worker of one of two LeaderWorkerSet groups, cured"
        told = (
            f"to Confirmed, from SIGTERM to a ready group {back:.0f} s,"
            f" {visits.answered} requests through the Service, 0 failed"
        )
        peer = engine.peer
        table.write(table.Ran(peer.type.value, peer.version, case, round(confirmed, 1), told))


def the_incident_is_the_groups(incident: dict[str, Any], outcome: str) -> None:
    spec, found = incident["spec"], incident["status"]
    workload = spec["workloadRef"]
    assert (workload["kind"], workload["name"]) == ("LeaderWorkerSet", NAME)
    assert re.fullmatch("[0-9a-f]{40}", spec["podGroup"]), "the group's key"
    assert spec["policyRef"] == {"name": POLICY}
    assert spec["target"] == {"role": "Leader"}
    assert (spec["kind"], spec["pod"]) == ("HostGrowth", LEADER)
    assert found["attribution"]["pod"] == WORKER
    assert (found["phase"], found["outcome"]) == ("Resolved", outcome)
    names = [one["step"] for one in found["timeline"]]
    assert names.index("GroupRestart") < names.index("Drain") < names.index("EngineRestart")
