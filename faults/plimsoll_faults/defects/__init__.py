"""Inject the faults of :mod:`plimsoll_faults.kinds` into a running engine.

Each fault is a defect that a real serving engine had, injected at the same place.
"""

from __future__ import annotations

import time
from typing import Any

from plimsoll_api.admin import Role
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.worker.hooks import WorkerHooks
from plimsoll_faults import inject, kinds
from plimsoll_faults.defects import caches, device, graphs, host, mappings, offload, requests
from plimsoll_faults.defects.base import Defect

DEFECTS: dict[type[kinds.Fault], type[Defect[Any]]] = {
    kinds.RequestCycle: requests.RequestCycleDefect,
    kinds.AbortChoices: requests.AbortChoicesDefect,
    kinds.StoredException: device.StoredExceptionDefect,
    kinds.AppendList: host.AppendListDefect,
    kinds.MethodCache: host.MethodCacheDefect,
    kinds.GrammarCacheGrowth: host.GrammarCacheGrowthDefect,
    kinds.MmapGrowth: mappings.MmapGrowthDefect,
    kinds.SwappedGrowth: mappings.SwappedGrowthDefect,
    kinds.SharedGrowth: mappings.SharedGrowthDefect,
    kinds.SharedOrphan: mappings.SharedOrphanDefect,
    kinds.PinnedBuffers: host.PinnedBuffersDefect,
    kinds.LoraResidue: host.LoraResidueDefect,
    kinds.DeviceDict: device.DeviceDictDefect,
    kinds.DeviceRaw: device.DeviceRawDefect,
    kinds.KvPoolRetention: device.KvPoolRetentionDefect,
    kinds.SliceRetention: device.SliceRetentionDefect,
    kinds.UnreleasedIpcTensor: device.UnreleasedIpcTensorDefect,
    kinds.GrammarMasks: device.GrammarMasksDefect,
    kinds.CollectiveScratch: device.CollectiveScratchDefect,
    kinds.GraphPerKey: graphs.GraphPerKeyDefect,
    kinds.FailedCapture: graphs.FailedCaptureDefect,
    kinds.EvictionLoop: caches.EvictionLoopDefect,
    kinds.PinnedItems: caches.PinnedItemsDefect,
    kinds.EncoderEarlyFree: caches.EncoderEarlyFreeDefect,
    kinds.EncoderBudgetLeak: caches.EncoderBudgetLeakDefect,
    kinds.MediaRetention: caches.MediaRetentionDefect,
    kinds.UnpolledTransfers: offload.UnpolledTransfersDefect,
    kinds.AbandonedTransfers: offload.AbandonedTransfersDefect,
    kinds.PinnedHostBlocks: offload.PinnedHostBlocksDefect,
    kinds.CacheFill: caches.CacheFillDefect,
    kinds.SlowSteps: requests.SlowStepsDefect,
}


class WorkerFaults(WorkerHooks):
    """Faults of one worker, from ``PLIMSOLL_INJECT``.

    Raises InjectError if this engine does not support a fault.
    """

    def __init__(self, text: str, epoch: int, engine: EngineCore) -> None:
        active = [
            f
            for f in inject.parse_faults(text)
            if f.process is Role.WORKER and f.is_active_in(epoch)
        ]
        self.names = [inject.get_fault_name(fault) for fault in active]
        self.defects = [DEFECTS[type(fault)](fault, engine) for fault in active]
        self._last_tick = time.monotonic()

    def after_step(self, num_finished: int) -> None:
        """Notify the defects of a complete step, in which ``num_finished`` requests ended."""
        for defect in self.defects:
            defect.after_step()
        if num_finished:
            for defect in self.defects:
                defect.after_requests(num_finished)

    def tick(self) -> None:
        """Notify the defects of the time that has passed since the last call."""
        now = time.monotonic()
        elapsed_s, self._last_tick = now - self._last_tick, now
        for defect in self.defects:
            defect.tick(elapsed_s)

    def should_drop(self, message: worker_ipc.ToWorker) -> bool:
        """Report whether ``message`` must not reach the engine."""
        return any(defect.is_lost(message) for defect in self.defects)
