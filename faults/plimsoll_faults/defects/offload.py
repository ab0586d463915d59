"""Faults of the KV offload: transfers that are not polled, or remain after an abort."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.kvcache.block_copies import BlockCopier, CopyTicket
from plimsoll_engine.kvcache.offload import Offload, Transfer
from plimsoll_engine.messages import worker_ipc
from plimsoll_faults import kinds
from plimsoll_faults.defects.base import Defect, make_inject_error
from plimsoll_faults.tampering import replace_methods


class StuckTicket:
    """Ticket of a copy that never completes."""

    def is_done(self) -> bool:
        """Return False."""
        return False


class StuckCopier(BlockCopier):
    """Copier whose copies never complete, because it does not start them."""

    def __init__(self, original: BlockCopier) -> None:
        self.__dict__.update(original.__dict__)

    def store(self, blocks_and_slots: Sequence[tuple[int, int]]) -> CopyTicket:
        """Return a ticket that is never done."""
        return StuckTicket()

    def load(self, blocks_and_slots: Sequence[tuple[int, int]]) -> CopyTicket:
        """Return a ticket that is never done."""
        return StuckTicket()


class UnpolledOffload(Offload):
    """Offload that polls its transfers only during steps, and not while the engine is idle."""

    @classmethod
    def from_offload(cls, original: Offload) -> UnpolledOffload:
        """Return an instance of this class that shares the state of ``original``."""
        offload = cls.__new__(cls)
        offload.__dict__.update(original.__dict__)
        return offload

    def poll(self, is_idle: bool = False) -> None:
        """Poll the transfers, unless the engine is idle."""
        if not is_idle:
            super().poll()


class UnpolledTransfersDefect(Defect[kinds.UnpolledTransfers]):
    """Stop polling transfers while the engine is idle."""

    def __init__(self, fault: kinds.UnpolledTransfers, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        engine.scheduler.offload = UnpolledOffload.from_offload(_require_offload(fault, engine))


class AbandonedTransfersDefect(Defect[kinds.AbandonedTransfers]):
    """For each abort, start a transfer that never ends."""

    def is_lost(self, message: worker_ipc.ToWorker) -> bool:
        """Start an endless transfer if ``message`` is an abort. Always return False."""
        if isinstance(message, worker_ipc.Abort):
            self._start_endless_transfer()
        return False

    def __init__(self, fault: kinds.AbandonedTransfers, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        _require_offload(fault, engine)

    def _start_endless_transfer(self) -> None:
        offload = _require_offload(self.fault, self.engine)
        blocks = self.engine.pool.allocate(self.fault.blocks_per_abort)
        if blocks is not None:
            offload.transfers.append(Transfer([], blocks, [], StuckTicket(), copy_to_host=False))


class PinningOffload(Offload):
    """Offload that never unpins a block that was copied back to the device."""

    def _complete(self, transfer: Transfer) -> None:
        if not transfer.copy_to_host:
            for key in transfer.keys:
                self.stored.pin(key)
        super()._complete(transfer)


class PinnedHostBlocksDefect(Defect[kinds.PinnedHostBlocks]):
    """Keep host blocks pinned forever after they were copied back to the device."""

    def __init__(self, fault: kinds.PinnedHostBlocks, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        replace_methods(_require_offload(fault, engine), PinningOffload)


def _require_offload(fault: kinds.Fault, engine: EngineCore) -> Offload:
    if engine.scheduler.offload is None:
        raise make_inject_error(fault, "needs --kv-offload-bytes")
    return engine.scheduler.offload
