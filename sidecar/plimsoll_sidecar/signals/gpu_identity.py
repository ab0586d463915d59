"""Find the devices that an external engine uses.

The environment variable of the device plugin names the devices. With CDI, it is
``NVIDIA_VISIBLE_DEVICES=void``, and with DRA it is absent. The open files of the engine's processes
then show the devices: ``/proc/PID/fd`` leads to the device files, and ``/proc/driver/nvidia`` maps
their minor numbers to UUIDs. A process that uses a MIG slice also has the capability files of the
slice open.

Processes open these files some time after their start, so the search is repeated. It shows which
devices are in use, but not how much memory.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from plimsoll_api.admin import DeviceMemory
from plimsoll_sidecar.signals.process_table import (
    MAX_DESCRIPTORS,
    list_entry_names,
    read_environment_variable,
)

PROC = Path("/proc")
MAX_GPUS = 64
NVIDIA_CONTROL_MINORS = (254, 255)
"""Minor numbers of nvidia-modeset and nvidiactl."""
DEVICE_DRIVER_NAMES, CAPABILITY_DRIVER_NAME = (
    frozenset({"nvidia", "nvidia-frontend"}),
    "nvidia-caps",
)
NVIDIA_MAJOR = 195
"""Major number of NVIDIA's device files on all machines. It replaces a missing entry in
``/proc/devices``."""
FIRST_SEARCH_PERIOD_S, LATER_SEARCH_PERIOD_S = 5.0, 60.0
"""Interval of the searches in seconds: until a device has been found, and after that. The searches
go on because a process may open another device later."""
VISIBLE_DEVICES_ENV = "NVIDIA_VISIBLE_DEVICES"
MAX_GPU_NAME_CHARS = 96
"""Maximum length of a device's name; ``MIG-GPU-<UUID>/GI/CI`` has fewer than 60 characters."""


class DeviceFinder:
    """Finds the GPUs of one engine. Call :meth:`reset` when another engine has started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, proc: Path = PROC) -> None:
        self._clock, self._proc = clock, proc
        self.reset()

    def reset(self) -> None:
        """Forget the devices, so that the next call searches again."""
        self._next = 0.0
        self._found: list[str] = []

    def find_devices(self, main_pid: int, pids: Iterable[int]) -> list[DeviceMemory]:
        """Return the devices by UUID, without their memory; empty if none is known yet.

        The environment of ``main_pid`` names the devices. ``pids`` are all processes of the engine.
        """
        now = self._clock()
        if now >= self._next:
            names = _read_visible_devices(main_pid) or find_open_devices(pids, self._proc)
            self._found += [name for name in names if name not in self._found]
            del self._found[MAX_GPUS:]
            self._next = now + (LATER_SEARCH_PERIOD_S if self._found else FIRST_SEARCH_PERIOD_S)
        return [DeviceMemory(index=index, uuid=name) for index, name in enumerate(self._found)]


def _read_visible_devices(main_pid: int) -> list[str]:
    """Return the devices that the variable of the device plugin names.

    The list is empty if it names no device, or all devices of the node.
    """
    names = (read_environment_variable(main_pid, VISIBLE_DEVICES_ENV) or "").split(",", MAX_GPUS)[
        :MAX_GPUS
    ]
    known = [n for n in names if n.startswith(("GPU-", "MIG-")) and len(n) <= MAX_GPU_NAME_CHARS]
    return known if len(known) == len(names) else []


def find_open_devices(pids: Iterable[int], proc: Path = PROC) -> list[str]:
    """Return the names of the devices that these processes have open; empty if unknown.

    A name is ``GPU-…``, or ``MIG-GPU-…/GI/CI`` (GPU instance, compute instance) for a MIG slice.
    """
    majors = _read_driver_names(proc)
    frontends = {major for major, name in majors.items() if name in DEVICE_DRIVER_NAMES} or {
        NVIDIA_MAJOR
    }
    caps = {major for major, name in majors.items() if name == CAPABILITY_DRIVER_NAME}
    opened = {device for pid in pids for device in _find_open_device_numbers(f"{proc}/{pid}/fd")}
    minors = {
        minor
        for major, minor in opened
        if major in frontends and minor not in NVIDIA_CONTROL_MINORS
    }
    if not minors:
        return []
    slices = _find_open_slices(proc, {minor for major, minor in opened if major in caps})
    found: list[str] = []
    for minor, uuid in sorted(_read_gpu_uuids(proc).items()):
        if minor in minors:
            found += [f"MIG-{uuid}/{part}" for part in slices.get(minor, [])] or [uuid]
    return found


def _find_open_device_numbers(folder: str) -> set[tuple[int, int]]:
    """Return major and minor numbers of the NVIDIA device files that a process has open."""
    found: set[tuple[int, int]] = set()
    try:
        names = list_entry_names(folder, MAX_DESCRIPTORS)
    except OSError:
        return found
    for name in names:
        try:
            # Check the name first: stat of a file on a network file system may hang.
            if not os.path.basename(os.readlink(f"{folder}/{name}")).startswith("nvidia"):
                continue
            status = os.stat(f"{folder}/{name}")
        except OSError:
            continue
        if stat.S_ISCHR(status.st_mode):
            found.add((os.major(status.st_rdev), os.minor(status.st_rdev)))
    return found


def _read_driver_names(proc: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for line in _read_text(proc / "devices").splitlines():
        number, _, name = line.strip().partition(" ")
        if name.startswith("nvidia") and number.isdigit():
            found[int(number)] = name
    return found


def _read_gpu_uuids(proc: Path) -> dict[int, str]:
    """Return the UUID of each device by its minor number."""
    found: dict[int, str] = {}
    folder = proc / "driver/nvidia/gpus"
    for bus in _list_folder(folder)[:MAX_GPUS]:
        fields = _read_fields(folder / bus / "information")
        minor, uuid = fields.get("Device Minor", ""), fields.get("GPU UUID", "")
        if minor.isdigit() and uuid.startswith("GPU-") and "?" not in uuid:
            found[int(minor)] = uuid
    return found


def _find_open_slices(proc: Path, capability_minors: set[int]) -> dict[int, list[str]]:
    """Return ``GI/CI`` of each open MIG slice, by the minor number of its GPU."""
    found: dict[int, list[str]] = {}
    folder = proc / "driver/nvidia/capabilities"
    for gpu in _list_folder(folder)[:MAX_GPUS] if capability_minors else []:
        number = gpu.removeprefix("gpu")
        if not number.isdigit():
            continue
        for gi in _list_folder(folder / gpu / "mig"):
            for ci in _list_folder(folder / gpu / "mig" / gi):
                fields = _read_fields(folder / gpu / "mig" / gi / ci / "access")
                if fields.get("DeviceFileMinor", "") in {str(minor) for minor in capability_minors}:
                    part = f"{gi.removeprefix('gi')}/{ci.removeprefix('ci')}"
                    found.setdefault(int(number), []).append(part)
    return found


def _read_fields(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in _read_text(path).splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _read_text(path: Path) -> str:
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _list_folder(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
