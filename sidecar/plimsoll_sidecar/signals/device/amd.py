"""Device memory of AMD GPUs from the device-metrics-exporter of the pod's node.

``gpu_used_vram`` and ``gpu_total_vram`` are in MiB; the exporter may be told to put a prefix before
its names. The labels ``pod``, ``namespace`` and ``container`` cannot be turned off, so that they
say which devices are the pod's; ``gpu_id`` is the device's number on its node.
"""

from __future__ import annotations

from plimsoll_api.supervisor_config import AMD_EXPORTER_PORT
from plimsoll_sidecar.signals.device.exporter_page import Exporter
from plimsoll_sidecar.signals.device.sources import DeviceBytes

MIB = 1 << 20
PREFIX = "amd_"
USED, TOTAL = "gpu_used_vram", "gpu_total_vram"


class AmdExporter(Exporter):
    """The exporter's page at ``url``, which has no path."""

    PORT = AMD_EXPORTER_PORT
    METRICS = tuple(prefix + name for prefix in ("", PREFIX) for name in (USED, TOTAL))

    def memory(self, uuid: str) -> DeviceBytes | None:
        """Return used and total bytes; None where the page does not have both for the device."""
        found: dict[str, float] = {}
        for row in self._page.rows():
            if _device(row.labels) == uuid:
                name = row.metric.removeprefix(PREFIX)
                found[name] = max(row.value, found.get(name, 0.0))
        used, total = found.get(USED), found.get(TOTAL)
        if used is None or total is None:
            return None
        return DeviceBytes(used=int(used * MIB), total=int(total * MIB))

    def assigned(self) -> list[str]:
        """Return the devices that the page says are the pod's."""
        if self._pod is None:
            return []
        mine = [row for row in self._page.rows() if self._pod.owns(row.labels)]
        return sorted({name for row in mine if (name := _device(row.labels))})


def _device(labels: dict[str, str]) -> str:
    number = labels.get("gpu_id", "")
    return f"AMD-{number}" if number else ""
