"""Restart slots and the circuit breaker for each workload of a policy, without a cluster."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.engines import EngineType
from plimsoll_api.names import (
    SERVICE_RESTARTS_ANNOTATION,
    SLOT_REPLICAS_ANNOTATION,
    SLOT_ROLES_ANNOTATION,
    SLOT_WORKLOAD_ANNOTATION,
)
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import SlotScope
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervisor_config import EngineEndpoint, PodEngine, make_pod_config
from plimsoll_api.workloads import (
    Membership,
    SlotOwner,
    WorkloadRef,
    format_replicas,
    make_members_service_name,
    make_ray_service_name,
    make_slot_names,
    parse_replicas,
    parse_roles,
)
from plimsoll_operator.config import DEFAULT_IMAGES
from plimsoll_operator.fleet.circuit_breaker import allocate_slots
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState, summarize_pod
from plimsoll_operator.fleet.workloads import (
    MAX_REPLICAS_BYTES,
    MAX_ROLES_BYTES,
    MAX_WORKLOADS,
    Workload,
    choose_workloads_with_slots,
    find_slots_with_restarts,
    group_pods_by_slots,
    group_pods_by_workload,
)
from plimsoll_operator.kinds import parse_object
from plimsoll_operator.plans.policy import find_slot_failure, make_supervisor_config, render_objects

NOW = "2026-01-01T00:00:00Z"
VLLM, LLAMA = WorkloadRef("Deployment", "vllm"), WorkloadRef("StatefulSet", "llama")


def policy(**supervision: Any) -> SupervisionPolicy:
    manifest = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": "engines", "namespace": "ml", "uid": "u", "generation": 1},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "supervision": supervision},
    }
    return parse_object(SupervisionPolicy, manifest)


def pods(ref: WorkloadRef | None, *names: str, holds: bool = True, group: str = "") -> Any:
    state = SupervisionState.SUPERVISED if holds else SupervisionState.WAITING
    member = Membership(ref, "apps" if ref else "", group)
    return [
        SelectedPod(name, "default", state, member=member, may_hold_slot=holds) for name in names
    ]


def leases(*workloads: Workload, **supervision: Any) -> dict[str, dict[str, Any]]:
    made = render_objects(policy(**supervision), ["default"], workloads)
    return {one["metadata"]["name"]: one for one in made if one["kind"] == "Lease"}


def services(*found: Workload) -> list[dict[str, Any]]:
    """The Services of RayClusters, without the one that lists all pods of the policy."""
    made = [one for one in render_objects(policy(), ["default"], found) if one["kind"] == "Service"]
    (members,) = [one for one in made if len(one["spec"]["selector"]) == 1]
    assert members["metadata"]["name"] == make_members_service_name("engines")
    assert members["spec"]["clusterIP"] == "None"
    return [one for one in made if one is not members]


def ray(*names: str, cluster: str = "llm", holds: bool = True) -> list[SelectedPod]:
    member = Membership(WorkloadRef("RayCluster", cluster), "ray.io", cluster)
    state = SupervisionState.SUPERVISED if holds else SupervisionState.WAITING
    return [
        SelectedPod(name, "default", state, member=member, may_hold_slot=holds) for name in names
    ]


def test_a_service_lists_the_supervised_pods_of_each_ray_cluster() -> None:
    group = pods(WorkloadRef("LeaderWorkerSet", "lws"), "lws-0", group="0")
    made = services(
        *group_pods_by_workload([*ray("llm-head", "llm-worker"), *pods(VLLM, "vllm"), *group])
    )
    (service,) = made
    assert service["metadata"]["name"] == make_ray_service_name("engines", "llm")
    (owner,) = service["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == (
        "SupervisionPolicy", "engines", True,
    )  # fmt: skip
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"plimsoll.dev/policy": "engines", "ray.io/cluster": "llm"},
        "ports": [{"name": "metrics", "port": 9464, "protocol": "TCP"}],
    }


def test_a_ray_cluster_without_a_supervised_pod_has_no_service() -> None:
    assert services(*group_pods_by_workload(ray("llm-head", holds=False))) == []
    assert (
        services(*group_pods_by_workload(pods(WorkloadRef("RayCluster", "llm"), "claims-no-label")))
        == []
    )


def test_ray_clusters_have_no_more_services_than_a_policy_has_workloads() -> None:
    many = [one for number in range(2 * MAX_WORKLOADS) for one in ray("head", cluster=f"c{number}")]
    found = services(*choose_workloads_with_slots("engines", group_pods_by_workload(many), ()))
    assert len({one["metadata"]["name"] for one in found}) == len(found) == MAX_WORKLOADS


def test_each_workload_has_slots_and_its_supervisors_ask_for_them() -> None:
    found = group_pods_by_workload(
        [*pods(LLAMA, "llama-0"), *pods(VLLM, "vllm-b", "vllm-a"), *pods(None, "bare")]
    )
    made = leases(*found, maxUnavailable=2)
    common = make_supervisor_config(policy(maxUnavailable=2))
    url = "http://127.0.0.1:8000"
    seen: set[str] = set()
    for ref, replicas in ((None, "bare"), (VLLM, "vllm-a vllm-b"), (LLAMA, "llama-0")):
        asked = make_pod_config(
            common, PodEngine(EngineEndpoint(EngineType.VLLM, url, url), ref)
        ).slots
        assert len(asked) == 2
        seen.update(asked)
        for name in asked:
            annotations = made[name]["metadata"]["annotations"]
            assert annotations[SLOT_REPLICAS_ANNOTATION] == replicas
            assert annotations.get(SLOT_WORKLOAD_ANNOTATION) == (str(ref) if ref else None)
    assert seen == made.keys()
    (role,) = [
        one for one in render_objects(policy(maxUnavailable=2), [], found) if one["kind"] == "Role"
    ]
    assert set(role["rules"][-1]["resourceNames"]) == seen


GRAPH = WorkloadRef("DisaggregatedSet", "graph")


def of_graph(name: str, role: PodRole, workload: WorkloadRef = GRAPH) -> SelectedPod:
    member = Membership(workload, graph=GRAPH)
    return SelectedPod(
        name, "default", SupervisionState.SUPERVISED, member=member, may_hold_slot=True, role=role
    )


@pytest.mark.parametrize("scope", SlotScope)
@pytest.mark.parametrize("workload", [GRAPH, VLLM], ids=["renames", "keeps-names"])
def test_slots_count_for_each_role_or_for_the_graph(
    scope: SlotScope, workload: WorkloadRef
) -> None:
    """The operator creates the Leases that supervisors request, whoever owns the pods."""
    found = [
        of_graph("p-0", PodRole.PREFILL, workload), of_graph("p-1", PodRole.PREFILL, workload),
        of_graph("d-0", PodRole.DECODE, LLAMA if workload == VLLM else workload),
    ]  # fmt: skip
    made = leases(*group_pods_by_slots(found, scope), scope=scope.value)
    common = make_supervisor_config(policy(scope=scope.value))
    url = "http://127.0.0.1:8000"
    takes: dict[str, set[str]] = defaultdict(set)
    for one in found:
        engine = EngineEndpoint(EngineType.VLLM, url, url)
        pod = PodEngine(engine, one.member.workload, role=one.role, graph=one.member.graph)
        (slot,) = make_pod_config(common, pod).slots
        annotations = made[slot]["metadata"]["annotations"]
        assert one.name in annotations[SLOT_REPLICAS_ANNOTATION].split(), (
            "it may take the slot it asks for"
        )
        assert parse_roles(annotations[SLOT_ROLES_ANNOTATION]) == {
            PodRole.PREFILL: ("p-0", "p-1"), PodRole.DECODE: ("d-0",),
        }  # fmt: skip
        takes[slot].add(one.name)
    apart = [{"d-0"}, {"p-0", "p-1"}]
    shared = [{"d-0", "p-0", "p-1"}]
    expected = shared if scope is SlotScope.GRAPH else apart
    assert sorted(takes.values(), key=len) == expected
    assert {str(one) for one in (workload, LLAMA, GRAPH)} >= {
        one["metadata"]["annotations"][SLOT_WORKLOAD_ANNOTATION] for one in made.values()
        if SLOT_WORKLOAD_ANNOTATION in one["metadata"]["annotations"]
    }  # fmt: skip
    for name, lease in made.items():
        lease["metadata"] |= {"namespace": "ml", "uid": name}
        lease["spec"] = {"holderIdentity": "p-0"}
        if name in takes:
            assert allocate_slots([lease], [], 1).held == 1, "the circuit breaker counts it"


def test_the_pods_of_very_large_roles_are_cut_between_names() -> None:
    many = [of_graph(f"{'p' * 200}-{at:04}", PodRole.PREFILL) for at in range(400)]
    few = [of_graph("d-0", PodRole.DECODE)]
    (_, sharing) = group_pods_by_slots([*many, *few], SlotScope.WORKLOAD)
    assert len(sharing.roles) <= MAX_ROLES_BYTES + 64
    found = parse_roles(sharing.roles)
    assert found[PodRole.DECODE] == ("d-0",)
    assert set(found[PodRole.PREFILL]) < {one.name for one in many}


def test_the_policys_own_slots_are_there_from_the_beginning() -> None:
    (only,) = leases().values()
    assert only["metadata"]["name"] == "engines.policy-restart-0"
    assert only["metadata"]["annotations"][SLOT_REPLICAS_ANNOTATION] == "", "nobody may take it"


def test_pods_that_wait_have_slots_but_may_not_take_them() -> None:
    (found,) = group_pods_by_workload(pods(VLLM, "vllm-a", holds=False))
    assert choose_workloads_with_slots("engines", [found], ()) == [found]
    assert found.format_replicas() == ""


def test_a_pod_that_ends_keeps_its_slot_until_it_is_gone() -> None:
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "llama", "controller": True}
    labels = {"app": "vllm", "plimsoll.dev/policy": "engines"}
    meta: dict[str, Any] = {"name": "llama-0", "labels": labels, "ownerReferences": [owner]}
    containers = {"initContainers": [{"name": "supervisor"}], "containers": [{"name": "server"}]}
    leaving = {"metadata": meta | {"deletionTimestamp": NOW}, "spec": containers}
    found = summarize_pod(leaving, policy(), ["engines"], DEFAULT_IMAGES)
    assert (found.state, found.may_hold_slot) == (SupervisionState.LEAVING, True)
    over = leaving | {"status": {"phase": "Failed"}}
    assert not summarize_pod(over, policy(), ["engines"], DEFAULT_IMAGES).may_hold_slot


def test_the_pods_of_a_group_are_one_replica() -> None:
    big = WorkloadRef("LeaderWorkerSet", "big")
    members = [*pods(big, "big-0", "big-0-1", group="0"), *pods(big, "big-1", group="1")]
    (found,) = group_pods_by_workload(members)
    assert parse_replicas(found.format_replicas()) == [("big-0", "big-0-1"), ("big-1",)]


names = st.text("abc-.0", min_size=1, max_size=8)


@given(st.lists(st.lists(names, min_size=1, max_size=3).map(tuple), max_size=5))
def test_replicas_survive_their_annotation(replicas: list[tuple[str, ...]]) -> None:
    assert parse_replicas(format_replicas(replicas)) == replicas


def test_workloads_beyond_the_bound_have_no_slots_and_the_policy_says_so() -> None:
    jobs = [WorkloadRef("Job", f"j{at:03}") for at in range(MAX_WORKLOADS + 2)]
    many = group_pods_by_workload(pod for job in jobs for pod in pods(job, f"{job.name}-0"))
    late = make_slot_names("engines", SlotOwner(WorkloadRef("Job", f"j{MAX_WORKLOADS + 1:03}")), 1)[
        0
    ]
    chosen = choose_workloads_with_slots("engines", many, [late])
    assert len(chosen) == MAX_WORKLOADS
    assert late in leases(*chosen), "who has slots keeps them"
    failure = find_slot_failure(many, chosen)
    assert failure is not None
    assert failure.reason == "TooManyWorkloads"
    assert f"Job/j{MAX_WORKLOADS - 1:03} and Job" not in failure.message
    assert f"belong to {MAX_WORKLOADS + 2} workloads" in failure.message
    assert find_slot_failure(many[:3], many[:3]) is None


def test_the_names_on_a_slot_are_bounded() -> None:
    (found,) = group_pods_by_workload(
        pods(VLLM, *(f"vllm-{'x' * 200}-{at:03}" for at in range(400)))
    )
    assert found.is_truncated
    text = found.format_replicas()
    assert len(text) <= MAX_REPLICAS_BYTES
    assert all(len(name) == 209 for (name,) in parse_replicas(text)), (
        "none is cut off in its middle"
    )
    failure = find_slot_failure([found], [found])
    assert failure is not None
    assert failure.message.startswith("Deployment/vllm: the workload has too many pods")
    (group,) = group_pods_by_workload(ray(*(f"llm-{'x' * 200}-{at:03}" for at in range(400))))
    assert group.is_truncated
    assert group.format_replicas() == "", "a group is one replica, which is not cut"


@pytest.mark.parametrize(
    ("renewed", "restarts", "kept"),
    [
        ("2025-12-31T23:50:00.000000Z", '[{"at":1,"incident":"x"}]', True),
        ("2025-12-31T22:50:00.000000Z", '[{"at":1,"incident":"x"}]', False),
        ("2025-12-31T23:50:00.000000Z", "", False),
        ("soon", '[{"at":1,"incident":"x"}]', False),
    ],
)
def test_a_workload_that_comes_back_does_not_get_its_budget_back(
    renewed: str, restarts: str, kept: bool
) -> None:
    meta = {"name": "a", "annotations": {SERVICE_RESTARTS_ANNOTATION: restarts} if restarts else {}}
    lease = {"metadata": meta, "spec": {"renewTime": renewed}}
    assert find_slots_with_restarts([lease], 3600.0, NOW) == (["a"] if kept else [])


def breaker_lease(workload: Workload, holder: str = "") -> dict[str, Any]:
    """A workload's slot as the API server has it."""
    found = leases(workload)[workload.make_slot_names("engines", 1)[0]]
    found["metadata"]["uid"] = str(workload.ref)
    return found | {"spec": {"holderIdentity": holder} if holder else {}}


