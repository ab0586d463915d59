"""Finds out which devices an external engine uses.

If the device plugin set its variable, that names them. Under CDI the engine has
``NVIDIA_VISIBLE_DEVICES=void``, and under DRA no variable. Then the open files of its processes
name them: ``/proc/PID/fd`` leads to the device files, and ``/proc/driver/nvidia``, which is the
same in every container, explains their minor numbers. A process that uses a slice of a GPU (MIG)
also has the slice's capability files open. Processes open them some time after their start, so the
search is repeated. All of it says which devices are used, not how much of them.
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
    environment,
    first_names,
)

PROC = Path("/proc")
MAX_GPUS = 64
CONTROL = (254, 255)
"""Minor numbers of nvidia-modeset and nvidiactl."""
FRONTENDS, CAPABILITIES = frozenset({"nvidia", "nvidia-frontend"}), "nvidia-caps"
FRONTEND_MAJOR = 195
"""The same on all machines; ``/proc/devices`` says so, too, if a container shows it."""
LOOK_S, LOOK_AGAIN_S = 5.0, 60.0
"""Until a device is found, and after that: a process may open one more."""
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
MAX_GPU_NAME = 96
"""Characters; ``MIG-GPU-<UUID>/GI/CI`` has less than 60."""


class GpuIdentity:
    """The GPUs of one engine at a time; call ``forget`` when another one has started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, proc: Path = PROC) -> None:
        self._clock, self._proc = clock, proc
        self.forget()

    def forget(self) -> None:
        """Find the devices anew at the next call: another process may use others."""
        self._next = 0.0
        self._found: list[str] = []

    def devices(self, main: int, pids: Iterable[int]) -> list[DeviceMemory]:
        """By UUID, their memory unknown; empty where none can be named yet.

        ``main`` is the process with the container's environment, ``pids`` are all of the engine's.
        """
        now = self._clock()
        if now >= self._next:
            names = _named(main) or open_devices(pids, self._proc)
            self._found += [name for name in names if name not in self._found]
            del self._found[MAX_GPUS:]
            self._next = now + (LOOK_AGAIN_S if self._found else LOOK_S)
        return [DeviceMemory(index=index, uuid=name) for index, name in enumerate(self._found)]


def _named(main: int) -> list[str]:
    """Return what the device plugin's variable names; empty for all, void and none."""
    names = (environment(main, VARIABLE) or "").split(",", MAX_GPUS)[:MAX_GPUS]
    known = [n for n in names if n.startswith(("GPU-", "MIG-")) and len(n) <= MAX_GPU_NAME]
    return known if len(known) == len(names) else []


def open_devices(pids: Iterable[int], proc: Path = PROC) -> list[str]:
    """Return the devices that these processes have open.

    ``GPU-…``, and for a slice ``MIG-GPU-…/GI/CI`` (GPU instance, compute instance). Empty where
    there are none, or none can be seen.
    """
    majors = _majors(proc)
    frontends = {major for major, name in majors.items() if name in FRONTENDS} or {FRONTEND_MAJOR}
    caps = {major for major, name in majors.items() if name == CAPABILITIES}
    opened = {device for pid in pids for device in _opened(f"{proc}/{pid}/fd")}
    minors = {minor for major, minor in opened if major in frontends and minor not in CONTROL}
    if not minors:
        return []
    slices = _slices(proc, {minor for major, minor in opened if major in caps})
    found: list[str] = []
    for minor, uuid in sorted(_gpus(proc).items()):
        if minor in minors:
            found += [f"MIG-{uuid}/{part}" for part in slices.get(minor, [])] or [uuid]
    return found


def _opened(folder: str) -> set[tuple[int, int]]:
    """Major and minor numbers of NVIDIA's device files that a process has open.

    By strings: see process_table.read.
    """
    found: set[tuple[int, int]] = set()
    try:
        names = first_names(folder, MAX_DESCRIPTORS)
    except OSError:
        return found
    for name in names:
        try:
            # Only for a likely one: stat of a file of a network file system may hang.
            if not os.path.basename(os.readlink(f"{folder}/{name}")).startswith("nvidia"):
                continue
            status = os.stat(f"{folder}/{name}")
        except OSError:
            continue
        if stat.S_ISCHR(status.st_mode):
            found.add((os.major(status.st_rdev), os.minor(status.st_rdev)))
    return found


def _majors(proc: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for line in _text(proc / "devices").splitlines():
        number, _, name = line.strip().partition(" ")
        if name.startswith("nvidia") and number.isdigit():
            found[int(number)] = name
    return found


def _gpus(proc: Path) -> dict[int, str]:
    """UUID by minor number."""
    found: dict[int, str] = {}
    folder = proc / "driver/nvidia/gpus"
    for bus in _listed(folder)[:MAX_GPUS]:
        fields = _fields(folder / bus / "information")
        minor, uuid = fields.get("Device Minor", ""), fields.get("GPU UUID", "")
        if minor.isdigit() and uuid.startswith("GPU-") and "?" not in uuid:
            found[int(minor)] = uuid
    return found


def _slices(proc: Path, opened: set[int]) -> dict[int, list[str]]:
    """``GI/CI`` of the slices whose capability files are among ``opened``, by the GPU's minor."""
    found: dict[int, list[str]] = {}
    folder = proc / "driver/nvidia/capabilities"
    for gpu in _listed(folder)[:MAX_GPUS] if opened else []:
        number = gpu.removeprefix("gpu")
        if not number.isdigit():
            continue
        for gi in _listed(folder / gpu / "mig"):
            for ci in _listed(folder / gpu / "mig" / gi):
                fields = _fields(folder / gpu / "mig" / gi / ci / "access")
                if fields.get("DeviceFileMinor", "") in {str(minor) for minor in opened}:
                    part = f"{gi.removeprefix('gi')}/{ci.removeprefix('ci')}"
                    found.setdefault(int(number), []).append(part)
    return found


def _fields(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _text(path: Path) -> str:
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
