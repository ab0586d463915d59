"""The rules of ``crds/*.yaml``: a bad manifest is refused with a message that names the field.

The rules are those of the files that ``plimsoll_api/generate.py`` writes, applied by the API
server's own code, and ``plimsoll validate`` must refuse the same without it.
``tests/cluster/operator/test_bad_specs.py`` asks a server some of this.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject.validate import check_object
from plimsoll_operator.plans.service import parse_service
from tests.lab.objects import Refused

if TYPE_CHECKING:
    from tests.lab.definitions import Definitions

ROOT = Path(__file__).parents[3]
SERVICE: dict[str, Any] = yaml.safe_load((ROOT / "examples/tiny.yaml").read_text())
POLICY: dict[str, Any] = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "SupervisionPolicy",
    "metadata": {"name": "engines"},
    "spec": {"selector": {"matchLabels": {"app": "vllm"}}},
}
GIB2 = {"host": {"growthBudget": "2Gi"}}

SERVICES: list[tuple[dict[str, Any], str]] = [
    ({"replicas": -1}, "spec.replicas"),
    ({"supervison": {}}, 'unknown field "spec.supervison"'),
    ({"memory": {"host": {"growthBudget": 0}}}, "growthBudget must be at least 1Mi"),
    (
        {"memory": {"host": {"growthBudget": 2}}},
        "growthBudget must be at least 1Mi: without a unit",
    ),
    ({"memory": {"host": {"growthBudget": "2m"}}}, "growthBudget must be at least 1Mi"),
    ({"memory": {"device": {"growthBudget": "-1Gi"}}}, "growthBudget must be at least 1Mi"),
    ({"memory": {"device": {"growthBudget": "Auto", "limit": 80}}}, "limit must be at least 1Mi"),
    ({"memory": {"host": {"growthBudget": "Auto", "minimum": 1}}}, "minimum must be at least 1Mi"),
    ({"memory": {"host": {"growthBudget": "64 Mi"}}}, "spec.memory.host.growthBudget"),
    ({"memory": {"host": {"growthBudget": "auto"}}}, "spec.memory.host.growthBudget"),
    (
        {"memory": {"host": {"growthBudget": "2Gi", "minimum": "1Gi"}}},
        "minimum requires growthBudget: Auto",
    ),
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
    ({"supervision": {"stall": {"timeout": "0s"}}}, "the duration must be greater than 0"),
    ({"supervision": {"maxUnavailable": 0}}, "spec.supervision.maxUnavailable"),
    ({"supervision": {"recycle": {}}}, "spec.supervision.recycle.maxAge"),
    ({"supervision": {"recycle": {"maxAge": "30m"}}}, "at least restartBudget.window"),
    (
        {"supervision": {"recycle": {"maxAge": "24h"}, "restartBudget": {"window": "48h"}}},
        "at least restartBudget.window",
    ),
    (
        {"supervision": {"recycle": {"maxAge": "24h"}, "restartBudget": {"count": 0}}},
        "set restartBudget.count above 0",
    ),
    (
        {"supervision": {"recycle": {"maxAge": "24h"}, "ladder": ["Trim"]}},
        "recycle requires WorkerRestart, EngineRestart or PodReplace in ladder",
    ),
    (
        {"supervision": {"recycle": {"maxAge": "2h", "whenIdleFor": "2h"}}},
        "recycle.whenIdleFor must be shorter than recycle.maxAge",
    ),
    ({"supervision": {"startGate": {"then": "EngineRestart"}}}, "startGate.then"),
    (
        {"supervision": {"startGate": {"then": "PodReplace"}}},
        "startGate.then: PodReplace requires PodReplace in ladder",
    ),
    (
        {
            "engine": {"type": "vllm", "image": "i"},
            "supervision": {"startGate": {"within": "1m"}},
        },
        "supervision.startGate is only supported for engine.type plimsoll",
    ),
    (
        {"supervision": {"scope": "Graph"}},
        "supervision.scope: Graph is only supported in a SupervisionPolicy",
    ),
    ({"engine": {"type": "magic"}}, "spec.engine.type"),
    ({"engine": {"port": 8001}}, "engine.port must not be 8001"),
    (
        {"engine": {"type": "vllm", "image": "i", "apiKeySecretRef": {"name": "s"}}},
        "engine.apiKeySecretRef is only supported for engine.type",
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
        "engine.args must not contain --port: set engine.port",
    ),
    (
        {"engine": {"args": ["--dtype=auto", "--served-model-name=x"]}},
        "engine.args must not contain --served-model-name: set model.servedName",
    ),
    (
        {"engine": {"type": "vllm", "image": "i", "args": ["--served_model_name=x"]}},
        "engine.args must not contain --served-model-name",
    ),
    (
        {"engine": {"type": "sglang", "image": "i", "args": ["--model-path=/m"]}},
        "engine.args must not contain --model-path: set model.uri",
    ),
    (
        {"engine": {"args": ["--api-key-file=/k"], "apiKeySecretRef": {"name": "s"}}},
        "engine.args must not contain --api-key-file: engine.apiKeySecretRef sets it",
    ),
    (
        {"engine": {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}}},
        "requests.cpu must not be above its limit",
    ),
    (
        {"supervisor": {"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}}}},
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
    (
        {"autoscaling": {"minReplicas": 3, "maxReplicas": 2, "target": {"cpuPercent": 1}}},
        "autoscaling.minReplicas",
    ),
    (
        {"autoscaling": {"maxReplicas": 2, "target": {}}},
        "needs exactly one of cpuPercent and metric",
    ),
    ({"rollout": {"maxSurge": 0, "maxUnavailable": "0%"}}, "must not both be 0"),
    ({"rollout": {"onLeak": "Panic"}}, "spec.rollout.onLeak"),
    ({"engine": {"type": "vllm"}}, "engine.image is required"),
    ({"engine": {"adminContract": "Plimsoll"}}, "engine.adminContract is only supported for"),
    ({"model": {"uri": "hf://one"}}, "model.uri must be"),
    (
        {"model": {"uri": "file:///m", "revision": "main"}},
        "model.revision requires a model.uri that begins with hf://",
    ),
    ({"disruption": {"maxUnavailable": "some"}}, "spec.disruption.maxUnavailable"),
    ({"disruption": {"maxUnavailable": -1}}, "spec.disruption.maxUnavailable"),
    ({"disruption": {"maxUnavailable": "150%"}}, "spec.disruption.maxUnavailable"),
    ({"rollout": {"maxUnavailable": "101%"}}, "spec.rollout.maxUnavailable"),
    ({"rollout": {"maxSurge": "00"}}, "spec.rollout.maxSurge"),
    ({"observability": {"podMonitor": {"interval": "0s"}}}, "must be greater than 0"),
]
"""What is changed in the least spec, and what the message must say."""

POLICIES: list[tuple[dict[str, Any], str]] = [
    ({"selector": {}}, "selector must not be empty"),
    ({"selector": None}, "spec.selector"),
    ({"selector": {"matchLabels": {"a b": "c"}}}, "valid label keys"),
    (
        {"selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}},
        "values must not be empty for In and NotIn",
    ),
    ({"selector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}, "operator"),
    ({"engine": {"type": "plimsoll"}}, "spec.engine.type"),
    ({"engine": {"port": 9464}}, "engine.port must not be 9464"),
    ({"memory": {"host": {"growthBudget": "2"}}}, "growthBudget must be at least 1Mi"),
    (
        {"memory": {"host": {"growthBudget": "2Gi", "limit": "1Gi"}}},
        "growthBudget must not be larger than limit",
    ),
    ({"supervision": {"ladder": ["WorkerRestart", "Trim"]}}, "ladder must be in the order"),
    (
        {"supervision": {"startGate": {"within": "1m"}}},
        "supervision.startGate is only supported for engine.type plimsoll",
    ),
    ({"supervison": {}}, 'unknown field "spec.supervison"'),
]
"""The same for policies."""


def service(change: dict[str, Any]) -> dict[str, Any]:
    """The least service with ``change``."""
    return SERVICE | {"spec": {"model": SERVICE["spec"]["model"]} | change}


def test_a_service_of_an_earlier_release_gets_its_status(definitions: Definitions) -> None:
    """Without ``max``, which has another name now: the status says that the spec is invalid. A rule
    that cannot be evaluated would refuse each write, and leave the status of the earlier release.
    """
    stored = service({"autoscaling": {"minReplicas": 1, "target": {"cpuPercent": 60}}})
    shown = stored | {"status": {"observedGeneration": 1}}
    assert definitions.update(stored, shown, status=True)["status"] == {"observedGeneration": 1}
    with pytest.raises(Refused, match=r"spec\.autoscaling\.maxReplicas: Required value"):
        definitions.create(stored)


@pytest.mark.parametrize(("change", "message"), SERVICES)
def test_a_bad_service_is_refused_with_the_field(
    definitions: Definitions, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        definitions.create(service(change))
    with pytest.raises(UsageError):
        check_object("m.yaml", service(change))


def test_a_service_of_an_earlier_release_can_be_changed(definitions: Definitions) -> None:
    """Its defaults stand in it as they were written then; what is unchanged is not held to them."""
    engine = {"type": "vllm", "image": "vllm:1"}
    before = definitions.create(SERVICE | {"spec": SERVICE["spec"] | {"engine": engine}})
    before["spec"]["engine"]["adminContract"] = "none"
    before["spec"]["supervision"]["drain"]["mode"] = "carry"
    after = copy.deepcopy(before)
    after["spec"]["engine"]["image"] = "vllm:2"
    after["spec"]["supervision"]["drain"]["deadline"] = "9s"
    assert definitions.update(before, after)["spec"]["engine"]["image"] == "vllm:2"
    assert parse_service(after).spec.engine.admin_contract == "None"


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
def test_what_only_looks_like_it_is_taken(definitions: Definitions, engine: dict[str, Any]) -> None:
    definitions.create(service({"engine": engine}))
    check_object("m.yaml", service({"engine": engine}))


def test_recycling_is_taken_in_services_and_policies(definitions: Definitions) -> None:
    window = {"start": "02:00", "days": ["Sunday"]}
    recycle = {"maxAge": "24h", "whenIdleFor": "10m", "window": window}
    definitions.create(service({"supervision": {"recycle": recycle}}))
    ladder = ["EngineRestart", "PodReplace"]
    gate = {"startGate": {"within": "2m", "then": "PodReplace"}, "ladder": ladder}
    definitions.create(service({"supervision": gate}))
    check_object("m.yaml", service({"supervision": gate}))
    supervision = {"supervision": {"recycle": {"maxAge": "1h"}}}
    taken = definitions.create(POLICY | {"spec": POLICY["spec"] | supervision})
    assert taken["spec"]["supervision"]["recycle"] == {"maxAge": "1h"}


@pytest.mark.parametrize("name", ["a" * 51, "1st", "a.b"])
def test_a_name_that_no_service_can_have(definitions: Definitions, name: str) -> None:
    with pytest.raises(Refused, match=r"metadata\.name must be at most 50 lower-case letters"):
        definitions.create(service({}) | {"metadata": {"name": name}})
    with pytest.raises(UsageError):
        check_object("m.yaml", service({}) | {"metadata": {"name": name}})


@pytest.mark.parametrize(("spec", "message"), POLICIES)
def test_a_bad_policy_is_refused_with_the_field(
    definitions: Definitions, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        definitions.create(POLICY | {"spec": POLICY["spec"] | spec})
    with pytest.raises(UsageError):
        check_object("m.yaml", POLICY | {"spec": POLICY["spec"] | spec})
