"""Find the devices that an external engine uses.

The environment variable of the device plugin names the devices. With CDI and DRA, the open files of
the engine's processes show them instead.
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
# nvidia-modeset and nvidiactl.
NVIDIA_CONTROL_MINORS = (254, 255)
DEVICE_DRIVER_NAMES, CAPABILITY_DRIVER_NAME = (
    frozenset({"nvidia", "nvidia-frontend"}),
    "nvidia-caps",
)
# The same on all machines. It replaces a missing entry in /proc/devices.
NVIDIA_MAJOR = 195
# The search continues after the first device, because a process may open another device later.
FIRST_SEARCH_PERIOD_S, LATER_SEARCH_PERIOD_S = 5.0, 60.0
VISIBLE_DEVICES_ENV = "NVIDIA_VISIBLE_DEVICES"
# MIG-GPU-<UUID>/GI/CI has fewer than 60 characters.
MAX_GPU_NAME_CHARS = 96


class DeviceFinder:
    """Finds the GPUs of one engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, proc: Path = PROC) -> None:
        self._clock, self._proc = clock, proc
        self.reset()

    def reset(self) -> None:
        """Forget the devices, so that the next call searches again."""
        self._next_at = 0.0
        self._devices: list[str] = []

    def find_devices(self, main_pid: int, pids: Iterable[int]) -> list[DeviceMemory]:
        """Return the known devices by UUID, without their memory.

        The environment of ``main_pid`` names the devices. ``pids`` are all processes of the engine.
        """
        now = self._clock()
        if now >= self._next_at:
            names = _read_visible_devices(main_pid) or find_open_devices(pids, self._proc)
            self._devices += [name for name in names if name not in self._devices]
            del self._devices[MAX_GPUS:]
            self._next_at = now + (
                LATER_SEARCH_PERIOD_S if self._devices else FIRST_SEARCH_PERIOD_S
            )
        return [DeviceMemory(index=index, uuid=name) for index, name in enumerate(self._devices)]


def _read_visible_devices(main_pid: int) -> list[str]:
    # The variable may also name all devices of the node, which shows nothing.
    names = (read_environment_variable(main_pid, VISIBLE_DEVICES_ENV) or "").split(",", MAX_GPUS)[
        :MAX_GPUS
    ]
    device_names = [
        n for n in names if n.startswith(("GPU-", "MIG-")) and len(n) <= MAX_GPU_NAME_CHARS
    ]
    return device_names if len(device_names) == len(names) else []


def find_open_devices(pids: Iterable[int], proc: Path = PROC) -> list[str]:
    """Return the names of the devices that these processes have open.

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
    device_names: list[str] = []
    for minor, uuid in sorted(_read_gpu_uuids(proc).items()):
        if minor in minors:
            device_names += [f"MIG-{uuid}/{part}" for part in slices.get(minor, [])] or [uuid]
    return device_names


def _find_open_device_numbers(folder: str) -> set[tuple[int, int]]:
    numbers: set[tuple[int, int]] = set()
    try:
        names = list_entry_names(folder, MAX_DESCRIPTORS)
    except OSError:
        return numbers
    for name in names:
        try:
            # Check the name first: stat of a file on a network file system may hang.
            if not os.path.basename(os.readlink(f"{folder}/{name}")).startswith("nvidia"):
                continue
            status = os.stat(f"{folder}/{name}")
        except OSError:
            continue
        if stat.S_ISCHR(status.st_mode):
            numbers.add((os.major(status.st_rdev), os.minor(status.st_rdev)))
    return numbers


def _read_driver_names(proc: Path) -> dict[int, str]:
    names: dict[int, str] = {}
    for line in _read_text(proc / "devices").splitlines():
        number, _, name = line.strip().partition(" ")
        if name.startswith("nvidia") and number.isdigit():
            names[int(number)] = name
    return names


def _read_gpu_uuids(proc: Path) -> dict[int, str]:
    uuids: dict[int, str] = {}
    folder = proc / "driver/nvidia/gpus"
    for bus in _list_folder(folder)[:MAX_GPUS]:
        fields = _read_fields(folder / bus / "information")
        minor, uuid = fields.get("Device Minor", ""), fields.get("GPU UUID", "")
        if minor.isdigit() and uuid.startswith("GPU-") and "?" not in uuid:
            uuids[int(minor)] = uuid
    return uuids


def _find_open_slices(proc: Path, capability_minors: set[int]) -> dict[int, list[str]]:
    # A slice is named GI/CI, and listed by the minor number of its GPU.
    slices: dict[int, list[str]] = {}
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
                    slices.setdefault(int(number), []).append(part)
    return slices


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
