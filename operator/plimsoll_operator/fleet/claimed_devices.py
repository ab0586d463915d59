"""Find the UUIDs of the devices that resource claims give to the containers of a pod."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from plimsoll_api.pod_devices import MAX_POD_DEVICES, is_device_uuid
from plimsoll_operator.kinds import Object
from plimsoll_operator.render.containers import list_all_containers
from plimsoll_operator.render.names import SUPERVISOR

MAX_CLAIM_USES = 16
"""Maximum number of claims of a pod's containers that are read."""
UUID_ATTRIBUTE = "uuid"


class ClaimUse(NamedTuple):
    """Use of a resource claim by a container of a pod on ``node``.

    If ``request`` is empty, the container gets all devices of the claim.
    """

    container: str
    claim: str
    request: str
    node: str


class AllocatedDevice(NamedTuple):
    """A device of a claim, by the names under which its driver publishes it."""

    driver: str
    pool: str
    device: str


def list_claim_uses(pod: Object) -> tuple[ClaimUse, ...]:
    """Return the claims that the containers of ``pod`` use; empty before it is scheduled."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    node = str(spec.get("nodeName") or "")
    names = {
        one.get("name"): str(one["resourceClaimName"])
        for one in (
            *(spec.get("resourceClaims") or ()),
            *(status.get("resourceClaimStatuses") or ()),
        )
        if one.get("resourceClaimName")
    }
    if not (node and names):
        return ()
    uses = [
        ClaimUse(container["name"], names[one["name"]], str(one.get("request") or ""), node)
        for container in list_all_containers(spec)
        if container["name"] != SUPERVISOR
        for one in (container.get("resources") or {}).get("claims") or ()
        if one.get("name") in names
    ]
    return tuple(uses[:MAX_CLAIM_USES])


def list_allocated_devices(claim: Object, pod_uid: str, request: str = "") -> list[AllocatedDevice]:
    """Return the devices of ``claim`` for ``request``, or all of them without a request.

    The list is empty if the claim is not reserved for the pod, because a pod may name any claim of
    its namespace. Devices with administrative access are omitted.
    """
    status = claim.get("status") or {}
    if pod_uid not in {one.get("uid") for one in status.get("reservedFor") or ()}:
        return []
    devices = (status.get("allocation") or {}).get("devices") or {}
    return [
        AllocatedDevice(one["driver"], one["pool"], one["device"])
        for one in devices.get("results") or ()
        # ``REQUEST/SUBREQUEST`` if the request has alternatives.
        if request in ("", one["request"], one["request"].partition("/")[0])
        and not one.get("adminAccess")
    ]


def find_uuids(devices: Iterable[AllocatedDevice], slices: Iterable[Object]) -> tuple[str, ...]:
    """Return the UUIDs that drivers publish for ``devices``; empty unless all are known."""
    newest: dict[AllocatedDevice, tuple[int, str]] = {}
    for spec in (one["spec"] for one in slices):
        pool = spec["pool"]
        for device in spec.get("devices") or ():
            name = AllocatedDevice(spec["driver"], pool["name"], device["name"])
            known = (int(pool["generation"]), _read_uuid(device.get("attributes") or {}, name))
            newest[name] = max(known, newest.get(name, known))
    found = dict.fromkeys(newest.get(one, (0, ""))[1] for one in devices)
    if not all(map(is_device_uuid, found)) or len(found) > MAX_POD_DEVICES:
        return ()
    return tuple(found)


# An attribute's name may have the driver's name as its domain.
def _read_uuid(attributes: Mapping[str, Object], name: AllocatedDevice) -> str:
    qualified = attributes.get(f"{name.driver}/{UUID_ATTRIBUTE}") or {}
    return str((attributes.get(UUID_ATTRIBUTE) or qualified).get("string") or "")
