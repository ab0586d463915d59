"""A SupervisionPolicy over pods that something else made, on a real API server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from plimsoll_api import supervisor_config
from plimsoll_api.times import parse_rfc3339

SELECTOR = {"matchLabels": {"app": "vllm"}}
REST_S = 30.0
LISTED_S = 60.0
"""The operator learns of a change at once, and the machine may be busy."""


def policy(name: str = "engines", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": name},
        "spec": {"selector": SELECTOR} | spec,
    }


def pod(name: str, supervisor: str = "", account: str = "default", **annotations: str) -> Any:
    """A pod as a Deployment's; ``supervisor`` names the policy whose supervisor it has."""
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    sidecar = {"name": "supervisor", "image": "none", "restartPolicy": "Always"}
    server = {"name": "server", "image": "none", "args": ["vllm", "serve", "m"]}
    labels = {"app": "vllm"} | ({"plimsoll.dev/policy": supervisor} if supervisor else {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {
            "serviceAccountName": account,
            "nodeSelector": {"plimsoll.dev/no-node": "true"},
            "initContainers": [sidecar | {"securityContext": restricted}] if supervisor else [],
            "containers": [server | {"securityContext": restricted}],
        },
    }


def status(kubectl: Any, name: str = "engines") -> dict[str, Any]:
    found: dict[str, Any] = (kubectl.get("plsp", name) or {}).get("status") or {}
    return found


def conflicting(kubectl: Any, name: str) -> dict[str, Any]:
    """The condition of that type once it is true, else nothing."""
    found: dict[str, Any] = kubectl.conditions(name, "plsp").get("Conflicting", {})
    return found if found.get("status") == "True" else {}


COUNTS = ("selected", "supervised", "waitingForRestart", "refused")


def counts(kubectl: Any, name: str = "engines") -> tuple[Any, ...]:
    found = status(kubectl, name)
    return tuple(found.get(field) for field in COUNTS)


def counted(kubectl: Any, wanted: tuple[int, ...], name: str = "engines") -> dict[str, Any]:
    """The status once its counts are as wanted, else nothing."""
    found = status(kubectl, name)
    return found if tuple(found.get(field) for field in COUNTS) == wanted else {}


def owned(kubectl: Any) -> list[tuple[str, str]]:
    found = kubectl.list("configmaps,leases,roles,rolebindings", "plimsoll.dev/policy=engines")
    return sorted((one["kind"], one["metadata"]["name"]) for one in found)


def wait_for_account(kubectl: Any, eventually: Any) -> None:
    """Pods need their namespace's default account, which a controller makes."""
    eventually(lambda: kubectl.get("serviceaccount", "default"))


def test_the_whole_life_of_a_policy(
    kubectl: Any, start: Callable[..., Any], eventually: Any
) -> None:
    operator = start()
    wait_for_account(kubectl, eventually)
    kubectl("create", "serviceaccount", "vllm")
    refusal = {"plimsoll.dev/not-supervised": "no container runs vLLM or SGLang"}
    kubectl.apply(
        pod("vllm-0", supervisor="engines", account="vllm"),
        pod("vllm-1"),
        pod("nginx", **refusal),
    )
    kubectl.apply(policy(memory={"host": {"growthBudget": "2Gi"}}))

    found = eventually(lambda: counted(kubectl, (3, 1, 1, 1)), LISTED_S)
    assert found["refusals"] == [{"pod": "nginx", "reason": "no container runs vLLM or SGLang"}]
    told = {one["type"]: one for one in found["conditions"]}
    # The only pod with a supervisor has no node.
    assert (told["Ready"]["status"], told["Ready"]["reason"]) == ("False", "Unschedulable")
    assert "1 of 3 selected pods are supervised" in told["Ready"]["message"]
    assert told["Conflicting"]["status"] == "False"
    made = [
        ("ConfigMap", "engines.policy"),
        ("Lease", "engines.policy-restart-0"),
        ("Role", "engines.policy"),
        ("RoleBinding", "engines.policy"),
    ]
    eventually(lambda: owned(kubectl) == made, LISTED_S)
    subjects = kubectl.get("rolebinding", "engines.policy")["subjects"]
    assert [one["name"] for one in subjects] == ["vllm"], "of the supervised pod alone"
    config = read_config(kubectl)
    assert config.memory.host is not None
    assert config.memory.host.growth_bytes == 2 << 30
    row = kubectl("get", "plsp", "engines").splitlines()
    assert row[0].split()[:6] == [
        "NAME", "SELECTED", "SUPERVISED", "WAITING", "REFUSED", "REASON",
    ]  # fmt: skip
    assert row[1].split()[:6] == ["engines", "3", "1", "1", "1", "Unschedulable"]

    # Nothing is written while nothing changes, and an edit by somebody else is put back.
    writes, version = operator.metric("plimsoll_operator_writes"), resource_version(kubectl)
    kubectl.apply(pod("other") | {"metadata": {"name": "other", "labels": {"app": "other"}}})
    lists = operator.metric("plimsoll_operator_requests")
    eventually(lambda: operator.metric("plimsoll_operator_requests") > lists, LISTED_S)
    assert operator.metric("plimsoll_operator_writes") == writes
    assert resource_version(kubectl) == version
    kubectl.patch("configmap", "engines.policy", {"data": {"supervisor.json": "{}"}})
    eventually(
        lambda: "growth_bytes" in str(kubectl.get("configmap", "engines.policy")["data"]), LISTED_S
    )

    kubectl.patch("plsp", "engines", {"spec": {"memory": {"host": {"growthBudget": "3Gi"}}}})
    eventually(lambda: growth(kubectl) == 3 << 30, LISTED_S)
    kubectl.patch("plsp", "engines", {"spec": {"supervision": {"maxUnavailable": 2}}})
    eventually(lambda: ("Lease", "engines.policy-restart-1") in owned(kubectl), LISTED_S)
    kubectl.patch("plsp", "engines", {"spec": {"supervision": {"maxUnavailable": 1}}})
    eventually(lambda: ("Lease", "engines.policy-restart-1") not in owned(kubectl), LISTED_S)

    kubectl("delete", "pod", "vllm-0", "--force", "--grace-period=0")
    eventually(lambda: counts(kubectl) == (2, 0, 1, 1), LISTED_S)
    assert kubectl.conditions("engines", "plsp")["Ready"]["reason"] == "NoPodSupervised"
    waiting = 'plimsoll_operator_policy_pods{state="Waiting",supervisionpolicy='
    assert operator.metric(waiting) == 1
    # Nobody needs it any more.
    eventually(lambda: ("RoleBinding", "engines.policy") not in owned(kubectl), LISTED_S)

    kubectl("delete", "plsp", "engines", "--timeout=10s")
    # The garbage collector looks for new kinds every 30 s, and this one may be younger.
    eventually(lambda: owned(kubectl) == [], 75)
    assert kubectl.get("pod", "vllm-1"), "pods are not the policy's"


def test_the_last_pod_of_an_account_keeps_its_rights_while_it_drains(
    kubectl: Any, start: Callable[..., Any], eventually: Any
) -> None:
    """Its supervisor gives its slot back and closes its incident."""
    start()
    wait_for_account(kubectl, eventually)
    one = pod("vllm-0", supervisor="engines")
    one["spec"] |= {"nodeName": "a-node", "nodeSelector": {}}  # only a kubelet would end it
    kubectl.apply(one, policy())
    binding = ("RoleBinding", "engines.policy")
    eventually(lambda: binding in owned(kubectl), LISTED_S)

    kubectl("delete", "pod", "vllm-0", "--wait=false", "--grace-period=300")
    eventually(lambda: counts(kubectl) == (0, 0, 0, 0), LISTED_S)
    assert kubectl.get("pod", "vllm-0")["metadata"]["deletionTimestamp"]
    assert binding in owned(kubectl)

    kubectl("delete", "pod", "vllm-0", "--force", "--grace-period=0")
    eventually(lambda: binding not in owned(kubectl), LISTED_S)


def resource_version(kubectl: Any) -> str:
    return str(kubectl.get("plsp", "engines")["metadata"]["resourceVersion"])


def read_config(kubectl: Any) -> supervisor_config.SupervisorConfig:
    data = kubectl.get("configmap", "engines.policy")["data"]
    return supervisor_config.decode_config(data["supervisor.json"].encode())


def growth(kubectl: Any) -> int:
    host = read_config(kubectl).memory.host
    return host.growth_bytes if host else 0


def test_two_policies_that_select_one_pod_both_say_so(
    kubectl: Any, start: Callable[..., Any], eventually: Any
) -> None:
    start()
    wait_for_account(kubectl, eventually)
    kubectl.apply(pod("vllm-0"))
    kubectl.apply(policy("zeta"))
    eventually(lambda: counts(kubectl, "zeta") == (1, 0, 1, 0), LISTED_S)
    expression = {"key": "app", "operator": "In", "values": ["vllm", "sglang"]}
    # The API server counts in seconds: of two policies of one second the name decides.
    eventually(lambda: age(kubectl, "zeta") > 1.5)
    kubectl.apply(policy("alpha", selector={"matchExpressions": [expression]}))

    younger = eventually(lambda: counted(kubectl, (1, 0, 0, 1), "alpha"), LISTED_S)
    (refused,) = younger["refusals"]
    assert "the older SupervisionPolicy zeta" in refused["reason"]
    for name, other in (("zeta", "alpha"), ("alpha", "zeta")):
        found = eventually(lambda n=name: conflicting(kubectl, n), LISTED_S)
        assert found["reason"] == "PodsSelectedTwice"
        assert found["message"].startswith(f"{other} also selects vllm-0: ")
    assert counts(kubectl, "zeta") == (1, 0, 1, 0), "the older one has it"

    kubectl("delete", "plsp", "zeta", "--timeout=10s")
    eventually(lambda: counts(kubectl, "alpha") == (1, 0, 1, 0), LISTED_S)
    eventually(lambda: kubectl.holds("alpha", "plsp", Conflicting="False"), LISTED_S)


def test_incidents_outlive_their_policy_by_a_stated_time(
    kubectl: Any, start: Callable[..., Any], eventually: Any
) -> None:
    start("--clock=orphans=8")
    kubectl.apply(policy())
    eventually(lambda: status(kubectl).get("observedGeneration"))
    incident = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": "vllm-0-1", "labels": {"plimsoll.dev/policy": "engines"}},
        "spec": {
            "id": "a-1", "workloadRef": {"kind": "Pod", "name": "vllm-0"}, "pod": "vllm-0",
            "container": "server", "epoch": "b:1", "openedAt": "2026-01-01T00:00:00Z",
            "kind": "HostGrowth", "policyRef": {"name": "engines"},
        },
    }  # fmt: skip
    kubectl.apply(incident)
    eventually(lambda: status(kubectl).get("openIncidents") is not None)
    mark = "plimsoll.dev/owner-gone-at"

    def annotations() -> dict[str, str]:
        found = kubectl.get("leakincident", "vllm-0-1")
        return found["metadata"].get("annotations") or {}

    kubectl("delete", "plsp", "engines", "--timeout=10s")
    eventually(lambda: mark in annotations(), LISTED_S)
    kubectl.apply(policy())
    eventually(lambda: mark not in annotations(), LISTED_S)
    kubectl("delete", "plsp", "engines", "--timeout=10s")
    eventually(lambda: mark in annotations(), LISTED_S)
    eventually(lambda: kubectl.get("leakincident", "vllm-0-1") is None, LISTED_S)


