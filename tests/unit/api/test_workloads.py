"""Which workload, replica and revision a pod says that it is of."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import SlotScope
from plimsoll_api.workloads import (
    KV_ROLES,
    Membership,
    SlotOwner,
    WorkloadRef,
    find_membership,
    find_slot_owner,
    format_roles,
    make_ray_service_name,
    make_slot_names,
    parse_roles,
)

LWS = "leaderworkerset.sigs.k8s.io"


def metadata(kind: str, name: str, api: str = "apps/v1", **labels: str) -> dict[str, Any]:
    owner = {"apiVersion": api, "kind": kind, "name": name, "uid": "u", "controller": True}
    named = {key.replace("__", "/").replace("_", "-"): value for key, value in labels.items()}
    return {"labels": named, "ownerReferences": [owner]}


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        ({}, Membership()),
        (
            metadata("ReplicaSet", "vllm-64d8", pod_template_hash="64d8"),
            Membership(WorkloadRef("Deployment", "vllm"), "apps", revision="64d8"),
        ),
        (
            metadata("ReplicaSet", "vllm-64d8", rollouts_pod_template_hash="64d8"),
            Membership(WorkloadRef("Rollout", "vllm"), "argoproj.io", revision="64d8"),
        ),
        (metadata("ReplicaSet", "bare"), Membership(WorkloadRef("ReplicaSet", "bare"), "apps")),
        (
            metadata("StatefulSet", "llama", controller_revision_hash="llama-7c"),
            Membership(WorkloadRef("StatefulSet", "llama"), "apps", revision="llama-7c"),
        ),
        (
            metadata("StatefulSet", "llama", "apps.kruise.io/v1beta1"),
            Membership(WorkloadRef("StatefulSet", "llama", "apps.kruise.io"), "apps.kruise.io"),
        ),
        (
            metadata("Job", "batch-29", "batch/v1"),
            Membership(WorkloadRef("Job", "batch-29"), "batch"),
        ),
        (
            metadata("ReplicationController", "old", "v1"),
            Membership(WorkloadRef("ReplicationController", "old")),
        ),
        (
            metadata("RayCluster", "ray", "ray.io/v1", ray_io__cluster="x")
            | {"labels": {"ray.io/cluster": "ray", "ray.io/node-type": "worker"}},
            Membership(WorkloadRef("RayCluster", "ray"), "ray.io", group="ray"),
        ),
    ],
)  # fmt: skip
def test_the_workload_is_read_from_the_pod_alone(
    meta: dict[str, Any], expected: Membership
) -> None:
    assert find_membership(meta) == expected


def test_all_pods_of_a_group_are_one_replica_of_their_leader_worker_set() -> None:
    """The leader's StatefulSet has the set's name, the workers' the name of their group."""
    labels = {
        f"{LWS}/name": "big",
        f"{LWS}/group-index": "1",
        f"{LWS}/group-key": "4a",
        f"{LWS}/template-revision-hash": "5f",
        "controller-revision-hash": "big-1-99",
    }
    leader, worker = (metadata("StatefulSet", name) | {"labels": labels} for name in ("big", "b-1"))
    found = find_membership(leader)
    assert found == find_membership(worker)
    assert found == Membership(
        WorkloadRef("LeaderWorkerSet", "big"), "leaderworkerset.x-k8s.io", "4a", "5f"
    )
    assert found.get_replica_name("big-1") == found.get_replica_name("big-1-3") == "group 4a"
    worker["labels"] = labels | {f"{LWS}/worker-index": "3"}
    assert find_membership(worker).worker
    assert find_membership(worker).get_replica_name("big-1-3") == "group 4a"
    without_key = {key: text for key, text in labels.items() if not key.endswith("group-key")}
    assert find_membership(leader | {"labels": without_key}).group == "1", "an older controller"
    assert Membership().get_replica_name("alone") == "alone"


def test_an_owner_that_is_not_the_controller_counts_for_nothing() -> None:
    meta = metadata("StatefulSet", "llama")
    meta["ownerReferences"][0]["controller"] = False
    assert find_membership(meta) == Membership()


def test_kinds_of_one_name_in_two_groups_are_two_workloads() -> None:
    """Earlier supervisors knew no group: a workload keeps its slots under their name for it."""
    usual, other = (
        WorkloadRef("StatefulSet", "a"),
        WorkloadRef("StatefulSet", "a", "apps.kruise.io"),
    )
    assert usual == WorkloadRef("StatefulSet", "a", "apps") != other
    assert (str(usual), str(other)) == ("StatefulSet/a", "StatefulSet.apps.kruise.io/a")
    assert make_slot_names("p", SlotOwner(usual), 1) != make_slot_names("p", SlotOwner(other), 1)
    for one in (usual, other, WorkloadRef("ReplicationController", "old")):
        assert WorkloadRef.parse(str(one)) == one
    assert WorkloadRef.parse("") is None


@given(kind=st.text(min_size=1, max_size=63), name=st.text(min_size=1, max_size=253))
def test_slots_have_valid_names_whatever_a_pod_calls_its_owner(kind: str, name: str) -> None:
    made = make_slot_names("p" * 63, SlotOwner(WorkloadRef(kind, name)), 16)
    assert len(set(made)) == 16
    for one in made:
        assert len(one) <= 253
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", one)


@given(policy=st.text(min_size=1, max_size=63), cluster=st.text(min_size=1, max_size=63))
def test_the_service_of_a_ray_cluster_has_a_valid_name(policy: str, cluster: str) -> None:
    name = make_ray_service_name(policy, cluster)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= 63
    assert name == make_ray_service_name(policy, cluster)
    assert name not in (
        make_ray_service_name(policy + "x", cluster),
        make_ray_service_name(policy, cluster + "x"),
    )


