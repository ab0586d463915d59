"""Faults of the KV offload: transfers that nobody looks after, or that an abort leaves behind."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.kvcache.block_copies import Copies, Ticket
from plimsoll_engine.kvcache.offload import Offload, Transfer
from plimsoll_engine.messages import worker_ipc
from plimsoll_faults import kinds
from plimsoll_faults.defects.base import Defect, impossible
from plimsoll_faults.tampering import turned


class Never:
    """Done never."""

    def done(self) -> bool:
        """Return False, always: the transfer does not end."""
        return False


class StuckCopies(Copies):
    """Begins copies whose end is never seen."""

    def __init__(self, sound: Copies) -> None:
        self.__dict__.update(sound.__dict__)

    def store(self, pairs: Sequence[tuple[int, int]]) -> Ticket:
        """Begin nothing; the ticket is never done."""
        return Never()

    def load(self, pairs: Sequence[tuple[int, int]]) -> Ticket:
        """Begin nothing; the ticket is never done."""
        return Never()


class Unpolled(Offload):
    """Looks after its transfers in steps alone."""

    @classmethod
    def over(cls, sound: Offload) -> Unpolled:
        """``sound`` with this class's methods, and its state shared."""
        found = cls.__new__(cls)
        found.__dict__.update(sound.__dict__)
        return found

    def poll(self, idle: bool = False) -> None:
        """Take transfers in only between steps: an idle engine keeps its blocks."""
        if not idle:
            super().poll()


class OffloadUnpolledDefect(Defect[kinds.OffloadUnpolled]):
    """Leaves transfers unseen while the engine is idle."""

    def __init__(self, fault: kinds.OffloadUnpolled, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        engine.scheduler.offload = Unpolled.over(_offload(fault, engine))


class OffloadAbandonedDefect(Defect[kinds.OffloadAbandoned]):
    """Leaves a transfer that never ends behind for each abort."""

    def loses(self, message: worker_ipc.ToWorker) -> bool:
        """Leave a transfer behind at an abort, which itself gets through."""
        if isinstance(message, worker_ipc.Abort):
            self._abandon()
        return False

    def __init__(self, fault: kinds.OffloadAbandoned, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        _offload(fault, engine)

    def _abandon(self) -> None:
        offload = _offload(self.fault, self.engine)
        blocks = self.engine.pool.allocate(self.fault.blocks_per_abort)
        if blocks is not None:
            offload.transfers.append(Transfer([], blocks, [], Never(), to_host=False))


class PinningOffload(Offload):
    """Pins what it copies back to the device once more than it unpins."""

    def _finished(self, transfer: Transfer) -> None:
        if not transfer.to_host:
            for key in transfer.keys:
                self.stored.pin(key)
        super()._finished(transfer)


class OffloadPinnedDefect(Defect[kinds.OffloadPinned]):
    """Pins blocks in host memory that nobody unpins."""

    def __init__(self, fault: kinds.OffloadPinned, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        turned(_offload(fault, engine), PinningOffload)


def _offload(fault: kinds.Fault, engine: EngineCore) -> Offload:
    if engine.scheduler.offload is None:
        raise impossible(fault, "needs --kv-offload-bytes")
    return engine.scheduler.offload
