"""Find the unhealthy devices of pods, and publish them for the pods' supervisors.

With the feature gate ``ResourceHealthStatus`` (KEP-4680), the kubelet writes the health of devices
into the pod's status, if their device plugin or DRA driver reports it. Without a report, the health
is unknown, and this module returns nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_api.device_health import (
    MAX_DEVICE_CHARS,
    MAX_UNHEALTHY_DEVICES,
    MAX_UNHEALTHY_PODS,
    encode_device_health,
)
from plimsoll_operator.fleet.untrusted_text import make_printable_line
from plimsoll_operator.kinds import Object

UNHEALTHY = "Unhealthy"


def list_unhealthy_devices(pod: Object) -> tuple[str, ...]:
    """Return the devices of a ``pod`` that the kubelet reports as unhealthy, as text.

    An example is ``gpu-0 (claim:devices)``, with the name of the resource or claim in parentheses.
    """
    status = pod.get("status") or {}
    statuses = (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    )
    found = {
        f"{device.get('resourceID')} ({resource.get('name')})"
        for container in statuses
        for resource in container.get("allocatedResourcesStatus") or ()
        for device in resource.get("resources") or ()
        if device.get("health") == UNHEALTHY
    }
    return tuple(
        make_printable_line(one, MAX_DEVICE_CHARS) for one in sorted(found)[:MAX_UNHEALTHY_DEVICES]
    )


def make_device_health_file(pods: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    """Return the content of the file for ``pods`` and their unhealthy devices; empty if none."""
    unhealthy = sorted((name, devices) for name, devices in pods if devices)
    if not unhealthy:
        return ""
    return encode_device_health(dict(unhealthy[:MAX_UNHEALTHY_PODS])).decode()