def test_only_a_pod_that_a_ray_cluster_owns_is_of_one() -> None:
    labels = {"labels": {"ray.io/cluster": "ray"}}
    assert find_membership(metadata("RayCluster", "ray", "ray.io/v1") | labels).ray_cluster == "ray"
    assert find_membership(metadata("StatefulSet", "ray") | labels).ray_cluster == ""
    assert find_membership(metadata("RayCluster", "ray", "ray.io/v1")).ray_cluster == ""
    assert find_membership(labels).ray_cluster == ""


def test_two_workloads_of_one_name_have_slots_of_their_own() -> None:
    made = {
        make_slot_names("engines", SlotOwner(workload), 1)
        for workload in (None, WorkloadRef("Deployment", "vllm"), WorkloadRef("Job", "vllm"))
    }
    assert len(made) == 3
    assert ("engines.policy-restart-0",) in made


DISAGGREGATED = "disaggregatedset.x-k8s.io"
GRAPH = WorkloadRef("DisaggregatedSet", "llama")
SCOPES, ROLES = st.sampled_from(SlotScope), st.sampled_from([None, *PodRole])


def disaggregated(role: str, revision: str, key: str = "4a", **more: str) -> dict[str, Any]:
    """A pod of a DisaggregatedSet, whose LeaderWorkerSets are named by revision and role."""
    child = f"llama-0-{revision}-{role}"
    labels = {
        f"{DISAGGREGATED}/name": "llama", f"{DISAGGREGATED}/role": role,
        f"{DISAGGREGATED}/revision": revision, f"{LWS}/name": child, f"{LWS}/group-key": key,
        f"{LWS}/template-revision-hash": "5f", **more,
    }  # fmt: skip
    return metadata("StatefulSet", child) | {"labels": labels}


def test_a_rollout_of_a_disaggregated_set_renames_neither_workload_nor_slots() -> None:
    old, new = (find_membership(disaggregated("decode", revision)) for revision in ("r1", "r2"))
    assert old.workload == new.workload == old.graph == GRAPH
    assert (old.revision, new.revision) == ("r1", "r2"), "the controller's, not the child's"
    assert old.group == "4a"
    names = [
        make_slot_names(
            "p", find_slot_owner(SlotScope.WORKLOAD, one.workload, one.graph, PodRole.DECODE), 2
        )
        for one in (old, new)
    ]
    assert names[0] == names[1]


def test_a_dynamo_graph_is_the_workload_of_its_deployments() -> None:
    labels = {
        "nvidia.com/dynamo-graph-deployment-name": "disagg",
        "nvidia.com/dynamo-worker-hash": "7663d0d2", "pod-template-hash": "64d8",
    }  # fmt: skip
    found = find_membership(metadata("ReplicaSet", "disagg-7663d0d2-64d8") | {"labels": labels})
    assert found.workload == found.graph == WorkloadRef("DynamoGraphDeployment", "disagg")
    assert found.revision == "7663d0d2"
    del labels["nvidia.com/dynamo-worker-hash"]
    front = find_membership(metadata("ReplicaSet", "disagg-64d8") | {"labels": labels})
    assert front.revision == "64d8", "a frontend has its Deployment's revision"


def test_kserve_keeps_the_names_of_its_deployments_so_only_the_graph_is_its_own() -> None:
    labels = {
        "app.kubernetes.io/name": "chat", "app.kubernetes.io/part-of": "llminferenceservice",
        "pod-template-hash": "64d8",
    }  # fmt: skip
    found = find_membership(metadata("ReplicaSet", "chat-kserve-64d8") | {"labels": labels})
    assert found.workload == WorkloadRef("Deployment", "chat-kserve")
    assert found.graph == WorkloadRef("LLMInferenceService", "chat")


@given(ROLES, ROLES)
def test_each_role_of_a_graph_has_slots_of_its_own(
    one: PodRole | None, other: PodRole | None
) -> None:
    owners = [find_slot_owner(SlotScope.WORKLOAD, GRAPH, GRAPH, role) for role in (one, other)]
    apart = one != other and not {one, other}.isdisjoint(KV_ROLES)
    names = [set(make_slot_names("p", owner, 16)) for owner in owners]
    assert names[0].isdisjoint(names[1]) is apart


@given(ROLES, ROLES, st.sampled_from([None, WorkloadRef("Deployment", "d"), GRAPH]))
def test_the_roles_of_a_graph_share_their_slots_where_the_scope_is_the_graph(
    one: PodRole | None, other: PodRole | None, workload: WorkloadRef | None
) -> None:
    owners = {find_slot_owner(SlotScope.GRAPH, workload, GRAPH, role) for role in (one, other)}
    assert owners == {SlotOwner(GRAPH)}


@given(SCOPES, ROLES)
def test_a_workload_without_a_graph_keeps_the_names_of_its_slots(
    scope: SlotScope, role: PodRole | None
) -> None:
    workload = WorkloadRef("Deployment", "vllm")
    found = find_slot_owner(scope, workload, None, role)
    shared = scope is SlotScope.GRAPH and role in KV_ROLES
    assert found == (SlotOwner() if shared else SlotOwner(workload))


@given(
    st.dictionaries(
        st.sampled_from(PodRole),
        st.lists(st.from_regex("[a-z][a-z0-9-]{0,9}", fullmatch=True), min_size=1),
    )
)
def test_the_annotation_of_roles_is_read_as_written(pods: dict[PodRole, list[str]]) -> None:
    assert parse_roles(format_roles(pods)) == {role: tuple(names) for role, names in pods.items()}
    assert parse_roles("Sprite=a nonsense = =b Decode=") == {}
