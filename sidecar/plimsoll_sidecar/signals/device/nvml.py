"""Device memory from NVML, where this container has the driver. Absent is unknown, never an error.

Device-level figures only: NVML names processes by PIDs of the host, which mean nothing here.
Devices are matched by UUID: NVML's order is not CUDA's.
"""

from __future__ import annotations

from typing import Any

from plimsoll_sidecar.signals.device.sources import DeviceBytes


def describe() -> str:
    """Return what NVML says in this container, for people: its driver, or why there is none."""
    nvml = Nvml()
    if not nvml._load():
        return str(nvml.error)
    library = nvml._library
    try:
        count, driver = library.nvmlDeviceGetCount(), library.nvmlSystemGetDriverVersion()
    except library.NVMLError as error:
        return f"NVML: {error}"
    return f"NVML: driver {driver}, {count} devices"


class Nvml:
    """Loads the library at the first use. ``error`` says why there is none, for people."""

    def __init__(self) -> None:
        self.error: str | None = None
        self._library: Any = None
        self._handles: dict[str, Any] = {}

    def memory(self, uuid: str) -> DeviceBytes | None:
        """Return used and total bytes of the whole device ``uuid`` (``GPU-…`` or ``MIG-…``)."""
        if not self._load():
            return None
        try:
            handle = self._handles.get(uuid)
            if handle is None:
                handle = self._library.nvmlDeviceGetHandleByUUID(uuid)
                self._handles[uuid] = handle
            info = self._library.nvmlDeviceGetMemoryInfo(handle)
        except self._library.NVMLError as error:
            self.error = str(error)
            self._handles.pop(uuid, None)
            return None
        return DeviceBytes(used=int(info.used), total=int(info.total))

    def _load(self) -> bool:
        if self._library is not None:
            return True
        if self.error is not None:
            return False
        try:
            import pynvml
        except ImportError as error:
            self.error = f"NVML: {error}"
            return False
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.error = f"NVML: {error}"
            return False
        self._library = pynvml
        return True
