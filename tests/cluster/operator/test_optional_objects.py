"""Objects that a manifest may ask for come and go on a real API server."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.lab.objects import Refused

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
    assert (complete["status"], complete["reason"]) == ("False", "ApiMissing"), complete
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"autoscaling": {"minReplicas": 3, "maxReplicas": 2, "target": {"cpuPercent": 1}}},
            "autoscaling.minReplicas",
        ),
        ({"autoscaling": {"maxReplicas": 2, "target": {}}}, "needs one of cpuPercent and metric"),
        ({"rollout": {"maxSurge": 0, "maxUnavailable": "0%"}}, "must not both be 0"),
        ({"rollout": {"onLeak": "Panic"}}, "spec.rollout.onLeak"),
        ({"engine": {"type": "vllm"}}, "engine.image is needed"),
        ({"engine": {"adminContract": "Plimsoll"}}, "engine.adminContract is for"),
        ({"model": {"uri": "hf://one"}}, "model.uri must be"),
        (
            {"model": {"uri": "file:///m", "revision": "main"}},
            "model.revision only goes with a model.uri of hf://",
        ),
        ({"disruption": {"maxUnavailable": "some"}}, "spec.disruption.maxUnavailable"),
        ({"disruption": {"maxUnavailable": -1}}, "spec.disruption.maxUnavailable"),
        ({"observability": {"podMonitor": {"interval": "0s"}}}, "must be more than 0"),
    ],
)
def test_a_bad_option_is_refused_with_the_field(
    admin: Any, manifest: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        admin.create(manifest | {"spec": {**manifest["spec"], **change}})
