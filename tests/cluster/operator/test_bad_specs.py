"""The API server refuses a bad manifest itself, with a message that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.objects import Refused
from tests.pod_templates import SAFE
from tests.unit.api.test_definitions import SERVICES, service


@pytest.mark.parametrize(("change", "message"), SERVICES[:: len(SERVICES) // 5])
def test_the_server_refuses_what_the_definitions_refuse(
    admin: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        admin.create(service(change))
    assert admin.get("plinf", "tiny") is None


def test_the_least_manifest_gets_its_defaults(kubectl: Any, manifest: dict[str, Any]) -> None:
    kubectl.apply(manifest | {"spec": {"model": manifest["spec"]["model"]}})
    spec = kubectl.get("plinf", "tiny")["spec"]
    assert spec["replicas"] == 1
    assert spec["supervision"]["mode"] == "Observe"
    assert spec["supervision"]["ladder"] == ["Trim", "WorkerRestart", "EngineRestart"]
    auto = {"learning": "24h", "limitWithin": "4h"}
    assert spec["memory"] == {"auto": auto, "sharedDevice": False, "warmup": "1m"}


def test_a_person_reads_what_a_field_is_for(admin: Any) -> None:
    said = admin("explain", "inferenceservices.spec.rollout.revision")
    assert "ENUM" in said
    assert "returns to the last good revision" in " ".join(said.split())
    assert "<Object> -required-" in admin("explain", "inferenceservices.spec")


@pytest.mark.parametrize(
    ("template", "reason", "message"),
    [
        ({"spec": {"nonsense": 1}}, "ApplyFailed", ".spec.template.spec.nonsense"),
        (
            {"spec": {"containers": [{"name": "extra", "securityContext": SAFE}]}},
            "ApplyFailed",
            "containers[1].image",
        ),
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