def test_policies_at_rest_read_no_pods(
    kubectl: Any, start: Callable[..., Any], eventually: Any
) -> None:
    """One watch of metadata reports all changes, however many policies a namespace has."""
    operator = start()
    wait_for_account(kubectl, eventually)
    kubectl.apply(*(pod(f"vllm-{number}") for number in range(3)))
    names = [f"engines-{number}" for number in range(10)]
    kubectl.apply(*(policy(name) for name in names))
    for name in names:
        eventually(lambda n=name: status(kubectl, n).get("selected") == 3, LISTED_S)
    eventually(lambda: operator.metric("plimsoll_operator_queue_length") == 0)
    before = operator.metric("plimsoll_operator_requests_total")
    time.sleep(REST_S)
    sent = operator.metric("plimsoll_operator_requests_total") - before
    print(f"{sent / REST_S:.2f} requests a second at rest")
    assert sent <= 0.2 * REST_S, "the canary reads each 20 s"

    # What changes is read once, by each of the policies that select it.
    kubectl("label", "pod", "vllm-0", "app-")
    for name in names:
        eventually(lambda n=name: status(kubectl, n)["selected"] == 2)


def age(kubectl: Any, name: str) -> float:
    created = kubectl.get("plsp", name)["metadata"]["creationTimestamp"]
    return time.time() - parse_rfc3339(created)
