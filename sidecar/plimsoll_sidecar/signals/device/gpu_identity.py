"""Which devices an external engine uses, looked for until they are found.

The device plugin's variable names them where there is one; else the files that its processes have
open, which they open some time after their start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from plimsoll_api.admin import DeviceMemory
from plimsoll_sidecar.signals.device import nvidia_files
from plimsoll_sidecar.signals.process.process_table import environment

LOOK_S, LOOK_AGAIN_S = 5.0, 60.0
"""Until a device is found, and after that: a process may open one more."""
VARIABLE = "NVIDIA_VISIBLE_DEVICES"


class GpuIdentity:
    """The GPUs of one engine at a time; call ``forget`` when another one has started."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, proc: Path = nvidia_files.PROC
    ) -> None:
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
            names = _named(main) or nvidia_files.devices(pids, self._proc)
            self._found += [name for name in names if name not in self._found]
            self._next = now + (LOOK_AGAIN_S if self._found else LOOK_S)
        return [DeviceMemory(index=index, uuid=name) for index, name in enumerate(self._found)]


def _named(main: int) -> list[str]:
    """Return what the device plugin's variable names; empty for ``all``, ``void`` and none."""
    names = (environment(main, VARIABLE) or "").split(",")
    return names if all(name.startswith(("GPU-", "MIG-")) for name in names) else []
