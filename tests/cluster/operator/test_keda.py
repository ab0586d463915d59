"""Services under KEDA's real operator and admission webhook, scaled by a number that a test sets.

No kubelet runs: KEDA sets the replicas of a Deployment, and needs no pod for that.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from plimsoll_api.times import parse_rfc3339
from tests.cluster.operator.test_fleet_safety import SELECTOR, leaking
from tests.cluster.operator.test_gateway_and_keda import PAUSED, example
from tests.cluster.operator.test_groups import groups, names, pods, service
from tests.lab.errors import MissingError
from tests.lab.keda import HOST, Keda
from tests.lab.kube import conditions
from tests.lab.lab import Lab
from tests.lab.leader_worker_set import LeaderWorkerSets

__all__ = ["groups"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
COOLDOWN_S = 15
POLL_S = 1
HPA_S = 60.0
"""Seconds for a few of the 15 s periods of Kubernetes' HorizontalPodAutoscaler controller."""
HELD_S = 8.0
"""Seconds for which something must not change: several polls."""


class Gauge:
    """A server that answers every request with ``value``; with an error while that is None."""

    def __init__(self) -> None:
        self.value: int | None = 0
        gauge = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"waiting": gauge.value}).encode()
                self.send_response(500 if gauge.value is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def trigger(self) -> dict[str, Any]:
        url = f"http://{HOST}:{self._server.server_port}/"
        metadata = {"url": url, "valueLocation": "waiting", "targetValue": "5"}
        return {"type": "metrics-api", "metadata": metadata}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Scaled:
    """The service of a test, its ScaledObject and its replicas."""

    def __init__(
        self, kubectl: Any, manifest: dict[str, Any], workload: tuple[str, str], trigger: Any
    ) -> None:
        self._kubectl, self.manifest, self._workload = kubectl, manifest, workload
        manifest["spec"]["autoscaling"] = example("keda", "autoscaling") | {
            "cooldown": f"{COOLDOWN_S}s",
            "triggers": [trigger],
        }

    @property
    def _name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    def object(self) -> Any:
        return self._kubectl.get("scaledobject", self._name)

    def says(self, type_: str) -> str:
        """Status and reason of a condition of KEDA's."""
        (found,) = [one for one in conditions(self.object() or {}) if one["type"] == type_] or [{}]
        return f"{found.get('status')} {found.get('reason')}"

    def poll_often(self) -> None:
        """As somebody may set it who does not want KEDA's 30 s; the operator leaves it alone."""
        self._kubectl.patch("scaledobject", self._name, {"spec": {"pollingInterval": POLL_S}})

    def replicas(self) -> int:
        return int(self._kubectl.get(*self._workload)["spec"]["replicas"])

    def stays(self, replicas: int, seconds: float) -> None:
        """AssertionError if the replicas change within ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.replicas() == replicas
            time.sleep(0.2)


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
