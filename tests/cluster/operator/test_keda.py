"""Services under KEDA's real operator and admission webhook, scaled by a number that a test sets.

No kubelet runs: KEDA sets the replicas of a Deployment, and needs no pod for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plimsoll_api.times import parse_rfc3339
from tests.cluster.operator.test_fleet_safety import SELECTOR, leaking
from tests.cluster.operator.test_gateway_and_keda import PAUSED
from tests.cluster.operator.test_groups import groups, names, pods, service
from tests.lab.errors import MissingError
from tests.lab.keda import Keda
from tests.lab.lab import Lab
from tests.lab.leader_worker_set import LeaderWorkerSets
from tests.scaled_services import COOLDOWN_S, HPA_S, POLL_S, Gauge, Scaled

__all__ = ["groups"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
HELD_S = 8.0
"""Seconds for which something must not change: several polls."""


@pytest.fixture(scope="module")
def keda(cluster: Lab) -> Iterator[Keda]:
    """Other tests need a cluster without the kinds."""
    try:
        made = Keda(cluster)
    except MissingError as missing:
        pytest.skip(str(missing))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def gauge() -> Iterator[Gauge]:
    made = Gauge()
    yield made
    made.stop()


@pytest.fixture
def scaled(keda: Keda, kubectl: Any, manifest: dict[str, Any], gauge: Gauge) -> Scaled:
    return Scaled(kubectl, manifest, ("deployment", "tiny"), gauge.trigger)


def test_a_new_service_has_its_cooldown_before_it_is_scaled_to_zero(
    kubectl: Any, start: Callable[..., Any], scaled: Scaled, eventually: Any
) -> None:
    start()
    kubectl.apply(scaled.manifest)
    eventually(lambda: scaled.says("Ready") == "True ScaledObjectReady")
    scaled.poll_often()
    eventually(lambda: scaled.says("Active").startswith("False"))
    created = parse_rfc3339(scaled.object()["metadata"]["creationTimestamp"])
    assert scaled.replicas() == 1, "scaled to zero before it could be ready"
    eventually(lambda: scaled.replicas() == 0, COOLDOWN_S + 10)
    assert time.time() - created >= COOLDOWN_S
    eventually(lambda: kubectl.holds("tiny", Ready="ScaledToZero"))


def test_a_trigger_takes_it_from_zero_and_back(
    kubectl: Any, start: Callable[..., Any], scaled: Scaled, gauge: Gauge, eventually: Any
) -> None:
    start()
    kubectl.apply(scaled.manifest)
    eventually(lambda: scaled.says("Ready") == "True ScaledObjectReady")
    scaled.poll_often()
    eventually(lambda: scaled.replicas() == 0, COOLDOWN_S + 10)

    gauge.value = 3
    eventually(lambda: scaled.replicas() == 1)
    assert scaled.says("Active") == "True ScalerActive"
    eventually(lambda: kubectl.list("pods", SELECTOR))
    scaled.stays(1, COOLDOWN_S + HELD_S)

    gauge.value = 0
    idle = time.monotonic()
    eventually(lambda: scaled.replicas() == 0, COOLDOWN_S + 10)
    assert time.monotonic() - idle >= COOLDOWN_S - 2 * POLL_S


def test_an_open_incident_holds_the_last_replica(
    kubectl: Any, start: Callable[..., Any], scaled: Scaled, gauge: Gauge, eventually: Any
) -> None:
    start()
    gauge.value = 1
    kubectl.apply(scaled.manifest)
    eventually(lambda: scaled.says("Ready") == "True ScaledObjectReady")
    scaled.poll_often()
    (pod,) = eventually(lambda: kubectl.list("pods", SELECTOR))
    leaking(kubectl, "leak", pod["metadata"]["name"])
    eventually(lambda: scaled.says("Paused").startswith("True"))
    gauge.value = 0
    scaled.stays(1, COOLDOWN_S + HELD_S)
    (held,) = kubectl.list("hpa")
    assert held["spec"]["behavior"]["scaleDown"]["selectPolicy"] == "Disabled"

    kubectl.patch("leakincident", "leak", {"status": {"phase": "Resolved"}}, "status")
    eventually(lambda: PAUSED not in (scaled.object()["metadata"].get("annotations") or {}))
    eventually(lambda: scaled.replicas() == 0)
    eventually(lambda: scaled.says("Paused").startswith("False"))


def test_a_service_changes_its_autoscaler_and_back(
    kubectl: Any, start: Callable[..., Any], scaled: Scaled, eventually: Any
) -> None:
    """KEDA's webhook refuses a ScaledObject while another autoscaler has the Deployment."""
    running = start()
    by_cpu = {"minReplicas": 2, "maxReplicas": 3, "target": {"cpuPercent": 80}}
    spec = scaled.manifest["spec"]
    other = scaled.manifest | {"spec": spec | {"autoscaling": by_cpu}}
    kubectl.apply(other)
    eventually(lambda: hpas(kubectl) == ["tiny"])
    eventually(lambda: scaled.replicas() == 2)
    kubectl.apply(scaled.manifest)
    eventually(lambda: scaled.says("Ready") == "True ScaledObjectReady")
    assert hpas(kubectl) == ["keda-hpa-tiny"]
    assert "denied the request" not in running.log.read_text(), "it was not refused in between"
    kubectl.apply(other)
    # KEDA's own goes when the garbage collector knows the kind, which is new here.
    eventually(lambda: scaled.object() is None and "tiny" in hpas(kubectl))
    assert scaled.replicas() == 2


