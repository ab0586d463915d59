"""A device that the kubelet reports as unhealthy: from the pod's status to a supervisor's evidence.

Tests ``fleet/device_health.py``, ``plimsoll_api/device_health.py`` and what the supervisor makes of
the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.assessment import Assessment, Suspicion
from plimsoll_api.device_health import (
    DEVICE_HEALTH_FILE,
    MAX_DEVICE_CHARS,
    MAX_DEVICE_HEALTH_BYTES,
    MAX_UNHEALTHY_DEVICES,
    MAX_UNHEALTHY_PODS,
    decode_device_health,
)
from plimsoll_api.incidents import IncidentKind
from plimsoll_operator.fleet.device_health import list_unhealthy_devices, make_device_health_file
from plimsoll_operator.fleet.pods import PodView
from plimsoll_sidecar.detect.fleet import add_device_health
from plimsoll_sidecar.signals.other_pods import DeviceHealthFile

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


def test_the_supervisor_has_it_as_evidence_of_what_devices_explain(tmp_path: Path) -> None:
    found = list_unhealthy_devices(pod(device(0), device(1, "Healthy")))
    (tmp_path / DEVICE_HEALTH_FILE).write_text(
        make_device_health_file([("qwen-0", found), ("qwen-1", ())])
    )
    file = DeviceHealthFile(tmp_path / DEVICE_HEALTH_FILE)
    assert (file.read("qwen-0"), file.read("qwen-1")) == (found, ())
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


@pytest.mark.parametrize("text", ["", "{", '{"qwen-0": "gpu"}', '{"qwen-0": [1]}', "[]"])
def test_a_file_that_is_none_says_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / DEVICE_HEALTH_FILE
    assert DeviceHealthFile(path).read("qwen-0") == ()
    path.write_text(text)
    assert DeviceHealthFile(path).read("qwen-0") == ()
    path.write_text(make_device_health_file([("qwen-0", ("x",))]) + " " * MAX_DEVICE_HEALTH_BYTES)
    assert DeviceHealthFile(path).read("qwen-0") == ()


@given(st.lists(st.text(max_size=300), max_size=40), st.text(max_size=80))
def test_what_a_driver_calls_its_devices_fits_the_file(names: list[str], resource: str) -> None:
    devices = [{"resourceID": name, "health": "Unhealthy"} for name in names]
    found = list_unhealthy_devices(pod(*devices, resource=resource))
    assert len(found) == min(MAX_UNHEALTHY_DEVICES, len(set(names)))
    assert all(len(one) <= MAX_DEVICE_CHARS and one.isprintable() for one in found)
    text = make_device_health_file([("qwen-0", found)])
    published = decode_device_health(text.encode()) if text else {}
    assert published == ({"qwen-0": found} if found else {})


def test_the_longest_file_can_be_read() -> None:
    names = tuple("\U0001f600" * MAX_DEVICE_CHARS for _ in range(MAX_UNHEALTHY_DEVICES))
    text = make_device_health_file((f"pod-{n}", names) for n in range(2 * MAX_UNHEALTHY_PODS))
    assert len(decode_device_health(text.encode())) == MAX_UNHEALTHY_PODS
