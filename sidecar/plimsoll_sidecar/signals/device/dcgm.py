"""Device memory from the DCGM exporter of the pod's node, for containers without the driver.

The exporter's page has ``DCGM_FI_DEV_FB_USED`` and its like in MiB, by UUID; a slice of a device in
MIG mode by the UUID of the whole and the id of its GPU instance. With its Kubernetes mapping on it
also says which pod each device was given to.
"""

from __future__ import annotations

from plimsoll_api.supervisor_config import EXPORTER_PORT
from plimsoll_sidecar.signals.device.exporter_page import SCRAPE_S, Exporter
from plimsoll_sidecar.signals.device.sources import DeviceBytes

__all__ = ["SCRAPE_S", "Dcgm"]
MIB = 1 << 20
USED, FREE, RESERVED = (f"DCGM_FI_DEV_FB_{name}" for name in ("USED", "FREE", "RESERVED"))


class Dcgm(Exporter):
    """The exporter's page at ``url``, which has no path."""

    PORT = EXPORTER_PORT
    METRICS = USED, FREE, RESERVED

    def memory(self, uuid: str) -> DeviceBytes | None:
        """Return used and total bytes; None where the page does not have both for the device."""
        found: dict[str, float] = {}
        for row in self._page.rows():
            if _device(row.labels) == _plain(uuid):
                # A device that several pods share has a row for each of them, of the whole.
                found[row.metric] = max(row.value, found.get(row.metric, 0.0))
        used, free = found.get(USED), found.get(FREE)
        if used is None or free is None:
            return None
        whole = used + free + found.get(RESERVED, 0.0)
        return DeviceBytes(used=int(used * MIB), total=int(whole * MIB))

    def assigned(self) -> list[str]:
        """Return the devices that the page says are the pod's; empty where it names no pods."""
        if self._pod is None:
            return []
        mine = [r for r in self._page.rows() if r.metric == USED and self._pod.owns(r.labels)]
        return sorted({name for row in mine if (name := _device(row.labels))})


def _device(labels: dict[str, str]) -> str:
    """``GPU-…``, or ``MIG-GPU-…/GI`` for a slice."""
    uuid, part = labels.get("UUID", ""), labels.get("GPU_I_ID", "")
    return f"MIG-{uuid}/{part}" if part else uuid


def _plain(uuid: str) -> str:
    """Without the compute instance: memory is the GPU instance's."""
    return "/".join(uuid.split("/")[:2])
