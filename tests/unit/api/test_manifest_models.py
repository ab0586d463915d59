"""Local mode has no API server: the models themselves refuse what the CRD refuses."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_operator.reconcile import InvalidSpec, parse


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
            "spec.memory.device: Value error, growthBudget 2Gi must not be larger than limit 1Gi",
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
        ({"model": {"uri": "hf://no-organisation"}}, "spec.model.uri"),
        ({"model": {"uri": "file:///m", "revision": "main"}}, "revision only goes with"),
        ({"engine": {"type": "vllm"}}, "engine.image is needed for engine.type vllm"),
        ({"engine": {"adminContract": "plimsoll"}}, "engine.type custom only"),
        ({"autoscaling": {"min": 3, "max": 2, "target": {"cpuPercent": 80}}}, "autoscaling.min 3"),
        ({"autoscaling": {"max": 2, "target": {}}}, "needs one of cpuPercent and metric"),
        ({"rollout": {"maxSurge": 0, "maxUnavailable": "0%"}}, "must not both be 0"),
        ({"rollout": {"maxSurge": "many"}}, "spec.rollout.maxSurge"),
        ({"observability": {"podMonitor": {"interval": "0s"}}}, "podMonitor.interval"),
    ],
)
def test_refused_with_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse(service(change))
    assert field in str(refused.value)


def test_a_whole_number_is_a_quantity() -> None:
    parsed = parse(service({"memory": {"host": {"growthBudget": 1048576}}}))
    assert parsed.spec.memory.host is not None
    assert parsed.spec.memory.host.growth_budget == "1048576"


def test_a_name_that_no_service_can_have() -> None:
    with pytest.raises(InvalidSpec, match=r"metadata\.name"):
        parse(service({}, name="Upper"))
