"""Slots, circuit breaker, suspect revisions and evictions for each workload of a policy, with the
workloads' own controllers, on a real API server."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll_api.names import make_policy_object_name
from plimsoll_api.roles import PodRole
from plimsoll_api.workloads import (
    SlotOwner,
    WorkloadRef,
    make_members_service_name,
    make_slot_names,
    parse_roles,
)
from tests.cluster.operator.test_adopt import DEPLOYMENT, LISTED_S
from tests.cluster.operator.test_fleet_safety import OPENED, ROOT, incident


def workload(name: str, replicas: int, kind: str = "Deployment") -> dict[str, Any]:
    """Pods as the webhook leaves them, with a supervisor of the policy ``engines``."""
    made: dict[str, Any] = copy.deepcopy(DEPLOYMENT) | {"kind": kind, "metadata": {"name": name}}
    spec = made["spec"]
    labels = {"app": "vllm", "of": name}
    spec |= {"replicas": replicas, "selector": {"matchLabels": labels}}
    spec["template"]["metadata"]["labels"] = labels | {
        "plimsoll.dev/policy": "engines",
        "llm-d.ai/role": "decode",
    }
    pod = spec["template"]["spec"]
    engine = pod["containers"][0]
    pod["initContainers"] = [engine | {"name": "supervisor", "restartPolicy": "Always"}]
    if kind == "StatefulSet":
        del spec["strategy"]
        spec |= {"serviceName": name, "podManagementPolicy": "Parallel"}
    return made


def policy(**supervision: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": "engines"},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "supervision": supervision},
    }


def slot(name: str, kind: str = "Deployment") -> str:
    return make_slot_names("engines", SlotOwner(WorkloadRef(kind, name)), 1)[0]


def pods(kubectl: Any, name: str) -> list[str]:
    """Names of the workload's pods that stay."""
    return sorted(
        pod["metadata"]["name"]
        for pod in kubectl.list("pods", f"of={name}")
        if not pod["metadata"].get("deletionTimestamp")
    )


def replicas(kubectl: Any, lease: str) -> list[str]:
    found = kubectl.get("lease", lease) or {"metadata": {}}
    return sorted(found["metadata"].get("annotations", {}).get("plimsoll.dev/replicas", "").split())


def holder(kubectl: Any, lease: str) -> str:
    return str(((kubectl.get("lease", lease) or {}).get("spec") or {}).get("holderIdentity", ""))


def leaking(kubectl: Any, pod: str, of: str, phase: str = "Confirmed", **more: Any) -> None:
    made = incident(f"leak-{pod}", pod, of)
    ref = {"apiGroup": "apps", "kind": "Deployment", "name": of}
    made["spec"] |= {"policyRef": {"name": "engines"}, "workloadRef": ref}
    made["spec"]["target"] = {"role": "Decode"}
    kubectl.apply(made)
    status = {"phase": phase, "attribution": {"segment": "anonymous"}} | more
    kubectl.patch("leakincident", f"leak-{pod}", {"status": status}, "status")


def status(kubectl: Any) -> dict[str, Any]:
    found: dict[str, Any] = (kubectl.get("plsp", "engines") or {}).get("status") or {}
    return found


def of_workload(kubectl: Any, name: str) -> dict[str, Any]:
    """The workload's part of the status; KeyError while the status does not have it yet."""
    return dict({one.get("name"): one for one in status(kubectl)["workloads"]}[name])


@pytest.fixture
def slots_of_own_pod(kubectl: Any) -> Iterator[None]:
    """The admission policies, which the operator's own writes must pass."""
    file = str(Path(ROOT) / "config" / "admission-policy.yaml")
    kubectl("apply", "-f", file)
    yield
    kubectl("delete", "-f", file)


