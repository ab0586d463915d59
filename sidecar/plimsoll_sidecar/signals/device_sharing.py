"""Detect devices that other pods also use, because memory there may not be the engine's.

The pod's resource names do not show this: a device plugin can assign one GPU to several pods
(time-slicing).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from plimsoll_api.units import format_bytes
from plimsoll_sidecar.signals.device_memory import DeviceSource, Exporter, Nvml
from plimsoll_sidecar.signals.process_table import read_environment_variable

log = logging.getLogger(__name__)

SHARING_CHECK_PERIOD_S = 10.0
# An exporter's page may name the device's previous pod until it collects again, every 30 s.
MIN_OTHER_OWNER_S = 45.0
# The driver's own memory, about 500 MiB on a large device, is in use from the start.
MIN_OTHER_GROWTH_BYTES = 512 << 20
# Variables of CUDA MPS clients and of HAMi's device slices. An empty variable does not count.
SHARING_VARIABLES = (
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_DEVICE_MEMORY_LIMIT",
    "CUDA_DEVICE_MEMORY_LIMIT_0",
    "CUDA_DEVICE_SM_LIMIT",
)


class SharingDetector:
    """Detects shared devices. A shared device stays shared until :meth:`reset`."""

    def __init__(
        self,
        sources: Mapping[str, DeviceSource],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources, self._clock = sources, clock
        self.reset()

    def reset(self) -> None:
        """Discard all results, because the next engine may use other devices."""
        self._next_at = 0.0
        self._found: dict[str, str] = {}
        self._other_owner_since: dict[str, float] = {}
        self._least_other_bytes: dict[str, int] = {}
        self._growing: set[str] = set()

    def find_reasons(
        self, uuids: Iterable[str], list_pids: Callable[[], list[int]]
    ) -> dict[str, str]:
        """Return the reason why each shared device counts as shared, by UUID.

        ``list_pids`` returns the PIDs of the engine's processes, with the main process first.
        """
        now = self._clock()
        if now >= self._next_at:
            self._next_at = now + SHARING_CHECK_PERIOD_S
            unknown = [uuid for uuid in uuids if uuid not in self._found]
            processes = list_pids() if unknown else []
            for uuid in unknown:
                reason = self._find_reason_in_environment(
                    processes
                ) or self._find_reason_in_exporters(uuid, now)
                reason = reason or self._find_reason_in_driver(uuid, processes)
                if reason is not None:
                    self._found[uuid] = reason
                    log.info(
                        "device %s is shared, because %s; only the engine's own memory on it "
                        "counts against the leak budget",
                        uuid,
                        reason,
                    )
        return self._found

    @staticmethod
    def _find_reason_in_environment(pids: list[int]) -> str | None:
        names = (
            name
            for pid in pids[:1]
            for name in SHARING_VARIABLES
            if read_environment_variable(pid, name)
        )
        name = next(names, None)
        return f"the engine's container sets the environment variable {name}" if name else None

    def _find_reason_in_exporters(self, uuid: str, now: float) -> str | None:
        for name, source in self._sources.items():
            if not isinstance(source, Exporter):
                continue
            owners = source.find_owners(uuid)
            others = sorted(str(owner) for owner in owners if not source.is_own_container(owner))
            if not others:
                continue
            since = self._other_owner_since.setdefault(uuid, now)
            if len(owners) > 1 or now - since >= MIN_OTHER_OWNER_S:
                return f"{name} reports that the device is also assigned to {others[0]}"
            return None
        self._other_owner_since.pop(uuid, None)
        return None

    def _find_reason_in_driver(self, uuid: str, pids: list[int]) -> str | None:
        nvml = self._sources.get("nvml")
        users = nvml.read_users(uuid) if isinstance(nvml, Nvml) else None
        if users is None:
            return None
        if users.mps_clients:
            return "MPS clients use the device"
        if users.processes.keys().isdisjoint(pids):
            return None  # the PIDs belong to another namespace
        others = users.processes.keys() - set(pids)
        if others:
            return f"process {min(others)} uses the device, but is not part of the engine"
        return self._find_reason_in_growth(uuid, users.other_bytes)

    def _find_reason_in_growth(self, uuid: str, other_bytes: int | None) -> str | None:
        # Memory that an earlier engine left on the device does not grow, and the driver's own
        # memory hardly does.
        if other_bytes is None:
            return None
        lowest_bytes = self._least_other_bytes[uuid] = min(
            other_bytes, self._least_other_bytes.get(uuid, other_bytes)
        )
        if other_bytes - lowest_bytes < MIN_OTHER_GROWTH_BYTES:
            self._growing.discard(uuid)
        elif uuid in self._growing:
            return (
                f"processes of other pods use {format_bytes(other_bytes - lowest_bytes)} more "
                "memory than before"
            )
        else:
            self._growing.add(uuid)
        return None
