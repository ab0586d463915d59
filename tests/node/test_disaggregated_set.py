"""A SupervisionPolicy over a DisaggregatedSet in pods, with the real controller of both kinds.

Prefill has two groups of two pods, and decode one pod. A leak in a prefill worker is its group's:
one incident with the role, the slot of the role, and one restart of the group. All others serve.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from plimsoll_api.roles import PodRole
from plimsoll_api.workloads import SlotOwner, WorkloadRef, make_slot_names
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.operator import Operator
from tests.node import supervised_engines
from tests.node.supervised import (
    AFTER,
    LISTED_S,
    POLICY,
    counts,
    ended_incident,
    injects,
    older_pod,
    policy,
    ready_since,
    restarts,
    status,
    warm,
)
from tests.node.supervised_engines import CONTAINER, PORT, Engine
from tests.node.test_leader_worker_set import PREFIX, TEAM, controller
from tests.node.visits import Visits

__all__ = ["controller"]
NAME = "llama"
ROLE, GROUP = "disaggregatedset.x-k8s.io/role", f"{PREFIX}/group-index"
Pods = dict[str, dict[str, Any]]


def role(engine: Engine, name: str, replicas: int, size: int) -> dict[str, Any]:
    metadata = {"labels": TEAM, "annotations": {"plimsoll.dev/allow-group-restarts": "true"}}
    leader, worker = (
        {"metadata": metadata, "spec": engine.pod_spec | {"containers": [one]}}
        for one in engine.pair(engine.container)
    )
    group = {
        "size": size,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader,
        "workerTemplate": worker,
    }
    return {"name": name, "spec": {"replicas": replicas, "leaderWorkerTemplate": group}}


def workload(engine: Engine) -> list[dict[str, Any]]:
    """The set, and a Service of the leaders of each role."""
    roles = [role(engine, "prefill", 2, 2), role(engine, "decode", 1, 1)]
    made = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": one["name"]},
            "spec": {
                "selector": TEAM | {ROLE: one["name"], f"{PREFIX}/worker-index": "0"},
                "ports": [{"port": 80, "targetPort": PORT}],
            },
        }
        for one in roles
    ]
    graph = {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": "DisaggregatedSet",
        "metadata": {"name": NAME},
        "spec": {"roles": roles},
    }
    return [*made, graph]


def pods(kube: Kube) -> Pods:
    return {one["metadata"]["name"]: one for one in kube.list("pods", "team=inference")}


def ready(kube: Kube) -> bool:
    found = pods(kube)
    return len(found) == 5 and all(map(ready_since, found.values()))


def slots_of(kube: Kube, holder: str) -> list[str]:
    return [
        one["metadata"]["name"]
        for one in kube.list("leases")
        if one["spec"].get("holderIdentity") == holder
    ]


@pytest.mark.long
def test_a_leak_in_a_prefill_worker_restarts_its_group_alone(
    node: Lab,
    kube: Kube,
    operator: Callable[..., Operator],
    webhook: tuple[str, ...],
    controller: None,
    tmp_path: Path,
) -> None:
    engine = supervised_engines.standin(node)
    engine.prepare(kube, tmp_path)
    operator(*webhook, "--max-waiting-pods=10")
    kube.apply(policy(TEAM, engine.memory, ladder=["Trim", "EngineRestart"]))
    eventually(lambda: injects(kube, older_pod(node, TEAM)), "pods are injected", LISTED_S)
    kube.apply(*workload(engine))
    eventually(partial(ready, kube), "all pods are ready", engine.start_s)
    eventually(lambda: counts(kube) == (5, 5, 0, 0), "all pods are supervised", LISTED_S)
    before = pods(kube)
    for name, pod in before.items():
        eventually(partial(warm, pod), f"a baseline of {name}", engine.start_s)
    labels = {name: pod["metadata"]["labels"] for name, pod in before.items()}
    group = sorted(name for name, of in labels.items() if (of[ROLE], of[GROUP]) == ("prefill", "0"))
    leader, worker = group
    owner = SlotOwner(WorkloadRef("DisaggregatedSet", NAME), PodRole.PREFILL)
    slots = list(make_slot_names(POLICY, owner, 1))

    addresses = [kube.get("service", name) or {} for name in ("prefill", "decode")]
    first, second = (f"http://{one['spec']['clusterIP']}" for one in addresses)
    with Visits(partial(engine.ask, first)) as visits, Visits(partial(engine.ask, second)) as other:
        kube("exec", worker, "-c", CONTAINER, "--", "sh", "-c", engine.leak)
        eventually(lambda: slots_of(kube, leader) == slots, "the role's slot", engine.story_s)
        incident = eventually(lambda: ended_incident(kube), "the incident ends", 2 * engine.story_s)
        eventually(partial(ready, kube), "all pods are ready again", engine.start_s)
        goal = visits.answered + AFTER
        eventually(lambda: visits.answered >= goal, "answers after the incident", engine.story_s)
    assert (visits.failures, other.failures) == ([], [])
    assert other.answered > 0

    assert incident is not None
    spec, found = incident["spec"], incident["status"]
    assert (spec["workloadRef"]["kind"], spec["workloadRef"]["name"]) == ("DisaggregatedSet", NAME)
    assert re.fullmatch("[0-9a-f]{40}", spec["podGroup"]), "the group's key"
    assert (spec["pod"], spec["target"]) == (leader, {"role": "Prefill"})
    assert found["attribution"]["pod"] == worker
    assert (found["phase"], found["outcome"]) == ("Resolved", "EngineRestart")
    assert len(kube.list("leakincidents")) == 1, "one for the group"

    after = pods(kube)
    assert set(after) == set(before)
    for name, pod in after.items():
        is_same = pod["metadata"]["uid"] == before[name]["metadata"]["uid"]
        assert is_same == (name not in group), name
        assert restarts(pod) == {CONTAINER: 0, "supervisor": 0}
    eventually(lambda: slots_of(kube, leader) == [], "the slot is free again", LISTED_S)
    eventually(lambda: status(kube).get("openIncidents") == 0, "it is over", LISTED_S)
    print(f"{visits.answered} and {other.answered} requests, 0 failed")
