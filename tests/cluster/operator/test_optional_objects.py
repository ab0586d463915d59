"""Objects that a manifest may ask for come and go on a real API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

ASKED = {
    "networkPolicy": {"enabled": True},
    "service": {"headless": True},
    "observability": {"podMonitor": {"enabled": True}},
    "autoscaling": {"minReplicas": 2, "maxReplicas": 5, "target": {"cpuPercent": 80}},
}
NAMES = [
    ("networkpolicy", "tiny"),
    ("service", "tiny-replicas"),
    ("hpa", "tiny"),
]


def crd_of_a_pod_monitor() -> dict[str, Any]:
    """As much of the Prometheus operator's definition as makes the API be there."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "podmonitors.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"},
            "versions": [version],
        },
    }


def test_what_is_asked_for_comes_and_goes(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start("--resync", "2")
    spec = manifest["spec"]
    kubectl.apply(manifest | {"spec": spec | ASKED})
    for kind, name in NAMES:
        eventually(lambda k=kind, n=name: kubectl.get(k, n))
    eventually(lambda: kubectl.get("deployment", "tiny")["spec"]["replicas"] == 2)
    complete = eventually(lambda: kubectl.condition("tiny", "ObjectsComplete"))
    assert (complete["status"], complete["reason"]) == ("False", "APINotInstalled"), complete
    assert "PodMonitor" in complete["message"]

    # What the autoscaler sets stays, also when something else of the Deployment changes.
    kubectl("scale", "deployment", "tiny", "--replicas=4")
    kubectl.patch("plinf", "tiny", {"spec": {"rollout": {"progressDeadline": "333s"}}})
    changed = eventually(
        lambda: (seen := spec_of(kubectl))["progressDeadlineSeconds"] == 333 and seen
    )
    assert changed["replicas"] == 4

    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(crd_of_a_pod_monitor()))
    try:
        eventually(lambda: kubectl.condition("tiny", "ObjectsComplete")["status"] == "True", 30)
        assert kubectl.get("podmonitor", "tiny")["spec"]["podMetricsEndpoints"]

        nothing = dict.fromkeys(ASKED) | {"networkPolicy": {"enabled": False}}
        kubectl.patch("plinf", "tiny", {"spec": nothing})
        for kind, name in [*NAMES, ("podmonitor", "tiny")]:
            eventually(lambda k=kind, n=name: kubectl.get(k, n) is None)
        eventually(lambda: kubectl.get("deployment", "tiny")["spec"]["replicas"] == 1)
    finally:
        kubectl("delete", "crd", "podmonitors.monitoring.coreos.com", "--wait=false")


def spec_of(kubectl: Any) -> dict[str, Any]:
    found: dict[str, Any] = kubectl.get("deployment", "tiny")["spec"]
    return found


def test_any_character_arrives(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    """Server-side apply reads YAML, which has no surrogate pairs and forbids some characters."""
    start()
    argument = "--name=é🚢\x7f\x85\u2028\ufeff"
    manifest["spec"]["engine"]["args"].append(argument)
    kubectl.apply(manifest)
    found = eventually(lambda: kubectl.get("deployment", "tiny"))
    command = found["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-1] == argument
