"""Apply, change, scale, delete: what a person does with an InferenceService."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plimsoll_api.names import METRICS_PORT
from plimsoll_operator.kinds import OWNED_KINDS

ASKED_FOR = {
    "HorizontalPodAutoscaler", "HTTPRoute", "InferencePool", "LeaderWorkerSet", "PodMonitor",
    "PrometheusRule", "ScaledObject",
}  # fmt: skip
KINDS = sorted({kind.kind for kind in OWNED_KINDS} - ASKED_FOR)


def kinds(kubectl: Any, name: str) -> list[str]:
    return sorted(item["kind"] for item in kubectl.owned(name))


def test_the_whole_life_of_a_service(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start()
    kubectl.apply(manifest)
    eventually(lambda: kinds(kubectl, "tiny") == KINDS)
    eventually(lambda: len(kubectl.list("pods", "plimsoll.dev/service=tiny")) == 1)
    eventually(lambda: kubectl.holds("tiny", Ready="False", Progressing="True"))

    kubectl.play_kubelet("tiny")
    kubectl("wait", "--for=condition=Ready", "plinf/tiny", "--timeout=10s")
    status = eventually(lambda: ready(kubectl, "tiny", 1))
    assert status["url"] == f"http://tiny.{kubectl.namespace}.svc"
    assert status["observedGeneration"] == 1
    eventually(
        lambda: kubectl.holds("tiny", EngineReady="True", SupervisorReady="True", Stalled="False")
    )
    columns = kubectl("get", "plinf", "tiny").splitlines()[0].split()
    assert columns == ["NAME", "READY", "DESIRED", "REASON", "INCIDENTS", "AGE"]

    def row() -> list[str]:
        return list(kubectl("get", "plinf", "tiny", "--no-headers").split())

    eventually(lambda: row()[1:4] == ["1", "1", "ReplicasReady"])

    kubectl("scale", "plinf", "tiny", "--replicas=3")
    eventually(lambda: kubectl.get("deployment", "tiny")["spec"]["replicas"] == 3)
    eventually(lambda: len(kubectl.list("pods", "plimsoll.dev/service=tiny")) == 3)
    kubectl.play_kubelet("tiny")
    eventually(lambda: ready(kubectl, "tiny", 3))

    before = kubectl.get("deployment", "tiny")["metadata"]["generation"]
    kubectl.patch("plinf", "tiny", {"spec": {"memory": {"host": {"growthBudget": "64Mi"}}}})
    config = "67108864"
    eventually(lambda: config in str(kubectl.get("configmap", "tiny-supervisor")["data"]))
    assert kubectl.get("deployment", "tiny")["metadata"]["generation"] == before

    kubectl("delete", "plinf", "tiny", "--timeout=10s")
    # The garbage collector looks for new kinds every 30 s, and this one may be younger.
    eventually(lambda: kinds(kubectl, "tiny") == [], 75)
    eventually(lambda: kubectl.list("pods,rs", "plimsoll.dev/service=tiny") == [])


def test_a_service_with_the_probe_gets_pods_with_the_probe(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    """In a namespace that admits restricted pods alone."""
    start("--probe-image=probe:1")
    manifest["spec"]["engine"] = {"type": "vllm", "image": "vllm:1"}
    manifest["spec"]["probe"] = {"enabled": True}
    kubectl.apply(manifest)
    assert kubectl.get("plinf", "tiny")["spec"]["probe"] == {"enabled": True}
    pod = eventually(lambda: kubectl.list("pods", "plimsoll.dev/service=tiny"))[0]["spec"]
    copying, supervisor = pod["initContainers"][-2:]
    assert (copying["name"], copying["image"]) == ("plimsoll-probe", "probe:1")
    (engine,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in engine["env"]}
    assert env["PYTHONPATH"] == "/opt/plimsoll-probe"
    sockets = {"name": "PLIMSOLL_PROBE_DIR", "value": env["PLIMSOLL_PROBE_DIR"]}
    assert sockets in supervisor["env"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {"plimsoll-probe", "plimsoll-probe-run"} <= volumes


def ready(kubectl: Any, name: str, count: int) -> dict[str, Any]:
    status: dict[str, Any] = kubectl.get("plinf", name)["status"]
    return status if status.get("readyReplicas") == count else {}


def test_slots_follow_the_spec_and_a_held_one_stays(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start()
    manifest["spec"]["supervision"]["maxUnavailable"] = 3
    kubectl.apply(manifest)
    slots = [f"tiny-restart-{index}" for index in range(3)]
    eventually(lambda: leases(kubectl) == slots)
    pod = eventually(lambda: kubectl.list("pods", "plimsoll.dev/service=tiny"))[0]
    holder = {"spec": {"holderIdentity": pod["metadata"]["name"]}}
    kubectl.patch("lease", slots[2], holder)

    kubectl.patch("plinf", "tiny", {"spec": {"supervision": {"maxUnavailable": 1}}})
    eventually(lambda: leases(kubectl) == [slots[0], slots[2]])
    # Its holder can still release it.
    eventually(lambda: may_write(kubectl) == [slots[0], slots[2]])

    kubectl.patch("lease", slots[2], {"spec": {"holderIdentity": ""}})
    eventually(lambda: leases(kubectl) == [slots[0]])
    eventually(lambda: may_write(kubectl) == slots[:1])


def leases(kubectl: Any) -> list[str]:
    found = kubectl.list("leases", "plimsoll.dev/service=tiny")
    return sorted(item["metadata"]["name"] for item in found)


def may_write(kubectl: Any) -> list[str]:
    """The leases that the service's supervisors may write."""
    return list(kubectl.get("role", "tiny-supervisor")["rules"][-1]["resourceNames"])


