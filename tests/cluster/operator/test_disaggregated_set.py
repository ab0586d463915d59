"""A policy over a DisaggregatedSet, with the real controller of both kinds of set.

No kubelet runs: the test writes the status of the pods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plimsoll_api.roles import PodRole
from plimsoll_api.workloads import SlotOwner, WorkloadRef, make_slot_names, parse_roles
from tests.cluster.operator.test_groups import groups
from tests.cluster.operator.test_policy_fleet import (
    policy,
    replicas,
    slots_of_own_pod,
    workload,
)
from tests.lab.lab import Lab
from tests.lab.leader_worker_set import LeaderWorkerSets

__all__ = ["groups", "slots_of_own_pod"]
SETS = "disaggregatedsets.disaggregatedset.x-k8s.io"
SELECTED = {"inference": "vllm"}
"""Not ``app``: the controller sets that label to the set and the role."""
COUNTED = "plimsoll.dev/restarts"
PATIENCE_S = 120.0
"""For what is no figure: on a busy machine, a list of all pods takes long."""


@pytest.fixture
def sets(cluster: Lab, groups: LeaderWorkerSets) -> Iterator[LeaderWorkerSets]:
    yield groups
    cluster.kube("delete", "crd", "--ignore-not-found", SETS)


def role(name: str, size: int, image: str) -> dict[str, Any]:
    """One group of ``size`` pods, as the webhook leaves them."""
    template = copy.deepcopy(workload("x", 1)["spec"]["template"])
    template["metadata"]["labels"] = SELECTED | {"plimsoll.dev/policy": "engines"}
    template["spec"]["nodeSelector"] = {"plimsoll.dev/no-node": "true"}
    template["spec"]["containers"][0]["image"] = image
    return {
        "name": name,
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {"size": size, "workerTemplate": template},
        },
    }


def graph(image: str) -> dict[str, Any]:
    return {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": "DisaggregatedSet",
        "metadata": {"name": "llama"},
        "spec": {"roles": [role("prefill", 2, image), role("decode", 1, image)]},
    }


def shown(kubectl: Any) -> list[tuple[str, str, int]]:
    """Kind, name and number of supervised pods of each workload in the policy's status."""
    workloads = kubectl.get("plsp", "engines")["status"]["workloads"]
    return [(one["kind"], one["name"], one["supervised"]) for one in workloads]


def running(kubectl: Any) -> dict[str, list[str]]:
    """Names of the pods that stay, by role, after a turn of the kubelet."""
    found: dict[str, list[str]] = {}
    for pod in kubectl.list("pods", "inference=vllm"):
        if pod["metadata"].get("deletionTimestamp"):
            continue
        kubectl.set_running(pod)
        of = pod["metadata"]["labels"]["disaggregatedset.x-k8s.io/role"]
        found.setdefault(of, []).append(pod["metadata"]["name"])
    return {of: sorted(pods) for of, pods in found.items()}


@pytest.mark.usefixtures("slots_of_own_pod")
def test_a_rollout_keeps_workload_slots_and_budgets_of_each_role(
    kubectl: Any, sets: LeaderWorkerSets, start: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    owner = WorkloadRef("DisaggregatedSet", "llama")
    (prefill,), (decode,), (both,) = (
        make_slot_names("engines", SlotOwner(owner, of), 1)
        for of in (PodRole.PREFILL, PodRole.DECODE, None)
    )
    sets.start()
    start("--resync", "2")
    watched = policy()
    watched["spec"]["selector"] = {"matchLabels": SELECTED}
    kubectl.apply(watched, graph("vllm/vllm-openai:v0.32.0"))

    def is_whole() -> bool:
        pods = running(kubectl)
        return len(pods.get("prefill", [])) == 2 and len(pods.get("decode", [])) == 1

    eventually(is_whole, PATIENCE_S)
    first = running(kubectl)
    leader = first["prefill"][0]
    assert first["prefill"] == [leader, f"{leader}-1"], "a leader and its worker, one replica"
    eventually(lambda: replicas(kubectl, prefill) == [",".join(first["prefill"])], PATIENCE_S)
    eventually(lambda: replicas(kubectl, decode) == first["decode"], PATIENCE_S)
    eventually(lambda: shown(kubectl) == [("DisaggregatedSet", "llama", 3)], PATIENCE_S)
    restarts = {COUNTED: '[{"at": 1, "incident": "x"}]'}
    kubectl.patch("lease", prefill, {"metadata": {"annotations": restarts}})
    slot = kubectl.get("lease", prefill)["metadata"]["uid"]

    kubectl.apply(graph("vllm/vllm-openai:v0.33.0"))

    def is_rolled_out() -> bool:
        pods = running(kubectl)
        now = {name for names in pods.values() for name in names}
        return is_whole() and not now & {name for names in first.values() for name in names}

    eventually(is_rolled_out, 2 * PATIENCE_S)
    second = running(kubectl)
    eventually(lambda: replicas(kubectl, prefill) == [",".join(second["prefill"])], PATIENCE_S)
    eventually(lambda: replicas(kubectl, decode) == second["decode"], PATIENCE_S)
    kept = kubectl.get("lease", prefill)["metadata"]
    assert kept["uid"] == slot
    assert kept["annotations"][COUNTED] == restarts[COUNTED], "the next revision's budget"
    roles = parse_roles(kept["annotations"]["plimsoll.dev/roles"])
    assert roles[PodRole.PREFILL] == (second["prefill"][0],)
    assert roles[PodRole.DECODE] == tuple(second["decode"])
    eventually(lambda: shown(kubectl) == [("DisaggregatedSet", "llama", 3)], PATIENCE_S)

    watched["spec"]["supervision"] = {"scope": "Graph"}
    kubectl.apply(watched)
    together = [*second["decode"], ",".join(second["prefill"])]
    eventually(lambda: replicas(kubectl, both) == together, PATIENCE_S)
    kubectl.delete("disaggregatedset", "llama")
    eventually(lambda: running(kubectl) == {}, PATIENCE_S)