def test_several_replicas_come_and_an_incident_keeps_them(
    kubectl: Any, start: Callable[..., Any], scaled: Scaled, gauge: Gauge, eventually: Any
) -> None:
    """From one to several by the HorizontalPodAutoscaler of KEDA, to zero by KEDA itself."""
    start()
    gauge.value = 1
    kubectl.apply(scaled.manifest)
    eventually(scaled.object)
    scaled.poll_often()
    gauge.value = 14
    eventually(lambda: scaled.replicas() == 3, HPA_S)
    eventually(lambda: scaled.says("HPAActive").startswith("True"))
    pod, *_ = eventually(lambda: len(found := kubectl.list("pods", SELECTOR)) == 3 and found)
    leaking(kubectl, "leak", pod["metadata"]["name"])
    eventually(lambda: scaled.says("Paused").startswith("True"))
    gauge.value = 0
    scaled.stays(3, COOLDOWN_S + HELD_S)
    kubectl.patch("leakincident", "leak", {"status": {"phase": "Resolved"}}, "status")
    eventually(lambda: scaled.replicas() == 0)


def test_scale_in_to_one_waits_for_the_incident(
    kubectl: Any, start: Callable[..., Any], scaled: Scaled, gauge: Gauge, eventually: Any
) -> None:
    """The trigger stays active: the HorizontalPodAutoscaler of KEDA scales in, not KEDA itself."""
    start()
    gauge.value = 14
    kubectl.apply(scaled.manifest)
    eventually(scaled.object)
    scaled.poll_often()
    scaled.scale_in_at_once()
    eventually(lambda: scaled.replicas() == 3, HPA_S)
    before = eventually(lambda: len(found := kubectl.list("pods", SELECTOR)) == 3 and found)
    leaking(kubectl, "leak", before[0]["metadata"]["name"])
    eventually(lambda: scaled.says("Paused").startswith("True"))
    gauge.value = 1
    scaled.stays(3, HPA_S)
    assert uids(kubectl.list("pods", SELECTOR)) == uids(before)
    kubectl.patch("leakincident", "leak", {"status": {"phase": "Resolved"}}, "status")
    eventually(lambda: scaled.replicas() == 1, HPA_S)
    (left,) = eventually(lambda: len(found := kubectl.list("pods", SELECTOR)) == 1 and found)
    assert left["metadata"]["uid"] in uids(before)
    scaled.stays(1, COOLDOWN_S + HELD_S)


def uids(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def test_groups_of_several_nodes_go_to_zero_and_back(
    kubectl: Any,
    keda: Keda,
    groups: LeaderWorkerSets,
    start: Callable[..., Any],
    gauge: Gauge,
    eventually: Any,
) -> None:
    groups.start()
    start()
    scaled = Scaled(kubectl, service(), ("leaderworkerset", "qwen-lws"), gauge.trigger)
    kubectl.apply(scaled.manifest)
    eventually(scaled.object)
    scaled.poll_often()
    eventually(lambda: set(pods(kubectl)) == names(0, 1))
    eventually(lambda: scaled.replicas() == 0, COOLDOWN_S + 20)
    eventually(lambda: pods(kubectl) == {})
    eventually(lambda: kubectl.holds("qwen", Ready="ScaledToZero"))
    gauge.value = 3
    eventually(lambda: set(pods(kubectl)) == names(0))
    gauge.value = 8
    eventually(lambda: set(pods(kubectl)) == names(0, 1), HPA_S)


def hpas(kubectl: Any) -> list[str]:
    return [one["metadata"]["name"] for one in kubectl.list("hpa")]


def test_a_trigger_that_keda_refuses(
    kubectl: Any, start: Callable[..., Any], scaled: Scaled, eventually: Any
) -> None:
    start()
    autoscaling = scaled.manifest["spec"]["autoscaling"]
    works = autoscaling["triggers"]
    autoscaling["triggers"] = [{"type": "cpu", "metadata": {"value": "80"}}]
    kubectl.apply(scaled.manifest)
    eventually(lambda: kubectl.holds("tiny", Ready="ApplyFailed", Stalled="True"))
    assert "doesn't have the cpu request" in kubectl.condition("tiny", "Ready")["message"]
    autoscaling["triggers"] = works
    kubectl.apply(scaled.manifest)
    eventually(lambda: scaled.says("Ready") == "True ScaledObjectReady")
    eventually(lambda: kubectl.holds("tiny", Stalled="False"))


def test_a_trigger_that_fails(
    kubectl: Any, start: Callable[..., Any], scaled: Scaled, gauge: Gauge, eventually: Any
) -> None:
    """KEDA scales in neither direction meanwhile, and the service says so."""
    start("--resync", "2")
    gauge.value = None
    kubectl.apply(scaled.manifest)
    eventually(scaled.object)
    scaled.poll_often()
    eventually(lambda: scaled.says("Ready") == "False TriggerError")
    eventually(lambda: kubectl.holds("tiny", ObjectsComplete="ScaledObjectNotReady"))
    said = kubectl.condition("tiny", "ObjectsComplete")["message"]
    assert "TriggerError: Triggers defined in ScaledObject are not working correctly" in said
    scaled.stays(1, COOLDOWN_S + HELD_S)

    gauge.value = 0
    eventually(lambda: kubectl.holds("tiny", ObjectsComplete="True"))
    eventually(lambda: scaled.replicas() == 0)
