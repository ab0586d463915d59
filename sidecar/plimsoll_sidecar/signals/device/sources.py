"""Memory of a device from outside the engine: by NVML if this container has it, or an exporter.

NVML names processes by PIDs of the host, which mean nothing here: device-level figures only.
Devices are matched by UUID: NVML's order is not CUDA's. Absent is unknown, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from plimsoll_api.admin import DeviceMemory


class DeviceBytes(msgspec.Struct, frozen=True):
    """The memory of a whole device, in bytes."""

    used: int
    total: int


class DeviceSource(Protocol):
    """Where bytes of a device are read: NVML or an exporter's page."""

    def memory(self, uuid: str) -> DeviceBytes | None:
        """Memory of the device ``uuid`` (``GPU-…`` or ``MIG-…``); None where it is unknown."""

    @property
    def error(self) -> str | None:
        """Why nothing is known, for people; None where something is, or nothing was asked."""


@runtime_checkable
class Assigns(Protocol):
    """A source that also knows which devices the pod has."""

    def assigned(self) -> list[str]:
        """Return the devices that were given to this pod, in the words that ``memory`` takes."""


NOT_ASKED = {
    "dcgm": "no port is set (dcgmExporterPort, or --dcgm-exporter-port of plimsoll inject)",
    "amd": "no port is set (amdExporterPort, or --amd-exporter-port of plimsoll inject)",
}


def outside(
    nvml: DeviceSource, dcgm: DeviceSource | None, amd: DeviceSource | None
) -> dict[str, DeviceSource]:
    """By name, the best first."""
    found = {"nvml": nvml, "dcgm": dcgm, "amd": amd}
    return {name: source for name, source in found.items() if source is not None}


def assigned(sources: Iterable[DeviceSource]) -> list[DeviceMemory]:
    """Return what the first exporter that names pods says was given to this one."""
    for source in sources:
        names = source.assigned() if isinstance(source, Assigns) else []
        if names:
            return [DeviceMemory(index=index, uuid=name) for index, name in enumerate(names)]
    return []


def reasons(
    sources: Mapping[str, DeviceSource], in_use: str | None, devices: list[str]
) -> list[str]:
    """Why each source that is not in use tells nothing.

    ``devices`` are the engine's, as far as they could be named.
    """
    found: list[str] = []
    if not devices and in_use is None:
        found.append("no variable, open file or exporter names a device of the engine")
    for name in ("nvml", "dcgm", "amd"):
        source = sources.get(name)
        if name == in_use:
            continue
        if source is None:
            found.append(f"{name}: {NOT_ASKED.get(name, 'not tried')}")
            continue
        unknown = [device for device in devices if source.memory(device) is None]
        if source.error is not None:
            found.append(f"{name}: {source.error}")
        elif unknown:
            found.append(f"{name}: has no memory of {', '.join(unknown[:4])}")
    return found


def describe_nvml() -> str:
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
    """Loads the library at its first use. ``error`` says why there is none, for people."""

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