def asking(pod: str, service: str = "vllm") -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": f"{pod}-1", "namespace": "ml", "creationTimestamp": NOW},
        "spec": {
            "workloadRef": {"kind": "Deployment", "name": service},
            "policyRef": {"name": "engines"},
            "pod": pod,
            "kind": "HostGrowth",
        },
        "status": {"phase": "AwaitingSlot"},
    }


def test_the_breaker_shuts_the_slots_of_one_workload_and_not_of_another() -> None:
    vllm, llama = group_pods_by_workload([*pods(VLLM, "vllm-a"), *pods(LLAMA, "llama-0")])
    both = [breaker_lease(vllm, "vllm-a"), breaker_lease(llama)]
    found = allocate_slots(both, [asking("llama-0")], 1)
    assert [one["metadata"]["uid"] for one in found.close] == ["StatefulSet/llama"]
    assert (found.held, found.asking) == (1, 1)
    assert allocate_slots(both, [asking("llama-0")], 4).close == []
    # It names another workload, and asks for its own all the same.
    assert [
        one["metadata"]["uid"] for one in allocate_slots(both, [asking("vllm-a", "llama")], 1).close
    ] == []
    # A pod without a supervisor of the policy asks for nothing.
    assert allocate_slots(both, [asking("anybody")], 1).close == []


def test_a_workload_that_is_alone_may_use_the_whole_limit() -> None:
    """The policy's own slot, which no pod may take, is nobody to share with."""
    (vllm,) = group_pods_by_workload(pods(VLLM, "vllm-a"))
    slots = list(leases(vllm, maxUnavailable=4).values())
    for number, one in enumerate(slots):
        one["metadata"]["uid"] = str(number)
    assert len(slots) == 8
    assert allocate_slots(slots, [asking("vllm-a")], 4).close == []
    shut = next(
        one for one in slots if one["metadata"]["annotations"][SLOT_REPLICAS_ANNOTATION] == ""
    )
    shut["spec"] = {"holderIdentity": "plimsoll-operator"}
    assert allocate_slots(slots, [asking("vllm-a")], 4).reopen == [shut], (
        "what was shut is given back"
    )


def test_a_lease_that_only_looks_like_a_workloads_slot_counts_for_nobody() -> None:
    (vllm,) = group_pods_by_workload(pods(VLLM, "vllm-a"))
    forged = breaker_lease(vllm, "anybody")
    forged["metadata"]["annotations"][SLOT_WORKLOAD_ANNOTATION] = "Deployment/other"
    assert allocate_slots([forged], [asking("vllm-a")], 1).held == 0
