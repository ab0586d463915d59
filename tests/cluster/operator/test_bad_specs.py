"""The API server refuses a bad manifest itself, with a message that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.objects import Refused
from tests.pod_templates import SAFE

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
        (
            {"model": {"uri": "hf://organisation"}},
            "model.uri must be file:///ABSOLUTE/PATH, pvc://",
        ),
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
        (
            {"engine": {"type": "vllm", "image": "i", "apiKeySecretRef": {"name": "s"}}},
            "engine.apiKeySecretRef is for engine.type plimsoll only",
        ),
        (
            {"probe": {"enabled": True}},
            "probe.enabled must be false for an engine that speaks the admin protocol",
        ),
        (
            {
                "probe": {"enabled": True},
                "engine": {"type": "custom", "image": "i", "adminContract": "Plimsoll"},
            },
            "probe.enabled must be false for an engine that speaks the admin protocol",
        ),
        (
            {
                "probe": {"enabled": True},
                "engine": {
                    "type": "vllm",
                    "image": "i",
                    "env": [{"name": "PYTHONPATH", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}],
                },
            },
            "with probe.enabled, PYTHONPATH must have a value, not valueFrom",
        ),
        ({"probe": {"enabled": True, "image": ""}}, "spec.probe.image"),
        (
            {"engine": {"args": ["--port", "9000"]}},
            "engine.args must not have --port: set engine.port",
        ),
        (
            {"engine": {"args": ["--dtype=auto", "--served-model-name=x"]}},
            "engine.args must not have --served-model-name: set model.servedName",
        ),
        (
            {"engine": {"type": "vllm", "image": "i", "args": ["--served_model_name=x"]}},
            "engine.args must not have --served-model-name",
        ),
        (
            {"engine": {"type": "sglang", "image": "i", "args": ["--model-path=/m"]}},
            "engine.args must not have --model-path: set model.uri",
        ),
        (
            {"engine": {"args": ["--api-key-file=/k"], "apiKeySecretRef": {"name": "s"}}},
            "engine.args must not have --api-key-file: engine.apiKeySecretRef sets it",
        ),
        (
            {"engine": {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}}},
            "requests.cpu must not be above its limit",
        ),
        (
            {
                "supervisor": {
                    "resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}}
                }
            },
            "requests.memory must not be above its limit",
        ),
        (
            {"engine": {"resources": {"requests": {"nvidia.com/gpu": 1}}}},
            "requests.nvidia.com/gpu must be the same as its limit",
        ),
        (
            {
                "engine": {
                    "resources": {
                        "requests": {"nvidia.com/gpu": 1},
                        "limits": {"nvidia.com/gpu": 2},
                    }
                }
            },
            "requests.nvidia.com/gpu must be the same as its limit",
        ),
        (
            {"engine": {"resources": {"limits": {"nvidia.com/gpu": "500m"}}}},
            "limits.nvidia.com/gpu must be a whole number of devices",
        ),
        (
            {"engine": {"resources": {"limits": {"memory": "-1Gi"}}}},
            "spec.engine.resources.limits.memory",
        ),
    ],
)
def test_refused_with_the_field(
    admin: Any, manifest: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    spec = {"model": manifest["spec"]["model"]} | change
    with pytest.raises(Refused, match=re.escape(message)):
        admin.create(manifest | {"spec": spec})
    assert admin.get("plinf", "tiny") is None


@pytest.mark.parametrize(
    "engine",
    [
        {"args": ["--api-key-file=/k", "--portable", "port=1", "--max-model-len=9"]},
        {"type": "custom", "image": "i", "args": ["--port=9000", "--model", "x"]},
        {"resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 2, "hugepages-2Mi": "4Mi"}}},
        {"resources": {"requests": {"cpu": "0.5", "memory": 4096}, "limits": {"cpu": "500m"}}},
        {"resources": {"requests": {"a.b/c": "2"}, "limits": {"a.b/c": 2}}},
    ],
)
def test_what_only_looks_like_it_is_taken(
    admin: Any, manifest: dict[str, Any], engine: dict[str, Any]
) -> None:
    spec = {"model": manifest["spec"]["model"], "engine": engine}
    admin.create(manifest | {"spec": spec}, dry_run=True)


@pytest.mark.parametrize("name", ["a" * 51, "1st", "a.b"])
def test_a_name_that_no_service_can_have(admin: Any, manifest: dict[str, Any], name: str) -> None:
    with pytest.raises(Refused, match=r"metadata\.name must be at most 50 lower-case letters"):
        admin.create(manifest | {"metadata": {"name": name}})


def test_the_least_manifest_gets_its_defaults(kubectl: Any, manifest: dict[str, Any]) -> None:
    kubectl.apply(manifest | {"spec": {"model": manifest["spec"]["model"]}})
    spec = kubectl.get("plinf", "tiny")["spec"]
    assert spec["replicas"] == 1
    assert spec["supervision"]["mode"] == "Observe"
    assert spec["supervision"]["ladder"] == ["Trim", "WorkerRestart", "EngineRestart"]
    assert spec["memory"] == {"sharedDevice": False, "warmup": "1m"}


def test_a_person_reads_what_a_field_is_for(admin: Any) -> None:
    said = admin("explain", "inferenceservices.spec.rollout.revision")
    assert "ENUM" in said
    assert "returns to the last good revision" in " ".join(said.split())
    assert "<Object> -required-" in admin("explain", "inferenceservices.spec")


@pytest.mark.parametrize(
    ("template", "reason", "message"),
    [
        ({"spec": "none"}, "InvalidSpec", "spec.podTemplate"),
        ({"spec": {"nonsense": 1}}, "ApplyFailed", ".spec.template.spec.nonsense"),
        (
            {"spec": {"containers": [{"name": "extra", "securityContext": SAFE}]}},
            "ApplyFailed",
            "containers[1].image",
        ),
        ({"spec": {"hostNetwork": True}}, "InvalidSpec", "spec.podTemplate.spec.hostNetwork"),
    ],
)
def test_a_pod_template_that_cannot_be_is_said_in_the_status(
    kubectl: Any,
    start: Callable[..., Any],
    manifest: dict[str, Any],
    eventually: Any,
    template: dict[str, Any],
    reason: str,
    message: str,
) -> None:
    start()
    manifest["spec"]["podTemplate"] = template
    kubectl.apply(manifest)
    found = eventually(lambda: kubectl.conditions("tiny"))
    ready = found["Ready"]
    assert ready["status"] == "False"
    assert ready["reason"] == reason
    assert message in ready["message"]
    assert found["Stalled"]["status"] == "True"

    kubectl(
        "patch",
        "plinf",
        "tiny",
        "--type=json",
        "-p",
        '[{"op":"remove","path":"/spec/podTemplate"}]',
    )
    eventually(lambda: kubectl.get("deployment", "tiny"), 30)
    eventually(lambda: kubectl.condition("tiny", "Stalled")["status"] == "False")


def test_pods_that_the_namespace_refuses_are_said_in_the_status(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start("--unrestricted-namespace", kubectl.namespace)
    manifest["spec"]["podTemplate"] = {"spec": {"hostIPC": True}}
    kubectl.apply(manifest)
    eventually(lambda: "PodSecurity" in kubectl.condition("tiny", "Ready").get("message", ""))
