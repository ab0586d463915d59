"""Unhealthy devices of pods, as the kubelet reports them, published for the pods' supervisors.

The operator writes the file into the ConfigMap with the supervisor's configuration. The names come
from device drivers, so this module limits them, and a file that exceeds a limit is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from plimsoll_api import decoding

DEVICE_HEALTH_FILE = "device-health.json"
MAX_UNHEALTHY_DEVICES = 16
"""Maximum number of unhealthy devices of a pod in a file. No server has more GPUs."""
MAX_DEVICE_CHARS = 100
MAX_UNHEALTHY_PODS = 64
"""Maximum number of pods in a file."""
MAX_DEVICE_HEALTH_BYTES = 512 << 10
"""Maximum size of a file. The longest names together take 400 KiB."""

_Device = Annotated[str, msgspec.Meta(max_length=MAX_DEVICE_CHARS)]
_Devices = Annotated[tuple[_Device, ...], msgspec.Meta(max_length=MAX_UNHEALTHY_DEVICES)]
_Pods = Annotated[dict[str, _Devices], msgspec.Meta(max_length=MAX_UNHEALTHY_PODS)]


def decode_device_health(data: bytes) -> dict[str, tuple[str, ...]]:
    """Return the unhealthy devices in a file, by pod. Raises :class:`decoding.MalformedError`."""
    if len(data) > MAX_DEVICE_HEALTH_BYTES:
        raise decoding.MalformedError(
            f"the device health file has more than {MAX_DEVICE_HEALTH_BYTES >> 10} KiB"
        )
    pods: dict[str, tuple[str, ...]] = decoding.decode(data, _Pods)
    return pods


def encode_device_health(pods: Mapping[str, tuple[str, ...]]) -> bytes:
    """Return the content of a file with the unhealthy devices by pod."""
    return msgspec.json.encode(pods, order="sorted") + b"\n"
