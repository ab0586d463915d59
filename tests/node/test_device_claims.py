"""``examples/integrations/device-claims.yaml`` with the example driver for DRA: one device for two
generations of a pod, and what a service says without the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import yaml

from plimsoll_operator.render.paths import CONFIG_DIR
from tests.lab import device_driver
from tests.lab.device_driver import CLASS, DEVICE_CLASS, DeviceDriver
from tests.lab.errors import MissingError
from tests.lab.images import ROOT
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, new_lab
from tests.lab.operator import Operator
from tests.node.service import READY_S, SERVICE, Manifest, plain, pods, ready, status
from tests.node.supervised import ready_since

EXAMPLE = ROOT / "examples" / "integrations" / "device-claims.yaml"
SAID_S = 60.0
"""Seconds until the service repeats what the scheduler says of its pod."""
MOUNTED_S = 180.0
"""Seconds until the kubelet has written a changed ConfigMap into a pod."""
CLAIMED = f"""
from pathlib import Path
from plimsoll_api.pod_devices import CLAIMED_DEVICES_FILE, make_container_key
from plimsoll_sidecar.act.lease_counts import read_pod_uid
from plimsoll_sidecar.clients.kube import SERVICE_ACCOUNT_FOLDER
from plimsoll_sidecar.signals.other_pods import PodDevicesFile
key = make_container_key(read_pod_uid(SERVICE_ACCOUNT_FOLDER / "token"), "engine")
print(*PodDevicesFile(Path("{CONFIG_DIR}") / CLAIMED_DEVICES_FILE, key).read())
"""


@pytest.fixture(scope="module")
def node(node_tier: None) -> Iterator[Lab]:
    """A lab of its own, with a containerd that gives a claim's devices to containers."""
    try:
        device_driver.build()
        programs = device_driver.build_containerd()
    except MissingError as missing:
        pytest.skip(str(missing))
    lab = new_lab(node=True)
    lab.start()
    try:
        lab.start_node(programs=programs)
        yield lab
    finally:
        lab.stop()


def says(kube: Kube, text: str) -> bool:
    return text in message(kube)


def message(kube: Kube) -> str:
    found = [one for one in status(kube).get("conditions", []) if one["type"] == "Ready"]
    return f"{found[0]['reason']}: {found[0]['message']}" if found else ""


def environment(kube: Kube, pod: dict[str, Any], container: str) -> dict[str, str]:
    lines = kube("exec", pod["metadata"]["name"], "-c", container, "--", "env").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_engine_gets_the_device_of_its_claim(
    node: Lab, kube: Kube, operator: Callable[..., Operator], manifest: Manifest
) -> None:
    operator()
    template, example = yaml.safe_load_all(EXAMPLE.read_text())
    (asked,) = template["spec"]["spec"]["devices"]["requests"]
    asked["exactly"]["deviceClassName"] = CLASS
    service = plain(manifest)
    resources = service["spec"]["engine"].setdefault("resources", {})
    resources |= example["spec"]["engine"]["resources"]
    kube.apply(service)
    for expected, then in (
        (f"ResourceClaimTemplate {template['metadata']['name']}", template),
        (CLASS, DEVICE_CLASS),
        ("cannot allocate all claims", None),
    ):
        eventually(partial(says, kube, expected), f"Ready says {expected}", SAID_S)
        print(message(kube))
        if then is not None:
            kube.apply(then)

    driver = DeviceDriver(node)
    driver.start(devices=1)
    ready(kube)
    (first,) = pods(kube)
    device_of(kube, first)

    # The only device is taken: the old pod must go before the new one comes.
    kube.patch("plinf", SERVICE, {"spec": {"engine": {"env": [{"name": "NEW", "value": "1"}]}}})

    def renewed() -> dict[str, Any] | None:
        for pod in pods(kube):
            if pod["metadata"]["uid"] != first["metadata"]["uid"]:
                return pod if ready_since(pod) else None
        return None

    second = eventually(renewed, "a pod in place of the old one is ready", READY_S)
    assert second is not None
    device_of(kube, second)
    driver.stop()


def device_of(kube: Kube, pod: dict[str, Any]) -> None:
    """The pod's claim is allocated, only the engine has its device, and its supervisor knows it."""
    (claimed,) = pod["status"]["resourceClaimStatuses"]
    claim = kube.get("resourceclaim", claimed["resourceClaimName"]) or {}
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert (result["driver"], result["device"]) == (CLASS, "gpu-0")
    engine = environment(kube, pod, "engine")
    assert engine["GPU_DEVICE_0"] == "gpu-0"
    assert engine["GPU_DEVICE_0_RESOURCE_CLAIM"] == claim["metadata"]["uid"]
    assert not any(name.startswith("GPU_DEVICE") for name in environment(kube, pod, "supervisor"))
    (published,) = kube.list("resourceslices", "")
    (device,) = published["spec"]["devices"]
    uuid, name = device["attributes"]["uuid"]["string"], pod["metadata"]["name"]

    def is_known() -> bool:
        found = kube("exec", name, "-c", "supervisor", "--", "python", "-c", CLAIMED)
        return bool(found.strip() == uuid)

    eventually(is_known, f"the supervisor knows {uuid}", MOUNTED_S)