@pytest.mark.usefixtures("slots_of_own_pod")
def test_each_workload_has_slots_and_its_turn(
    kubectl: Any, start: Callable[..., Any], eventually: Any
) -> None:
    start("--max-disruptions", "1")
    kubectl.apply(policy(), workload("vllm", 2), workload("llama", 1, "StatefulSet"))
    vllm, llama = slot("vllm"), slot("llama", "StatefulSet")
    eventually(lambda: len(pods(kubectl, "vllm")) == 2 and pods(kubectl, "llama"), LISTED_S)
    eventually(lambda: replicas(kubectl, vllm) == pods(kubectl, "vllm"), LISTED_S)
    eventually(lambda: replicas(kubectl, llama) == ["llama-0"], LISTED_S)
    # The slots are written before the status.
    eventually(lambda: status(kubectl).get("workloadCount") == 2, LISTED_S)
    eventually(lambda: of_workload(kubectl, "vllm")["supervised"] == 2, LISTED_S)
    assert of_workload(kubectl, "vllm")["roles"] == ["Decode"]

    # One workload restarts, so the other one waits for its turn: each by its own slots.
    first = pods(kubectl, "vllm")[0]
    kubectl.patch("lease", vllm, {"spec": {"holderIdentity": first}})
    leaking(kubectl, "llama-0", "llama", "AwaitingSlot")
    eventually(lambda: holder(kubectl, llama) == "plimsoll-operator")
    assert holder(kubectl, vllm) == first
    kubectl.patch("lease", vllm, {"spec": {"holderIdentity": ""}})
    eventually(lambda: holder(kubectl, llama) == "")

    # A workload that is gone takes its slots along, unless its restarts still count.
    counted = {"plimsoll.dev/restarts": '[{"at": 1, "incident": "x"}]'}
    spec = {"renewTime": "2999-01-01T00:00:00.000000Z"}
    kubectl.patch("lease", vllm, {"metadata": {"annotations": counted}, "spec": spec})
    kubectl("delete", "deployment/vllm", "statefulset/llama", "--wait=false")
    eventually(lambda: kubectl.get("lease", llama) is None, LISTED_S)
    assert kubectl.get("lease", vllm)
    assert kubectl.get("lease", "engines.policy-restart-0"), "the policy's own"


def child(role: str, revision: str) -> dict[str, Any]:
    """A role of a DisaggregatedSet: its controller names it by the revision."""
    made = workload(f"llama-{revision}-{role}", 1, "StatefulSet")
    labels = made["spec"]["template"]["metadata"]["labels"]
    del labels["llm-d.ai/role"]
    prefix = "disaggregatedset.x-k8s.io"
    labels |= {f"{prefix}/name": "llama", f"{prefix}/role": role, f"{prefix}/revision": revision}
    return made


@pytest.mark.usefixtures("slots_of_own_pod")
def test_a_rollout_of_a_graph_keeps_the_slots_and_budgets_of_its_roles(
    kubectl: Any, start: Callable[..., Any], eventually: Any
) -> None:
    graph, counted = WorkloadRef("DisaggregatedSet", "llama"), "plimsoll.dev/restarts"
    (prefill,), (decode,), (both,) = (
        make_slot_names("engines", SlotOwner(graph, role), 1)
        for role in (PodRole.PREFILL, PodRole.DECODE, None)
    )
    start()
    kubectl.apply(policy(), child("prefill", "r1"), child("decode", "r1"))
    eventually(lambda: replicas(kubectl, prefill) == ["llama-r1-prefill-0"], LISTED_S)
    eventually(lambda: replicas(kubectl, decode) == ["llama-r1-decode-0"], LISTED_S)
    restarts = {counted: '[{"at": 1, "incident": "x"}]'}
    kubectl.patch("lease", prefill, {"metadata": {"annotations": restarts}})

    kubectl.apply(child("prefill", "r2"))
    kubectl("delete", "statefulset/llama-r1-prefill", "--wait=false")
    eventually(lambda: replicas(kubectl, prefill) == ["llama-r2-prefill-0"], LISTED_S)
    annotations = kubectl.get("lease", prefill)["metadata"]["annotations"]
    assert annotations[counted] == restarts[counted], "the next revision has the same budget"
    roles = parse_roles(annotations["plimsoll.dev/roles"])
    assert roles[PodRole.PREFILL] == ("llama-r2-prefill-0",)
    assert roles[PodRole.DECODE] == ("llama-r1-decode-0",), "with whom it exchanges KV blocks"
    eventually(lambda: of_workload(kubectl, "llama")["supervised"] == 2, LISTED_S)
    assert of_workload(kubectl, "llama")["kind"] == "DisaggregatedSet"

    kubectl.apply(policy(scope="Graph"))
    shared = ["llama-r1-decode-0", "llama-r2-prefill-0"]
    eventually(lambda: replicas(kubectl, both) == shared, LISTED_S)
    service = kubectl.get("service", make_members_service_name("engines"))
    assert service["spec"]["selector"] == {"plimsoll.dev/policy": "engines"}


