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


class NeverDone:
    """Ticket of a copy that never completes."""

    def is_done(self) -> bool:
        """Return False."""
        return False


class StuckCopies(BlockCopier):
    """Start copies that never complete."""

    def __init__(self, original: BlockCopier) -> None:
        self.__dict__.update(original.__dict__)

    def store(self, blocks_and_slots: Sequence[tuple[int, int]]) -> CopyTicket:
        """Start no copy. Return a ticket that is never done."""
        return NeverDone()

    def load(self, blocks_and_slots: Sequence[tuple[int, int]]) -> CopyTicket:
        """Start no copy. Return a ticket that is never done."""
        return NeverDone()


class UnpolledOffload(Offload):
    """Offload that polls its transfers only in steps."""

    @classmethod
    def from_offload(cls, original: Offload) -> UnpolledOffload:
        """Return an offload with the methods of this class and the state of ``original``."""
        found = cls.__new__(cls)
        found.__dict__.update(original.__dict__)
        return found

    def poll(self, idle: bool = False) -> None:
        """Do nothing if ``idle`` is True, so that an idle engine keeps its blocks."""
        if not idle:
            super().poll()


class UnpolledTransfersDefect(Defect[kinds.UnpolledTransfers]):
    """Stop polling transfers while the engine is idle."""

    def __init__(self, fault: kinds.UnpolledTransfers, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        engine.scheduler.offload = UnpolledOffload.from_offload(_require_offload(fault, engine))


class AbandonedTransfersDefect(Defect[kinds.AbandonedTransfers]):
    """For each abort, start a transfer that never ends."""

    def is_lost(self, message: worker_ipc.ToWorker) -> bool:
        """Return False. If ``message`` is an abort, start a transfer that never ends."""
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
            offload.transfers.append(Transfer([], blocks, [], NeverDone(), to_host=False))


class PinningOffload(Offload):
    """Offload that pins a block once more when the block is copied back to the device.

    The block therefore always keeps a pin.
    """

    def _complete(self, transfer: Transfer) -> None:
        if not transfer.to_host:
            for key in transfer.keys:
                self.stored.pin(key)
        super()._complete(transfer)


class PinnedHostBlocksDefect(Defect[kinds.PinnedHostBlocks]):
    """Pin blocks in host memory forever."""

    def __init__(self, fault: kinds.PinnedHostBlocks, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        replace_methods(_require_offload(fault, engine), PinningOffload)


def _require_offload(fault: kinds.Fault, engine: EngineCore) -> Offload:
    if engine.scheduler.offload is None:
        raise make_inject_error(fault, "needs --kv-offload-bytes")
    return engine.scheduler.offload
