"""Whether others use the engine's devices: then growth of a whole device may be theirs.

A plain resource name says nothing, for a device plugin may give one GPU to several pods under it
(time-slicing). What can be seen here is a page that names another owner, what a driver tells of the
device's users, and variables that sharing sets in the container.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from plimsoll_api.units import format_bytes
from plimsoll_sidecar.signals.device_memory import DeviceSource, Exporter, Nvml
from plimsoll_sidecar.signals.process_table import environment

log = logging.getLogger(__name__)

LOOK_S = 10.0
SURE_S = 45.0
"""An exporter collects every 30 s, so its page may name for so long the pod that had the device
before."""
MIN_GROWTH_BYTES = 512 << 20
"""A driver's own part of a large device is some 500 MiB, and is there from the beginning."""
VARIABLES = (
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_DEVICE_MEMORY_LIMIT",
    "CUDA_DEVICE_MEMORY_LIMIT_0",
    "CUDA_DEVICE_SM_LIMIT",
)
"""Of an MPS server's clients (CUDA), and of HAMi's parts of a device. An empty one is not set."""


class Sharing:
    """The reasons why devices count as shared, by UUID; a reason stands until ``forget``."""

    def __init__(
        self,
        sources: Mapping[str, DeviceSource],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources, self._clock = sources, clock
        self.forget()

    def forget(self) -> None:
        """Begin anew: another engine may use other devices."""
        self._next = 0.0
        self._found: dict[str, str] = {}
        self._foreign: dict[str, float] = {}
        self._elsewhere: dict[str, int] = {}
        self._growing: set[str] = set()

    def reasons(self, uuids: Iterable[str], pids: Callable[[], list[int]]) -> dict[str, str]:
        """Look at intervals; ``pids`` gives the engine's processes, its main one first."""
        now = self._clock()
        if now >= self._next:
            self._next = now + LOOK_S
            unknown = [uuid for uuid in uuids if uuid not in self._found]
            processes = pids() if unknown else []
            for uuid in unknown:
                reason = self._variable(processes) or self._page(uuid, now)
                reason = reason or self._driver(uuid, processes)
                if reason is not None:
                    self._found[uuid] = reason
                    log.info("only the engine's own memory on %s is judged: %s", uuid, reason)
        return self._found

    @staticmethod
    def _variable(pids: list[int]) -> str | None:
        names = (name for pid in pids[:1] for name in VARIABLES if environment(pid, name))
        name = next(names, None)
        return f"{name} is set in the engine's container" if name else None

    def _page(self, uuid: str, now: float) -> str | None:
        for name, source in self._sources.items():
            if not isinstance(source, Exporter):
                continue
            owners = source.owners(uuid)
            others = sorted(str(one) for one in owners if not source.is_mine(one))
            if not others:
                continue
            since = self._foreign.setdefault(uuid, now)
            if len(owners) > 1 or now - since >= SURE_S:
                return f"{name} says that {others[0]} has it, too"
            return None
        self._foreign.pop(uuid, None)
        return None

    def _driver(self, uuid: str, pids: list[int]) -> str | None:
        nvml = self._sources.get("nvml")
        users = nvml.users(uuid) if isinstance(nvml, Nvml) else None
        if users is None:
            return None
        if users.mps:
            return "an MPS server has clients on it"
        if users.processes.keys().isdisjoint(pids):
            return None  # these are PIDs of another namespace
        others = users.processes.keys() - set(pids)
        if others:
            return f"process {min(others)}, which is not the engine's, uses it"
        return self._unseen(uuid, users.elsewhere)

    def _unseen(self, uuid: str, elsewhere: int | None) -> str | None:
        """Return what processes that cannot be seen from here show by growing.

        What an engine left on its device does not grow, and the driver's own part hardly.
        """
        if elsewhere is None:
            return None
        least = self._elsewhere[uuid] = min(elsewhere, self._elsewhere.get(uuid, elsewhere))
        if elsewhere - least < MIN_GROWTH_BYTES:
            self._growing.discard(uuid)
        elif uuid in self._growing:
            return f"{format_bytes(elsewhere - least)} more is in use by processes of other pods"
        else:
            self._growing.add(uuid)
        return None
