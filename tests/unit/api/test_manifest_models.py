"""Local mode has no API server: the models themselves refuse what the CRD refuses.

Tests ``plimsoll_api/inferenceservice.py``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plimsoll_operator.kinds import InvalidSpecError
from plimsoll_operator.plans.service import parse_service


def service(spec: dict[str, Any], name: str = "a") -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "creationTimestamp": "ignored"},
        "spec": {"model": {"uri": "file:///m"}} | spec,
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"replicas": -1}, "spec.replicas"),
        ({"supervison": {}}, "spec.supervison"),
        ({"memory": {"host": {"growthBudget": 0}}}, "spec.memory.host.growthBudget"),
        ({"memory": {"host": {"growthBudget": "64 Mi"}}}, "spec.memory.host.growthBudget"),
        (
            {"memory": {"device": {"growthBudget": "2Gi", "limit": "1Gi"}}},
            "spec.memory.device: growthBudget (2.0 GiB) must not be larger than limit (1.0 GiB)",
        ),
        ({"memory": {"device": {"growthBudget": "Auto", "limit": "10m"}}}, "m means thousandths"),
        ({"memory": {"host": {"growthBudget": 2}}}, "growthBudget: must be at least 1Mi, not '2'"),
        (
            {"memory": {"device": {"growthBudget": "1048576.2", "limit": "1048576.1"}}},
            "must not be larger than limit",
        ),
        (
            {
                "memory": {"host": {"growthBudget": "2Gi"}},
                "engine": {"resources": {"limits": {"memory": "1Gi"}}},
            },
            "must not be larger than engine.resources.limits.memory 1Gi",
        ),
        ({"model": {"uri": "gs://bucket"}}, "spec.model.uri"),
        ({"model": {"uri": "pvc:///path"}}, "spec.model.uri"),
        ({"supervision": {"ladder": ["EngineRestart", "Trim"]}}, "spec.supervision.ladder"),
        ({"supervision": {"ladder": ["PodReplace", "Trim"]}}, "spec.supervision.ladder"),
        ({"supervision": {"maintenanceWindow": {"start": "24:00"}}}, "maintenanceWindow.start"),
        ({"supervision": {"maintenanceWindow": {"duration": "4h"}}}, "maintenanceWindow.start"),
        (
            {"supervision": {"maintenanceWindow": {"start": "02:00", "duration": "25h"}}},
            "maintenanceWindow.duration",
        ),
        (
            {"supervision": {"maintenanceWindow": {"start": "02:00", "days": ["Mon"]}}},
            "maintenanceWindow.days",
        ),
        ({"supervision": {"stall": {"timeout": "0s"}}}, "spec.supervision.stall.timeout"),
        ({"engine": {"port": 9464}}, "spec.engine.port"),
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
            "requests.cpu 2 must not be above its limit",
        ),
        (
            {
                "supervisor": {
                    "resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}}
                }
            },
            "requests.memory 1Gi must not be above its limit",
        ),
        (
            {"engine": {"resources": {"requests": {"nvidia.com/gpu": 1}}}},
            "requests.nvidia.com/gpu 1 must be the same as its limit",
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
            "requests.nvidia.com/gpu 1 must be the same as its limit",
        ),
        (
            {"engine": {"resources": {"limits": {"nvidia.com/gpu": "500m"}}}},
            "limits.nvidia.com/gpu 500m must be a whole number of devices",
        ),
        (
            {"engine": {"resources": {"limits": {"memory": "-1Gi"}}}},
            "spec.engine.resources.limits.memory",
        ),
        ({"model": {"uri": "hf://no-organisation"}}, "spec.model.uri"),
        ({"model": {"uri": "file:///m", "revision": "main"}}, "revision requires a model.uri"),
        ({"engine": {"type": "vllm"}}, "engine.image is required for engine.type vllm"),
        ({"engine": {"adminContract": "Plimsoll"}}, "only supported for engine.type custom"),
        (
            {"autoscaling": {"minReplicas": 3, "maxReplicas": 2, "target": {"cpuPercent": 80}}},
            "autoscaling.minReplicas 3",
        ),
        (
            {"autoscaling": {"maxReplicas": 2, "target": {}}},
            "needs exactly one of cpuPercent and metric",
        ),
        ({"rollout": {"maxSurge": 0, "maxUnavailable": "0%"}}, "must not both be 0"),
        ({"rollout": {"maxSurge": "many"}}, "spec.rollout.maxSurge"),
        ({"rollout": {"maxSurge": "00"}}, "spec.rollout.maxSurge"),
        ({"rollout": {"maxUnavailable": "101%"}}, "spec.rollout.maxUnavailable"),
        ({"observability": {"podMonitor": {"interval": "0s"}}}, "podMonitor.interval"),
    ],
)
def test_refused_with_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        parse_service(service(change))
    assert field in str(refused.value)


def test_a_default_that_an_earlier_release_left_in_an_object_is_read() -> None:
    """The API server wrote these words into each object that did not name the field."""
    old = {"engine": {"adminContract": "none"}, "supervision": {"drain": {"mode": "carry"}}}
    assert parse_service(service(old)) == parse_service(service({}))


def test_a_budget_may_set_itself() -> None:
    host = {"growthBudget": "Auto", "minimum": "256Mi", "limit": "1Gi"}
    auto = {"learning": "2h", "limitWithin": "90m"}
    small = {"resources": {"limits": {"memory": "1Gi"}}}
    memory = parse_service(
        service({"memory": {"host": host, "auto": auto}, "engine": small})
    ).spec.memory
    assert memory.host is not None
    assert memory.host.auto
    assert (memory.host.minimum_bytes, memory.host.limit_bytes) == (256 << 20, 1 << 30)
    assert memory.host.growth_bytes <= 1 << 30, "or an earlier supervisor would refuse it"
    assert (memory.auto.learning_s, memory.auto.limit_within_s) == (7200.0, 5400.0)
    again = msgspec.json.decode(msgspec.json.encode(memory), type=type(memory))
    assert again == memory


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"host": {"growthBudget": "auto"}}, "memory.host.growthBudget"),
        ({"host": {"growthBudget": "2Gi", "minimum": "1Gi"}}, "minimum requires growthBudget"),
        ({"host": {"growthBudget": "Auto", "auto": True}}, "memory.host.auto"),
        ({"auto": {"learning": "0s"}}, "memory.auto.learning"),
    ],
)
def test_a_budget_that_sets_itself_has_rules(memory: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpecError, match=message):
        parse_service(service({"memory": memory}))


def test_a_whole_number_is_a_quantity() -> None:
    parsed = parse_service(service({"memory": {"host": {"growthBudget": 1048576}}}))
    assert parsed.spec.memory.host is not None
    assert parsed.spec.memory.host.growth_bytes == 1048576


@pytest.mark.parametrize("quantity", ["1e99999999", "1e-99999999", "9" * 65, "١Gi"])
def test_a_number_that_takes_minutes_to_compute_is_no_quantity(quantity: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"memory\.host\.growthBudget"):
        parse_service(service({"memory": {"host": {"growthBudget": quantity}}}))


def test_a_name_that_no_service_can_have() -> None:
    with pytest.raises(InvalidSpecError, match=r"metadata\.name"):
        parse_service(service({}, name="Upper"))
