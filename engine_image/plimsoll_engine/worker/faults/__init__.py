"""The faults of :mod:`plimsoll_engine.fault_kinds`, put into a running engine.

Each is a defect that a serving engine really had, at the place where it would be: the request that
stores its bound hasher, the cache that touches a missing key. Nothing here runs without
``PLIMSOLL_INJECT``.
"""

from __future__ import annotations

import time
from typing import Any

from plimsoll_api.admin import Role
from plimsoll_engine import fault_kinds as kinds
from plimsoll_engine import inject, ipc
from plimsoll_engine.core.engine import Engine
from plimsoll_engine.worker.faults import caches, device, host, offload, requests
from plimsoll_engine.worker.faults.base import Defect

DEFECTS: dict[type[kinds.Fault], type[Defect[Any]]] = {
    kinds.RequestCycle: requests.RequestCycle,
    kinds.AbortChoices: requests.AbortChoices,
    kinds.StoredException: device.StoredException,
    kinds.AppendList: host.AppendList,
    kinds.MethodCache: host.MethodCache,
    kinds.GrammarCacheGrowth: host.GrammarCacheGrowth,
    kinds.MmapGrowth: host.MmapGrowth,
    kinds.SharedGrowth: host.SharedGrowth,
    kinds.PinnedBuffers: host.PinnedBuffers,
    kinds.DeviceDict: device.DeviceDict,
    kinds.DeviceRaw: device.DeviceRaw,
    kinds.KeptKv: device.KeptKv,
    kinds.EvictionLoop: caches.EvictionLoop,
    kinds.PinnedItems: caches.PinnedItems,
    kinds.EncoderFreedEarly: caches.EncoderFreedEarly,
    kinds.EncoderBudgetHeld: caches.EncoderBudgetHeld,
    kinds.MediaKept: caches.MediaKept,
    kinds.OffloadUnpolled: offload.OffloadUnpolled,
    kinds.OffloadAbandoned: offload.OffloadAbandoned,
}


class Faults:
    """The faults of one worker. Raises InjectError where one cannot be in this engine."""

    def __init__(self, faults: list[kinds.Fault], epoch: int, engine: Engine) -> None:
        active = [f for f in faults if f.process is Role.WORKER and f.in_epoch(epoch)]
        self.names = [inject.name_of(fault) for fault in active]
        self.defects = [DEFECTS[type(fault)](fault, engine) for fault in active]
        self._last_tick = time.monotonic()

    def after_step(self, finished: int) -> None:
        """``finished`` requests ended in the step. Call it between steps."""
        if finished:
            for defect in self.defects:
                defect.finished(finished)

    def tick(self) -> None:
        """Let those that grow with time grow. Call it at any time."""
        now = time.monotonic()
        passed_s, self._last_tick = now - self._last_tick, now
        for defect in self.defects:
            defect.tick(passed_s)

    def lose(self, message: ipc.ToWorker) -> bool:
        """Whether the engine is not to hear of ``message``."""
        return any(defect.loses(message) for defect in self.defects)
