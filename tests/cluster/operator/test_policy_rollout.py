"""``spec.rollout: Restart`` for workloads that are there before their policy, on a real cluster."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from tests.cluster.operator.test_adopt import DEPLOYMENT, LISTED_S, counts

RESTARTED_AT = "kubectl.kubernetes.io/restartedAt"


def policy(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": "engines"},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}} | spec,
    }


def other(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    """Another workload with the pods of the Deployment."""
    template = copy.deepcopy(DEPLOYMENT["spec"])["template"]  # type: ignore[index]
    made: dict[str, Any] = {"kind": kind, "metadata": {"name": name}}
    if kind == "Pod":
        labels = template["metadata"]["labels"]
        return made | {"apiVersion": "v1", "metadata": {"name": name, "labels": labels},
                       "spec": template["spec"]}  # fmt: skip
    if kind == "Job":
        template["spec"]["restartPolicy"] = "Never"
        return made | {"apiVersion": "batch/v1", "spec": {"template": template}}
    selector = {"matchLabels": {"app": "vllm", "of": name}}
    template["metadata"]["labels"] = selector["matchLabels"]
    return made | {"apiVersion": "apps/v1", "spec": spec | {
        "selector": selector, "serviceName": name, "template": template}}  # fmt: skip


def workload(kubectl: Any, name: str | None) -> dict[str, Any]:
    shown = ((kubectl.get("plsp", "engines") or {}).get("status") or {}).get("workloads") or []
    found = [one for one in shown if one.get("name") == name]
    return found[0] if found else {}


def restarted(kubectl: Any, kind: str, name: str) -> bool:
    metadata = kubectl.get(kind, name)["spec"]["template"]["metadata"]
    return RESTARTED_AT in (metadata.get("annotations") or {})


def test_the_policy_asks_each_workload_once(
    kubectl: Any, flags: tuple[str, ...], start: Callable[..., Any], eventually: Any
) -> None:
    operator = start(*flags)
    # Of the four, two have a rolling restart. No kubelet runs here: all pods at once.
    own = {"podManagementPolicy": "Parallel", "replicas": 1}
    kubectl.apply(DEPLOYMENT, other("StatefulSet", "llama", **own), other("Job", "batch"))
    eventually(lambda: kubectl.get("serviceaccount", "default"))
    kubectl.apply(other("Pod", "bare"))
    eventually(lambda: len(kubectl.list("pods", "app=vllm")) == 5)
    kubectl.apply(policy())
    eventually(lambda: counts(kubectl) == (5, 0, 5, 0), LISTED_S)
    requests = operator.metric("plimsoll_operator_requests")
    eventually(lambda: operator.metric("plimsoll_operator_requests") > requests + 1, LISTED_S)
    assert not restarted(kubectl, "deployment", "vllm"), "OnDelete is the default"
    assert "message" not in workload(kubectl, "vllm")

    kubectl.patch("plsp", "engines", {"spec": {"rollout": "Restart"}})
    eventually(lambda: counts(kubectl) == (5, 3, 2, 0), LISTED_S)
    for kind, name, pods in (("deployment", "vllm", 2), ("statefulset", "llama", 1)):
        assert restarted(kubectl, kind, name)
        shown = workload(kubectl, name)
        assert (shown["selected"], shown["supervised"]) == (pods, pods)
        done = kubectl("get", kind, name, "-o", "json", "--show-managed-fields")
        managers = json.loads(done)["metadata"]["managedFields"]
        (ours,) = [one for one in managers if one["manager"] == "plimsoll-operator-rollout"]
        assert ours["operation"] == "Apply"
        assert ours["fieldsV1"].keys() == {"f:metadata", "f:spec"}
        assert set(ours["fieldsV1"]["f:spec"]["f:template"]) == {"f:metadata"}
    assert "request a rolling restart of a Job" in workload(kubectl, "batch")["message"]
    assert "these pods belong to no workload" in workload(kubectl, None)["message"]
    assert workload(kubectl, None)["kind"] == "Pod"
    reasons = {one["reason"] for one in kubectl.list("events")}
    assert "RestartRequested" in reasons

    # A later generation restarts nothing that is supervised, and another operator does not, either.
    versions = generations(kubectl)
    kubectl.patch("plsp", "engines", {"spec": {"supervision": {"maxUnavailable": 2}}})
    assert operator.stop() == 0
    again = start(*flags)
    eventually(
        lambda: seen(kubectl) == kubectl.get("plsp", "engines")["metadata"]["generation"], 60
    )
    requests = again.metric("plimsoll_operator_requests")
    eventually(lambda: again.metric("plimsoll_operator_requests") > requests + 10, LISTED_S)
    assert generations(kubectl) == versions


def generations(kubectl: Any) -> list[int]:
    pairs = (("deployment", "vllm"), ("statefulset", "llama"))
    return [kubectl.get(*pair)["metadata"]["generation"] for pair in pairs]


def seen(kubectl: Any) -> int | None:
    status = kubectl.get("plsp", "engines").get("status") or {}
    found: int | None = status.get("observedGeneration")
    return found
