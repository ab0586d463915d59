"""From a pod's resource claims to the UUIDs that its supervisor gives to NVML.

Tests ``controllers/claimed_devices.py`` and ``fleet/claimed_devices.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plimsoll_api.pod_devices import (
    CLAIMED_DEVICES_FILE,
    MAX_CLAIMING_CONTAINERS,
    MAX_POD_DEVICES,
    MAX_POD_DEVICES_BYTES,
    decode_pod_devices,
    encode_pod_devices,
    make_container_key,
)
from plimsoll_operator.controllers.claimed_devices import MAX_PODS_READ, RETRY_S, ClaimedDevices
from plimsoll_operator.fleet.pods import PodView
from plimsoll_sidecar.signals.other_pods import PodDevicesFile
from tests.fake_api import Answer, FakeApi

DRIVER, NODE = "gpu.example.com", "node-1"
FOUND = {"uid-0/engine": (f"GPU-{0:08x}-0000-0000-0000-000000000000",)}


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-0000-0000-000000000000"


def result(number: int, request: str = "gpu", **more: Any) -> dict[str, Any]:
    name = {"driver": DRIVER, "pool": NODE, "device": f"gpu-{number}"}
    return name | {"request": request} | more


def claim(number: int, *results: dict[str, Any], reserved_for: str = "") -> dict[str, Any]:
    users = [{"resource": "pods", "name": "x", "uid": reserved_for or f"uid-{number}"}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "default", "name": f"qwen-{number}-gpus"},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": list(results or [result(number)])}},
            "reservedFor": users,
        },
    }


def published(
    count: int, node: str = NODE, generation: int = 1, attribute: str = "uuid", first: int = 0
) -> dict[str, Any]:
    """The slice of a node, whose devices have UUIDs from ``first`` on."""
    devices = [
        {"name": f"gpu-{n}", "attributes": {attribute: {"string": uuid(first + n)}}}
        for n in range(count)
    ]
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{generation}"},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices},
    }


def pod(number: int, request: str = "", node: str = NODE, sidecar: str = "") -> PodView:
    used = {"name": "gpus"} | ({"request": request} if request else {})
    containers = [{"name": "engine", "resources": {"claims": [used]}}]
    if sidecar:
        own = {"name": "gpus", "request": sidecar}
        containers.append({"name": "other", "resources": {"claims": [own]}})
    shared = {"name": "supervisor", "restartPolicy": "Always", "resources": {"claims": [used]}}
    names = {"name": "gpus", "resourceClaimName": f"qwen-{number}-gpus"}
    return PodView.parse(
        {
            "metadata": {"name": f"qwen-{number}", "uid": f"uid-{number}"},
            "spec": {
                "nodeName": node,
                "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}],
                "initContainers": [shared],
                "containers": containers,
            },
            "status": {"resourceClaimStatuses": [names]},
        }
    )


class Cluster(FakeApi):
    """Counts the requests that read claims."""

    now = 0.0

    def __init__(self, *items: dict[str, Any]) -> None:
        super().__init__()
        for one in items:
            self.put(one)
        self.devices = ClaimedDevices(self, lambda: self.now)

    def find(self, *pods: PodView) -> dict[str, tuple[str, ...]]:
        return asyncio.run(self.devices.find("default", pods))


def test_the_engine_has_the_device_of_its_claim_and_it_is_read_once() -> None:
    api = Cluster(claim(0), published(2))
    assert api.find(pod(0)) == FOUND, "and not the supervisor"
    asked = api.requests
    assert api.find(pod(0)) == FOUND
    assert api.requests == asked


@pytest.mark.parametrize(
    "unknown",
    [
        [],
        [claim(0)],
        [published(2)],
        [claim(0, reserved_for="uid-1"), published(2)],
        [claim(0), published(2, node="node-2")],
        [claim(0, result(0), result(7)), published(2)],
        [claim(0, result(0, adminAccess=True)), published(2)],
        [claim(0), published(2, attribute="serial")],
    ],
)
def test_what_is_not_known_of_every_device_is_unknown(unknown: list[dict[str, Any]]) -> None:
    assert Cluster(*unknown).find(pod(0)) == {}


def test_a_container_has_the_devices_of_its_request() -> None:
    results = [result(0, "one"), result(1, "other/large"), result(2, "other/large")]
    api = Cluster(claim(0, *results), published(3))
    assert api.find(pod(0, "one", sidecar="other")) == {
        "uid-0/engine": (uuid(0),),
        "uid-0/other": (uuid(1), uuid(2)),
    }


def test_the_newest_generation_of_a_pool_counts_and_its_attribute_may_name_the_driver() -> None:
    old, new = published(1, first=5), published(1, generation=2, attribute=f"{DRIVER}/uuid")
    assert Cluster(claim(0), old, new).find(pod(0)) == FOUND


def test_a_claim_that_cannot_be_read_is_read_again_minutes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = Cluster(claim(0), published(1))

    def forbid(*_: Any) -> Any:
        raise Answer(403, "Forbidden", "resourceslices is forbidden")

    with monkeypatch.context() as changes:
        changes.setattr(api, "_list", forbid)
        assert api.find(pod(0)) == {}
    assert api.find(pod(0)) == {}
    api.now = RETRY_S
    assert api.find(pod(0)) == FOUND


def test_one_reconcile_reads_a_bounded_number_of_pods() -> None:
    count = 2 * MAX_PODS_READ + 1
    api = Cluster(*(claim(n) for n in range(count)), published(count))
    pods = [pod(n) for n in range(count)]
    assert [len(api.find(*pods)) for _ in range(3)] == [MAX_PODS_READ, 2 * MAX_PODS_READ, count]


def test_the_longest_file_can_be_read_by_each_container(tmp_path: Path) -> None:
    devices = tuple(map(uuid, range(MAX_POD_DEVICES)))
    keys = [make_container_key(f"{n:036}", "c" * 63) for n in range(2 * MAX_CLAIMING_CONTAINERS)]
    text = encode_pod_devices(dict.fromkeys(keys, devices), MAX_CLAIMING_CONTAINERS)
    assert len(text) < MAX_POD_DEVICES_BYTES / 2
    assert len(decode_pod_devices(text.encode())) == MAX_CLAIMING_CONTAINERS
    path = tmp_path / CLAIMED_DEVICES_FILE
    path.write_text(text)
    assert PodDevicesFile(path, keys[0]).read() == devices
    assert PodDevicesFile(path, keys[-1]).read() == ()
