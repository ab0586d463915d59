"""An unhealthy device of a pod, as the kubelet reports it with ResourceHealthStatus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plimsoll_api.pod_devices import DEVICE_HEALTH_FILE, decode_pod_devices
from tests.cluster.operator.supervisor_pages import data
from tests.cluster.operator.test_fleet_safety import SELECTOR


def test_an_unhealthy_device_reaches_the_supervisors_and_the_status(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start()
    manifest["spec"] |= {"replicas": 1}
    manifest["spec"]["engine"]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    kubectl.apply(manifest)
    (pod,) = eventually(lambda: kubectl.list("pods", SELECTOR))
    kubectl.set_running(pod)
    eventually(lambda: kubectl.holds("tiny", Ready="True"))
    assert DEVICE_HEALTH_FILE not in data(kubectl)

    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    report_device(kubectl, name, "Unhealthy", ready=True)
    text = eventually(lambda: data(kubectl)[DEVICE_HEALTH_FILE])
    assert decode_pod_devices(text.encode()) == {uid: ("gpu-0 (nvidia.com/gpu)",)}
    report_device(kubectl, name, "Unhealthy", ready=False)
    eventually(lambda: "unhealthy device: gpu-0 (nvidia.com/gpu)" in engine_ready(kubectl))
    report_device(kubectl, name, "Healthy", ready=True)
    eventually(lambda: DEVICE_HEALTH_FILE not in data(kubectl))


def report_device(kubectl: Any, pod: str, health: str, ready: bool) -> None:
    status = kubectl.get("pod", pod)["status"]
    (engine,) = (one for one in status["containerStatuses"] if one["name"] == "engine")
    devices = [{"resourceID": "gpu-0", "health": health}]
    engine["allocatedResourcesStatus"] = [{"name": "nvidia.com/gpu", "resources": devices}]
    engine["ready"] = ready
    status["conditions"] = [{"type": "Ready", "status": str(ready)}]
    kubectl.patch("pod", pod, {"status": status}, "status")


def engine_ready(kubectl: Any) -> str:
    conditions = kubectl.get("plinf", "tiny")["status"]["conditions"]
    (found,) = (one for one in conditions if one["type"] == "EngineReady")
    return f"{found['reason']}: {found['message']}"
