"""KEDA takes real pods in from two to one while clients stream: an open incident keeps both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.operator.test_fleet_safety import leaking
from tests.lab.errors import MissingError
from tests.lab.keda import Keda
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.operator import Operator
from tests.node.service import READY_S, SERVICE, Manifest, plain, pods, streaming
from tests.node.supervised import ready_since
from tests.scaled_services import COOLDOWN_S, HPA_S, Gauge, Scaled

SAID_S = 60.0
DRAINED_S = 120.0
"""Seconds until the kubelet has ended a pod, whose streams finish first."""


@pytest.fixture
def keda(node: Lab) -> Iterator[Keda]:
    """Other tests need a cluster without the kinds."""
    if not isinstance(node, Lab):
        pytest.skip("another cluster has a KEDA of its own, or none")
    try:
        made = Keda(node)
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


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("keda")
def test_two_real_pods_become_one_when_no_incident_is_open(
    kube: Kube, operator: Callable[..., Operator], manifest: Manifest, gauge: Gauge
) -> None:
    operator()
    gauge.value = 10
    scaled = Scaled(kube, plain(manifest), ("deployment", SERVICE), gauge.trigger)
    scaled.manifest["spec"]["autoscaling"]["maxReplicas"] = 2
    kube.apply(scaled.manifest)
    eventually(lambda: scaled.object() is not None, "the ScaledObject is there", SAID_S)
    scaled.poll_often()
    scaled.scale_in_at_once()

    def both() -> bool:
        found = pods(kube)
        return len(found) == 2 and all(map(ready_since, found))

    eventually(both, "two pods are ready", READY_S)
    before = {one["metadata"]["uid"]: one["metadata"]["name"] for one in pods(kube)}
    with streaming(kube) as streams:
        leaking(kube, "leak", min(before.values()), SERVICE)
        eventually(lambda: scaled.says("Paused").startswith("True"), "scale-in is held", SAID_S)
        gauge.value = 1
        scaled.stays(2, HPA_S)
        assert {one["metadata"]["uid"] for one in pods(kube)} == set(before)
        held = streams.finished

        kube.patch("leakincident", "leak", {"status": {"phase": "Resolved"}}, "status")
        eventually(lambda: scaled.replicas() == 1, "one replica is wanted", HPA_S)

        def alone() -> bool:
            return len(kube.list("pods", f"plimsoll.dev/service={SERVICE}")) == 1

        eventually(alone, "the other pod has ended", DRAINED_S)
        (left,) = pods(kube)
        assert left["metadata"]["uid"] in before
        served = streams.finished
        eventually(lambda: streams.finished > served + 2, "the last replica serves", SAID_S)
        scaled.stays(1, COOLDOWN_S)
    print(f"{held} requests with two pods, {streams.finished} in all")
    assert streams.failures == []
    assert all(len(texts) == 1 for texts in streams.texts.values()), streams.texts
