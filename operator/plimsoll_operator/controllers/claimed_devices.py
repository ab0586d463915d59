"""Read which devices resource claims give to pods."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

from plimsoll_api.pod_devices import make_container_key
from plimsoll_operator.fleet.claimed_devices import (
    ClaimUse,
    find_uuids,
    list_allocated_devices,
)
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.selected_pods import SelectedPod
from plimsoll_operator.kinds import RESOURCE_CLAIM, RESOURCE_SLICE
from plimsoll_operator.runtime.client import Api, ApiError

log = logging.getLogger(__name__)

MAX_PODS_READ = 16
"""Maximum number of pods whose claims one reconcile reads."""
MAX_SLICES = 32
"""Maximum number of ResourceSlices of one driver and node that are read."""
RETRY_S = 300.0
"""Seconds after which unknown devices of a pod are read again."""
MAX_CACHED_PODS = 1024

_Devices = dict[str, tuple[str, ...]]


class ClaimedDevices:
    """Devices of pods from the status of their resource claims.

    They never change while a pod runs, so they are read once. Devices that cannot be read are
    unknown, and never fail a reconcile.
    """

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api, self._clock = api, clock
        self._known: OrderedDict[str, tuple[float, _Devices]] = OrderedDict()

    async def find(self, namespace: str, pods: Iterable[PodView | SelectedPod]) -> _Devices:
        """Return the device UUIDs of each container, by :func:`make_container_key`."""
        found: _Devices = {}
        reads = 0
        for pod in pods:
            if not (pod.uid and pod.claim_uses):
                continue
            read_at, devices = self._known.get(pod.uid, (-math.inf, {}))
            if not devices and reads < MAX_PODS_READ and self._clock() - read_at >= RETRY_S:
                reads += 1
                devices = await self._read(namespace, pod.uid, pod.claim_uses)
                self._known[pod.uid] = (self._clock(), devices)
                if len(self._known) > MAX_CACHED_PODS:
                    self._known.popitem(last=False)
            found |= devices
        return found

    async def _read(self, namespace: str, uid: str, uses: tuple[ClaimUse, ...]) -> _Devices:
        try:
            claims = {
                name: await self._api.get(RESOURCE_CLAIM, namespace, name) or {}
                for name in sorted({one.claim for one in uses})
            }
            allocated = {
                one: list_allocated_devices(claims[one.claim], uid, one.request) for one in uses
            }
            drivers = {device.driver for devices in allocated.values() for device in devices}
            slices = [
                one
                for driver in sorted(drivers)
                for one in await self._api.list_first(
                    RESOURCE_SLICE,
                    None,
                    f"spec.driver={driver},spec.nodeName={uses[0].node}",
                    MAX_SLICES,
                )
            ]
        except (ApiError, OSError, TimeoutError) as error:
            if uid not in self._known:
                log.warning("cannot read the claims of pod %s/%s: %s", namespace, uid, error)
            return {}
        found: _Devices = {}
        for container in {one.container for one in uses}:
            devices = [d for one in uses if one.container == container for d in allocated[one]]
            found[make_container_key(uid, container)] = find_uuids(devices, slices)
        return {key: uuids for key, uuids in found.items() if uuids}
