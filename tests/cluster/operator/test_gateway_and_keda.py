"""Objects of KEDA and of the Gateway API: they come once the cluster has their kinds, and go again.

The definitions are those of these projects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from docs.tools.blocks import ROOT
from tests.cluster.operator.test_fleet_safety import SELECTOR, leaking
from tests.cluster.test_integrations import define
from tests.lab import binaries

PAUSED = "autoscaling.keda.sh/paused-scale-in"


def example(name: str, field: str) -> Any:
    text = (ROOT / "examples" / "integrations" / f"{name}.yaml").read_text()
    return yaml.safe_load(text)["spec"][field]


def test_they_come_and_go_with_the_apis_of_the_cluster(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start("--resync", "2")
    manifest["spec"] |= {
        "gateway": example("gateway", "gateway"),
        "autoscaling": example("keda", "autoscaling"),
    }
    kubectl.apply(manifest)

    def complete() -> Any:
        return kubectl.condition("tiny", "ObjectsComplete")

    eventually(lambda: complete()["reason"] == "APINotInstalled")
    for kind in ("ScaledObject", "InferencePool", "HTTPRoute"):
        assert kind in complete()["message"]
    assert "install KEDA" in complete()["message"]
    eventually(lambda: kubectl.get("deployment", "tiny")["spec"]["replicas"] == 1)

    defined = []
    try:
        defined += define(kubectl, binaries.GATEWAY)
        eventually(lambda: "HTTPRoute" not in complete()["message"], 30)
        assert kubectl.get("httproute", "tiny") is None, "a route to no pool"
        defined += define(kubectl, binaries.INFERENCE, binaries.KEDA)
        eventually(lambda: complete()["status"] == "True", 30)
        pool = kubectl.get("inferencepools.inference.networking.k8s.io", "tiny")["spec"]
        (pod,) = kubectl.list("pods", SELECTOR)
        assert pool["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        route = kubectl.get("httproute", "tiny")["spec"]
        assert route["rules"][0]["backendRefs"][0]["kind"] == "InferencePool"

        def scaled() -> Any:
            return kubectl.get("scaledobject", "tiny")

        assert scaled()["spec"]["minReplicaCount"] == 0
        assert PAUSED not in (scaled()["metadata"].get("annotations") or {})
        leaking(kubectl, "leak", pod["metadata"]["name"])
        eventually(lambda: scaled()["metadata"]["annotations"][PAUSED] == "true")
        kubectl.patch("leakincident", "leak", {"status": {"phase": "Resolved"}}, "status")
        eventually(lambda: PAUSED not in (scaled()["metadata"].get("annotations") or {}))

        # As KEDA does: to zero and back.
        kubectl("scale", "deployment", "tiny", "--replicas=0")
        eventually(lambda: kubectl.holds("tiny", Ready="ScaledToZero"))
        eventually(lambda: "verdicts" not in kubectl.get("plinf", "tiny")["status"])
        kubectl("scale", "deployment", "tiny", "--replicas=1")
        fresh = eventually(lambda: kubectl.list("pods", SELECTOR))
        assert fresh[0]["metadata"]["uid"] != pod["metadata"]["uid"]
        eventually(lambda: kubectl.condition("tiny", "LeakFree")["status"] == "Unknown")

        nothing = {"gateway": None, "autoscaling": None}
        kubectl.patch("plinf", "tiny", {"spec": nothing})
        for kind in ("scaledobject", "inferencepools.inference.networking.k8s.io", "httproute"):
            eventually(lambda kind=kind: kubectl.get(kind, "tiny") is None)
    finally:
        if defined:
            kubectl("delete", "crd", "--wait=false", *defined)


def test_the_pods_of_a_service_have_its_device_claims(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    """Kubernetes' own controller makes a claim for each pod; no driver gives it a device."""
    start()
    text = (ROOT / "examples" / "integrations" / "device-claims.yaml").read_text()
    template, service = yaml.safe_load_all(text)
    manifest["spec"]["engine"] = manifest["spec"].get("engine", {}) | {
        "resources": service["spec"]["engine"]["resources"]
    }
    manifest["spec"]["replicas"] = 2
    kubectl.apply(template, manifest)
    pods = eventually(lambda: len(found := kubectl.list("pods", SELECTOR)) == 2 and found)
    owners = {one["metadata"]["uid"] for one in pods}

    def claims() -> Any:
        found = kubectl.list("resourceclaims")
        return {one["metadata"]["ownerReferences"][0]["uid"] for one in found}

    eventually(lambda: claims() == owners, 40)
    for pod in pods:
        assert pod["spec"]["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    assert kubectl.condition("tiny", "ObjectsComplete")["status"] == "True"
    strategy = kubectl.get("deployment", "tiny")["spec"]["strategy"]["rollingUpdate"]
    assert strategy["maxSurge"] == 0, "a new pod would wait for the device of an old one"
