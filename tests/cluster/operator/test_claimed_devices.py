"""The devices of a pod's claim, with the scheduler, the claim controller and the example driver.

No kubelet runs: the driver publishes its devices for a node that the test makes, and the scheduler
allocates one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_api.pod_devices import CLAIMED_DEVICES_FILE, decode_pod_devices, make_container_key
from plimsoll_sidecar.signals.other_pods import PodDevicesFile
from tests.cluster.operator.supervisor_pages import data
from tests.cluster.operator.test_fleet_safety import SELECTOR
from tests.lab.device_driver import CLASS, DEVICE_CLASS, DeviceDriver
from tests.lab.errors import MissingError
from tests.lab.images import ROOT
from tests.lab.lab import Lab
from tests.lab.node import NAME as NODE_NAME

EXAMPLE = ROOT / "examples" / "integrations" / "device-claims.yaml"
NODE_LABELS = {"plimsoll.dev/devices": "true"}
DEVICES = 2
PATIENCE_S = 60.0
"""For the scheduler and the claim controller on a busy machine."""


@pytest.fixture
def node(cluster: Lab) -> Iterator[str]:
    """The name of a node with devices, on which only pods that ask for it are scheduled."""
    try:
        driver = DeviceDriver(cluster)
    except MissingError as missing:
        pytest.skip(str(missing))
    sizes = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "100"}
    ready = {"type": "Ready", "status": "True", "reason": "Played", "message": ""}
    cluster.kube.apply(
        DEVICE_CLASS,
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE_NAME, "labels": NODE_LABELS},
        },
    )
    status = {"capacity": sizes, "allocatable": sizes, "conditions": [ready]}
    cluster.kube.patch("node", NODE_NAME, {"status": status}, "status")
    driver.start(devices=DEVICES)
    yield NODE_NAME
    driver.stop()
    for kind, name in (("node", NODE_NAME), ("deviceclass", CLASS)):
        cluster.kube("delete", kind, name)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_pod_finds_the_uuid_of_its_device(
    kubectl: Any,
    node: str,
    start: Callable[..., Any],
    manifest: dict[str, Any],
    eventually: Any,
    tmp_path: Path,
) -> None:
    template, example = yaml.safe_load_all(EXAMPLE.read_text())
    (asked,) = template["spec"]["spec"]["devices"]["requests"]
    asked["exactly"]["deviceClassName"] = CLASS
    resources = manifest["spec"]["engine"].setdefault("resources", {})
    resources |= example["spec"]["engine"]["resources"]
    manifest["spec"]["podTemplate"] = {"spec": {"nodeSelector": NODE_LABELS}}
    manifest["spec"]["replicas"] = DEVICES
    start("--resync", "2")
    kubectl.apply(template, manifest)

    def list_scheduled() -> list[dict[str, Any]]:
        pods = kubectl.list("pods", SELECTOR)
        stay = [one for one in pods if not one["metadata"].get("deletionTimestamp")]
        return stay if len([one for one in stay if one["spec"].get("nodeName")]) == DEVICES else []

    def expected() -> dict[str, tuple[str, ...]]:
        return {
            make_container_key(one["metadata"]["uid"], "engine"): (find_uuid(kubectl, one),)
            for one in list_scheduled()
        }

    def published() -> dict[str, tuple[str, ...]]:
        return decode_pod_devices(data(kubectl)[CLAIMED_DEVICES_FILE].encode())

    first, *_ = eventually(list_scheduled, PATIENCE_S)
    eventually(lambda: published() == expected(), PATIENCE_S)
    before = published()
    assert len({uuid for devices in before.values() for uuid in devices}) == DEVICES
    key = make_container_key(first["metadata"]["uid"], "engine")
    (tmp_path / CLAIMED_DEVICES_FILE).write_text(data(kubectl)[CLAIMED_DEVICES_FILE])
    assert PodDevicesFile(tmp_path / CLAIMED_DEVICES_FILE, key).read() == before[key]

    force_delete(kubectl, first)
    eventually(lambda: len(expected()) == DEVICES and published() == expected(), PATIENCE_S)
    assert key not in published(), "the next pod is another one"
    kubectl.delete("plinf", "tiny")
    eventually(lambda: not end_pods(kubectl), PATIENCE_S)


def end_pods(kubectl: Any) -> int:
    """Delete the service's pods, as no kubelet does, and return how many there were."""
    pods = kubectl.list("pods", SELECTOR)
    for pod in pods:
        force_delete(kubectl, pod)
    return len(pods)


def force_delete(kubectl: Any, pod: dict[str, Any]) -> None:
    kubectl.run("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0")


def find_uuid(kubectl: Any, pod: dict[str, Any]) -> str:
    """The UUID of the device that the pod's claim has, as the driver publishes it."""
    (claimed,) = pod["status"]["resourceClaimStatuses"]
    claim = kubectl.get("resourceclaim", claimed["resourceClaimName"])
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    (found,) = [
        device["attributes"]["uuid"]["string"]
        for one in kubectl.list("resourceslices")
        for device in one["spec"]["devices"]
        if device["name"] == result["device"]
    ]
    return str(found)
