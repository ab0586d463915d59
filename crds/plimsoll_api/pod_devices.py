"""Devices of pods, published for the pods' supervisors.

The keys of the files contain the UID of a pod, because a StatefulSet reuses names. Drivers
choose the names of devices, so the size of the files is limited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from plimsoll_api import decoding

DEVICE_HEALTH_FILE = "device-health.json"
"""File with the devices of each pod that the kubelet reports as unhealthy, by the pod's UID."""
CLAIMED_DEVICES_FILE = "claimed-devices.json"
"""File with the UUIDs of the devices that resource claims give to each container, by
:func:`make_container_key`."""
MAX_POD_DEVICES = 16
"""Maximum number of devices for a key in a file; no server has more GPUs."""
MAX_DEVICE_CHARS = 100
MAX_UNHEALTHY_PODS = 64
MAX_CLAIMING_CONTAINERS = 256
MAX_POD_DEVICES_BYTES = 512 << 10
"""Maximum size of a file; unhealthy devices with the longest names take 400 KiB."""

_UUID_PATTERN = re.compile(r"(?i:gpu|mig)-[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_Device = Annotated[str, msgspec.Meta(max_length=MAX_DEVICE_CHARS)]
_Devices = Annotated[tuple[_Device, ...], msgspec.Meta(max_length=MAX_POD_DEVICES)]
_DevicesByKey = Annotated[dict[str, _Devices], msgspec.Meta(max_length=MAX_CLAIMING_CONTAINERS)]


def is_device_uuid(text: str) -> bool:
    """Report whether ``text`` is the UUID of a GPU or a MIG slice, as NVML takes it."""
    return _UUID_PATTERN.fullmatch(text) is not None


def make_container_key(pod_uid: str, container: str) -> str:
    """Return the key of a container in the file of claimed devices."""
    return f"{pod_uid}/{container}"


def decode_pod_devices(data: bytes) -> dict[str, tuple[str, ...]]:
    """Return the devices in a file, by key. Raises :class:`decoding.MalformedError`."""
    if len(data) > MAX_POD_DEVICES_BYTES:
        raise decoding.MalformedError(
            f"the file of devices has more than {MAX_POD_DEVICES_BYTES >> 10} KiB"
        )
    devices: dict[str, tuple[str, ...]] = decoding.decode(data, _DevicesByKey)
    return devices


def encode_pod_devices(devices: Mapping[str, tuple[str, ...]], max_keys: int) -> str:
    """Return the content of a file with the first ``max_keys`` keys that have devices, or ""."""
    kept = dict(sorted(one for one in devices.items() if one[1])[:max_keys])
    return msgspec.json.encode(kept).decode() + "\n" if kept else ""
