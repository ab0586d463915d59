"""Find the unhealthy devices of pods.

The kubelet reports them with the feature gate ``ResourceHealthStatus`` (KEP-4680).
"""

from __future__ import annotations

from plimsoll_api.pod_devices import MAX_DEVICE_CHARS, MAX_POD_DEVICES
from plimsoll_operator.fleet.untrusted_text import make_printable_line
from plimsoll_operator.kinds import Object

UNHEALTHY = "Unhealthy"


def list_unhealthy_devices(pod: Object) -> tuple[str, ...]:
    """Return the devices that the kubelet reports as unhealthy.

    An example is ``gpu-0 (claim:devices)``.
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
        make_printable_line(one, MAX_DEVICE_CHARS) for one in sorted(found)[:MAX_POD_DEVICES]
    )
