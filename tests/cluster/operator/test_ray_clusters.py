"""The Service that lists the pods of a RayCluster, on a real API server."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plimsoll_api.workloads import make_ray_service_name
from tests import ray_clusters
from tests.cluster.operator.test_supervision_policy import (
    LISTED_S,
    pod,
    policy,
    wait_for_account,
)

NAME = "llm"
SERVICE = make_ray_service_name("engines", NAME)
HEAD, WORKER, STRANGER = "llm-head-x7k2p", "llm-gpu-worker-b2f9q", "stranger"


@pytest.fixture
def ray_cluster(kubectl: Any) -> Iterator[dict[str, Any]]:
    """A RayCluster."""
    kubectl.apply(ray_clusters.definition())
    kubectl.established(ray_clusters.DEFINITION)
    kubectl.apply(ray_clusters.cluster(NAME))
    yield kubectl.get("raycluster", NAME)
    kubectl("delete", "customresourcedefinition", ray_clusters.DEFINITION)


def listed(kubectl: Any) -> set[str]:
    """Names of the pods that the Service lists."""
    slices = kubectl.list("endpointslices", f"kubernetes.io/service-name={SERVICE}")
    return {
        endpoint["targetRef"]["name"] for one in slices for endpoint in one.get("endpoints") or ()
    }


def test_the_operator_lists_the_pods_of_a_ray_cluster(
    kubectl: Any, start: Callable[..., Any], eventually: Any, ray_cluster: dict[str, Any]
) -> None:
    start()
    wait_for_account(kubectl, eventually)
    supervised = pod("any", supervisor="engines")
    kubectl.apply(
        ray_clusters.pod_of(ray_cluster, supervised, "head", HEAD),
        ray_clusters.pod_of(ray_cluster, supervised, "worker", WORKER),
        ray_clusters.pod_of(ray_cluster, pod("any"), "worker", STRANGER),
        policy(),
    )
    service = eventually(lambda: kubectl.get("service", SERVICE), LISTED_S)
    (owner,) = service["metadata"]["ownerReferences"]
    wanted = kubectl.get("plsp", "engines")["metadata"]["uid"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("SupervisionPolicy", wanted, True)
    spec = service["spec"]
    assert spec["selector"] == {"plimsoll.dev/policy": "engines", "ray.io/cluster": NAME}
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
    assert [one["port"] for one in spec["ports"]] == [9464]

    # Pods that are not ready are listed, and one without a supervisor is not.
    for number, name in enumerate((HEAD, WORKER, STRANGER), start=1):
        address = f"10.1.2.{number}"
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        kubectl.patch("pod", name, {"status": status}, "status")
    eventually(lambda: listed(kubectl) == {HEAD, WORKER}, LISTED_S)

    # An edit by somebody else is put back, and the Service goes with the last supervised pod.
    kubectl.patch("service", SERVICE, {"spec": {"publishNotReadyAddresses": False}})
    eventually(
        lambda: kubectl.get("service", SERVICE)["spec"].get("publishNotReadyAddresses"), LISTED_S
    )
    kubectl("delete", "pod", HEAD, "--wait=false", "--grace-period=0", "--force")
    eventually(lambda: listed(kubectl) == {WORKER}, LISTED_S)
    kubectl("delete", "pod", WORKER, "--wait=false", "--grace-period=0", "--force")
    eventually(lambda: kubectl.get("service", SERVICE) is None, LISTED_S)
    assert kubectl.get("pod", STRANGER)


def test_a_rule_that_refuses_pods_of_kuberay_stops_the_injection(
    kubectl: Any, start: Callable[..., Any], eventually: Any, webhook: Any
) -> None:
    """KubeRay says so in an Event of its own reasons, and makes its pods from other templates."""
    kubectl.apply(ray_clusters.definition())
    kubectl.established(ray_clusters.DEFINITION)
    try:
        server = {"name": "ray", "image": "none", "args": ["vllm", "serve", "m"]}
        template = {"metadata": {"labels": {"app": "vllm"}}, "spec": {"containers": [server]}}
        made = ray_clusters.cluster(NAME) | {"spec": {"headGroupSpec": {"template": template}}}
        kubectl.apply(made, policy(supervision={"mode": "Observe"}))
        start(*webhook.flags)
        eventually(lambda: kubectl.get("plsp", "engines").get("status"), LISTED_S)
        owner = kubectl.get("raycluster", NAME)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        rule = "failed quota: q: must specify limits.cpu for: supervisor"
        kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": "llm.1"},
                "type": "Warning",
                "reason": "FailedToCreateHeadPod",
                "message": f'Failed to create head Pod ml/, pods "{HEAD}" is forbidden: {rule}',
                "involvedObject": {
                    "apiVersion": owner["apiVersion"],
                    "kind": owner["kind"],
                    "name": NAME,
                    "namespace": owner["metadata"]["namespace"],
                    "uid": owner["metadata"]["uid"],
                },
                "firstTimestamp": now,
                "lastTimestamp": now,
            }
        )

        def stopped() -> bool:
            status = kubectl.get("plsp", "engines").get("status") or {}
            found = {one["type"]: one for one in status.get("conditions") or ()}
            condition = found.get("InjectionStopped") or {}
            return condition.get("reason") == "PodsRefused" and rule in condition["message"]

        eventually(stopped, LISTED_S)
    finally:
        kubectl("delete", "customresourcedefinition", ray_clusters.DEFINITION)
