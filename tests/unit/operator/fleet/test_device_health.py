"""A device that the kubelet reports as unhealthy: from the pod's status to a supervisor's evidence.

Tests ``fleet/device_health.py``, ``plimsoll_api/pod_devices.py`` and what the supervisor makes of
the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.assessment import Assessment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.pod_devices import (
    DEVICE_HEALTH_FILE,
    MAX_DEVICE_CHARS,
    MAX_POD_DEVICES,
    MAX_POD_DEVICES_BYTES,
    MAX_UNHEALTHY_PODS,
    decode_pod_devices,
    encode_pod_devices,
)
from plimsoll_operator.fleet.device_health import list_unhealthy_devices
from plimsoll_operator.fleet.pods import PodView
from plimsoll_sidecar.govern.group import add_device_health
from plimsoll_sidecar.signals.other_pods import PodDevicesFile

KINDS = (IncidentKind.HOST_GROWTH, IncidentKind.DEVICE_GROWTH, IncidentKind.STALL)


def pod(*devices: dict[str, Any], ready: bool = True, resource: str = "claim:gpus") -> Any:
    state = {"running": {}} if ready else {"waiting": {"reason": "CrashLoopBackOff"}}
    engine = {
        "name": "engine",
        "ready": ready,
        "restartCount": 0,
        "state": state,
        "lastState": {} if ready else {"terminated": {"exitCode": 1}},
        "allocatedResourcesStatus": [{"name": resource, "resources": list(devices)}],
    }
    return {
        "metadata": {"name": "qwen-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {},
        "status": {"containerStatuses": [engine]},
    }


def device(number: int, health: str | None = "Unhealthy") -> dict[str, Any]:
    return {"resourceID": f"gpu-{number}"} | ({"health": health} if health else {})


def test_only_a_device_that_is_reported_unhealthy_is_unhealthy() -> None:
    healths = ("Healthy", "Unknown", None, "Unhealthy")
    devices = [device(number, health) for number, health in enumerate(healths)]
    assert list_unhealthy_devices(pod(*devices)) == ("gpu-3 (claim:gpus)",)
    assert list_unhealthy_devices({"metadata": {}}) == ()


def test_a_pod_that_is_not_ready_names_its_unhealthy_device() -> None:
    cause = PodView.parse(pod(device(0), ready=False)).find_cause("engine")
    assert cause is not None
    assert cause.reason == "DeviceUnhealthy"
    assert cause.message == "unhealthy device: gpu-0 (claim:gpus); ended: exit code 1"
    assert PodView.parse(pod(device(0))).find_cause("engine") is None, "it is ready"


def health_file(unhealthy: dict[str, tuple[str, ...]]) -> str:
    return encode_pod_devices(unhealthy, MAX_UNHEALTHY_PODS)


def test_the_supervisor_has_it_as_evidence_of_what_devices_explain(tmp_path: Path) -> None:
    found = list_unhealthy_devices(pod(device(0), device(1, "Healthy")))
    path = tmp_path / DEVICE_HEALTH_FILE
    path.write_text(health_file({"uid-of-qwen-0": found, "uid-of-qwen-1": ()}))
    assert PodDevicesFile(path, "uid-of-qwen-0").read() == found
    assert PodDevicesFile(path, "uid-of-the-next-qwen-0").read() == ()
    before = Assessment(
        t=1.0,
        epoch=1,
        warm=True,
        suspicions=[Suspicion(kind, None, 0.9, 0.2, evidence=["first"]) for kind in KINDS],
    )
    host, *others = add_device_health(before, found).suspicions
    assert host == before.suspicions[0]
    for old, new in zip(before.suspicions[1:], others, strict=True):
        told = "the kubelet reports an unhealthy device: gpu-0 (claim:gpus)"
        assert new.evidence == [told, "first"]
        assert new.confidence == old.confidence
    assert add_device_health(before, ()) is before


@pytest.mark.parametrize("text", ["", "{", '{"uid": "gpu"}', '{"uid": [1]}', "[]"])
def test_a_file_that_is_none_says_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / DEVICE_HEALTH_FILE
    file = PodDevicesFile(path, "uid")
    assert file.read() == ()
    path.write_text(text)
    assert file.read() == ()
    path.write_text(health_file({"uid": ("x",)}) + " " * MAX_POD_DEVICES_BYTES)
    assert file.read() == ()


@given(st.lists(st.text(max_size=300), max_size=40), st.text(max_size=80))
def test_what_a_driver_calls_its_devices_fits_the_file(names: list[str], resource: str) -> None:
    devices = [{"resourceID": name, "health": "Unhealthy"} for name in names]
    found = list_unhealthy_devices(pod(*devices, resource=resource))
    assert len(found) == min(MAX_POD_DEVICES, len(set(names)))
    assert all(len(one) <= MAX_DEVICE_CHARS and one.isprintable() for one in found)
    text = health_file({"uid": found})
    published = decode_pod_devices(text.encode()) if text else {}
    assert published == ({"uid": found} if found else {})


def test_the_longest_file_can_be_read() -> None:
    names = tuple("\U0001f600" * MAX_DEVICE_CHARS for _ in range(MAX_POD_DEVICES))
    text = health_file({f"{n:036}": names for n in range(2 * MAX_UNHEALTHY_PODS)})
    assert len(decode_pod_devices(text.encode())) == MAX_UNHEALTHY_PODS