class _Metrics(http.server.BaseHTTPRequestHandler):
    text = (
        b'plimsoll_memory_budget_consumed_ratio{kind="host"} 1.234\n'
        b'plimsoll_memory_budget_consumed_ratio{kind="device"} NaN\n'
        b"plimsoll_restart_budget_remaining 0.0\n"
    )

    hostile = (
        b'plimsoll_memory_budget_consumed_ratio{kind="host"} +Inf\n'
        b"plimsoll_restart_budget_remaining +Inf\n"
    )
    asked = 0

    def do_GET(self) -> None:
        _Metrics.asked += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.hostile if _Metrics.asked == 1 else self.text)

    def log_message(self, *_: Any) -> None:
        pass


def own_address() -> str:
    """Of this machine: loopback is no pod's address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("198.51.100.1", 9))  # sends nothing
        return str(asked.getsockname()[0])


@pytest.fixture
def supervisor_address() -> Iterator[str]:
    """A supervisor's metrics endpoint."""
    address = own_address()
    server = http.server.HTTPServer((address, METRICS_PORT), _Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


def test_memory_figures_come_from_the_supervisors(
    kubectl: Any,
    start: Callable[..., Any],
    manifest: dict[str, Any],
    eventually: Any,
    supervisor_address: str,
) -> None:
    start()
    kubectl.apply(manifest)
    pods = eventually(lambda: kubectl.list("pods", "plimsoll.dev/service=tiny"))
    # Nothing is shown of a budget before a supervisor has answered.
    assert "memory" not in (kubectl.get("plinf", "tiny").get("status") or {})
    kubectl.play_kubelet("tiny", supervisor_address)
    # The first page is one that no supervisor writes, and costs nobody but its pod a figure.
    memory = eventually(lambda: kubectl.get("plinf", "tiny")["status"].get("memory"))
    assert memory == {"hostConsumedPercent": 120, "replica": pods[0]["metadata"]["name"]}
    wanted = {"MemoryWithinBudget": "BudgetExhausted", "RestartBudgetExhausted": "True"}
    eventually(lambda: kubectl.holds("tiny", **wanted))


def test_incidents_show_in_the_status(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start()
    kubectl.apply(manifest)
    incident = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": "tiny-1"},
        "spec": {
            "id": "tiny-1",
            "workloadRef": {"kind": "InferenceService", "name": "tiny"},
            "pod": "tiny-x",
            "container": "engine",
            "epoch": "b:1",
            "openedAt": "2026-01-01T00:00:00Z",
            "kind": "HostGrowth",
        },
    }
    kubectl.apply(incident)
    eventually(lambda: kubectl.get("plinf", "tiny").get("status", {}).get("openIncidents") == 1)
    step = {"time": "2026-01-01T00:00:09Z", "step": "WorkerRestart", "outcome": "Succeeded"}
    status = {"phase": "Resolved", "outcome": "WorkerRestart", "timeline": [step]}
    kubectl.patch("leakincident", "tiny-1", {"status": status}, "status")
    found = eventually(
        lambda: (s := kubectl.get("plinf", "tiny")["status"]).get("restarts") == 1 and s
    )
    assert (found["openIncidents"], found["lastIncident"]) == (0, "tiny-1")
    refused = kubectl.run(
        *("patch", "leakincident", "tiny-1", "--type=merge"),
        *("-p", '{"spec": {"kind": "Stall"}}'),
    )
    assert "spec is immutable" in refused.stderr
