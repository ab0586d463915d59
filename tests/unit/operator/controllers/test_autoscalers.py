"""A service's ScaledObject in the whole reconcile: KEDA and its webhook are played.

Tests ``plimsoll_operator/controllers/inference_service.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fake_api import Answer
from tests.unit.operator.controllers.test_services import Cluster

if TYPE_CHECKING:
    from tests.lab.definitions import Definitions

HPA = "HorizontalPodAutoscaler"
TRIGGER = {"type": "cron", "metadata": {"timezone": "UTC"}}


@pytest.fixture
def cluster(definitions: Definitions) -> Cluster:
    """A cluster that has KEDA, whose webhook allows one autoscaler for a workload."""
    made = Cluster(definitions)
    made.served.add("ScaledObject")
    made.api.lacking -= made.served

    def refuse(method: str, kind: str, name: str) -> None:
        if method == "PATCH" and kind == "ScaledObject" and made.api.found(HPA, name):
            raise Answer(403, "Forbidden", "denied the request: already managed by the hpa 'tiny'")

    made.api.refuse = refuse
    return made


def test_the_autoscaler_is_replaced_without_a_refusal(cluster: Cluster) -> None:
    by_cpu = {"maxReplicas": 3, "target": {"cpuPercent": 80}}
    by_keda = {"maxReplicas": 3, "triggers": [TRIGGER]}
    for wanted, kind, other in ((by_cpu, HPA, "ScaledObject"), (by_keda, "ScaledObject", HPA)) * 2:
        cluster.spec["autoscaling"] = wanted
        cluster.apply()
        assert cluster.reconcile() is None
        assert cluster.api.found(kind, "tiny") is not None
        assert cluster.api.found(other, "tiny") is None
        assert cluster.events("ApplyFailed") == []


def test_a_trigger_that_fails_shows_until_it_works(cluster: Cluster) -> None:
    cluster.spec["autoscaling"] = {"maxReplicas": 3, "triggers": [TRIGGER]}
    cluster.apply()
    cluster.reconcile()
    assert cluster.conditions()["ObjectsComplete"]["status"] == "True"
    found = cluster.api.found("ScaledObject", "tiny")
    assert found is not None
    for status, expected in (("False", "ScaledObjectNotReady"), ("True", "AllObjectsCreated")):
        ready = {"type": "Ready", "status": status, "reason": "TriggerError", "message": "why"}
        cluster.api.put(found | {"status": {"conditions": [ready]}})
        cluster.reconcile()
        said = cluster.conditions()["ObjectsComplete"]
        assert said["reason"] == expected
        assert ("KEDA reports TriggerError: why" in said["message"]) == (status == "False")