def test_a_leak_in_most_replicas_of_a_revision_is_told(
    kubectl: Any, start: Callable[..., Any], eventually: Any
) -> None:
    start()
    kubectl.apply(policy(), workload("vllm", 3))
    eventually(lambda: len(pods(kubectl, "vllm")) == 3)
    eventually(lambda: of_workload(kubectl, "vllm")["selected"] == 3, LISTED_S)
    # Somebody's claim to be of another workload changes nothing.
    for number, pod in enumerate(pods(kubectl, "vllm")[:2]):
        leaking(kubectl, pod, "vllm" if number else "other")

    def condition() -> dict[str, Any]:
        found = status(kubectl).get("conditions", [])
        return next((one for one in found if one["type"] == "SuspectRevision"), {})

    eventually(lambda: condition().get("status") == "True", LISTED_S)
    template = kubectl.list("pods", "of=vllm")[0]["metadata"]["labels"]["pod-template-hash"]
    assert condition()["message"].startswith("Deployment/vllm: HostGrowth in anonymous in 2 of 3")
    assert f"revision {template} since {OPENED}" in condition()["message"]
    shown = of_workload(kubectl, "vllm")
    assert shown["suspectRevision"]["revision"] == template
    assert shown["openIncidents"] == 2
    events = eventually(
        lambda: [one for one in kubectl.list("events") if one["reason"] == "SuspectRevision"]
    )
    assert [one["involvedObject"]["kind"] for one in events] == ["SupervisionPolicy"]

    # Another revision has not leaked yet.
    image = [{"name": "engine", "image": "vllm/vllm-openai:v0.25.0"}]
    patch = {"spec": {"template": {"spec": {"containers": image}}}}
    kubectl("patch", "deployment", "vllm", "-p", str(patch).replace("'", '"'))
    eventually(lambda: condition().get("status") == "False", LISTED_S)


def test_a_pod_is_replaced_within_its_workloads_disruption_budget(
    kubectl: Any, start: Callable[..., Any], eventually: Any
) -> None:
    operator = start()
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "vllm"},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"of": "vllm"}}},
    }
    kubectl.apply(budget, policy(), workload("vllm", 2))
    first, _ = eventually(lambda: two(pods(kubectl, "vllm")))
    play_ready(kubectl, "vllm")
    bare = workload("bare", 1)["spec"]["template"]
    kubectl.apply({"apiVersion": "v1", "kind": "Pod"} | bare
                  | {"metadata": bare["metadata"] | {"name": "bare"}})  # fmt: skip
    eventually(lambda: status(kubectl).get("supervised") == 3, LISTED_S)
    step = {"time": OPENED, "step": "PodReplace", "outcome": "Requested"}
    for pod, of in ((first, "vllm"), ("bare", "bare")):
        leaking(kubectl, pod, of, "Restarting", timeline=[step])
    asked = 'plimsoll_operator_writes_total{kind="Pod",verb="evict"}'
    eventually(lambda: operator.metric(asked) >= 1, LISTED_S)
    assert first in pods(kubectl, "vllm"), "the budget keeps it"

    # Whether or not the operator can apply the policy's objects.
    name = make_policy_object_name("engines")
    kubectl.patch("configmap", name, {"metadata": {"ownerReferences": None}})
    eventually(lambda: kubectl.holds("engines", "plsp", Ready="NameConflict"), LISTED_S)
    kubectl.patch("pdb", "vllm", {"spec": {"maxUnavailable": 1}})
    eventually(lambda: first not in pods(kubectl, "vllm"), LISTED_S)
    kubectl.delete("configmap", name)
    kubectl.run("delete", "pod", first, "--force", "--grace-period=0")
    eventually(
        lambda: (
            kubectl.get("leakincident", f"leak-{first}")["status"].get("outcome") == "PodReplaced"
        ),
        90,
    )
    eventually(lambda: two(pods(kubectl, "vllm")))
    assert pods(kubectl, "bare") == ["bare"], "nothing would create it anew"


def two(found: list[str]) -> list[str]:
    return found if len(found) == 2 else []


def play_ready(kubectl: Any, name: str) -> None:
    """The workload's pods as a kubelet would report them."""
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    for pod in pods(kubectl, name):
        kubectl.patch("pod", pod, {"status": ready}, "status")
