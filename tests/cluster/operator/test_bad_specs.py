"""The API server refuses a bad manifest itself, with a message that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

GIB2 = {"host": {"growthBudget": "2Gi"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": -1}, "spec.replicas"),
        ({"supervison": {}}, 'unknown field "spec.supervison"'),
        ({"memory": {"host": {"growthBudget": 0}}}, "growthBudget must be more than 0"),
        ({"memory": {"host": {"growthBudget": "0Mi"}}}, "growthBudget must be more than 0"),
        ({"memory": {"device": {"growthBudget": "-1Gi"}}}, "growthBudget must be more than 0"),
        ({"memory": {"host": {"growthBudget": "64 Mi"}}}, "spec.memory.host.growthBudget"),
        ({"memory": {"host": {}}}, "spec.memory.host.growthBudget: Required"),
        (
            {"memory": {"host": {"growthBudget": "2Gi", "limit": "1Gi"}}},
            "growthBudget must not be larger than limit",
        ),
        (
            {"memory": GIB2, "engine": {"resources": {"limits": {"memory": "1Gi"}}}},
            "memory.host.growthBudget must not be larger than engine.resources.limits.memory",
        ),
        ({"model": {"uri": "hf://org/model"}}, "model.uri must be file:///ABSOLUTE/PATH or pvc://"),
        ({"model": {"uri": "file://relative"}}, "model.uri must be"),
        ({"model": {"uri": "file:///a/../../etc"}}, "model.uri must be"),
        ({"supervision": {"ladder": ["WorkerRestart", "Trim"]}}, "ladder must be in the order"),
        ({"supervision": {"ladder": ["Trim", "Trim"]}}, "ladder must not name an action twice"),
        ({"supervision": {"ladder": ["Reboot"]}}, "spec.supervision.ladder[0]"),
        ({"supervision": {"stall": {"timeout": "soon"}}}, "spec.supervision.stall.timeout"),
        ({"supervision": {"stall": {"timeout": "0s"}}}, "the duration must be more than 0"),
        ({"supervision": {"maxUnavailable": 0}}, "spec.supervision.maxUnavailable"),
        ({"engine": {"type": "magic"}}, "spec.engine.type"),
        ({"engine": {"port": 8001}}, "engine.port must not be 8001"),
    ],
)
def test_refused_with_the_field(
    kubectl: Any, manifest: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    spec = {"model": manifest["spec"]["model"]} | change
    done = kubectl.run("create", "-f", "-", stdin=json.dumps(manifest | {"spec": spec}))
    assert done.returncode != 0
    assert message in done.stderr
    assert kubectl.get("plinf", "tiny") is None


@pytest.mark.parametrize("name", ["a" * 51, "1st", "a.b"])
def test_a_name_that_no_service_can_have(kubectl: Any, manifest: dict[str, Any], name: str) -> None:
    body = json.dumps(manifest | {"metadata": {"name": name}})
    done = kubectl.run("create", "-f", "-", stdin=body)
    assert "metadata.name must be at most 50 lower-case letters" in done.stderr


def test_the_least_manifest_gets_its_defaults(kubectl: Any, manifest: dict[str, Any]) -> None:
    kubectl.apply(manifest | {"spec": {"model": manifest["spec"]["model"]}})
    spec = kubectl.get("plinf", "tiny")["spec"]
    assert spec["replicas"] == 1
    assert spec["supervision"]["mode"] == "Observe"
    assert spec["supervision"]["ladder"] == ["Trim", "WorkerRestart", "EngineRestart"]
    assert spec["memory"] == {"warmup": "60s"}
