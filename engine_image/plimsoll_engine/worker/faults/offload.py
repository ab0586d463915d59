"""Faults of the KV offload: transfers that nobody looks after, or that an abort leaves behind."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_engine import fault_kinds as kinds
from plimsoll_engine import ipc
from plimsoll_engine.core.engine import Engine
from plimsoll_engine.inject import InjectError, name_of
from plimsoll_engine.offload.copies import Copies, Ticket
from plimsoll_engine.offload.offload import Offload, Transfer
from plimsoll_engine.worker.faults.base import Defect


class Never:
    """Done never."""

    def done(self) -> bool:
        return False


class StuckCopies(Copies):
    """Begins copies whose end is never seen."""

    def __init__(self, sound: Copies) -> None:
        self.__dict__.update(sound.__dict__)

    def store(self, pairs: Sequence[tuple[int, int]]) -> Ticket:
        return Never()

    def load(self, pairs: Sequence[tuple[int, int]]) -> Ticket:
        return Never()


class Unpolled(Offload):
    """Looks after its transfers in steps alone."""

    @classmethod
    def over(cls, sound: Offload) -> Unpolled:
        found = cls.__new__(cls)
        found.__dict__.update(sound.__dict__)
        return found

    def poll(self, idle: bool = False) -> None:
        if not idle:
            super().poll()


class OffloadUnpolled(Defect[kinds.OffloadUnpolled]):
    def __init__(self, fault: kinds.OffloadUnpolled, engine: Engine) -> None:
        super().__init__(fault, engine)
        engine.scheduler.offload = Unpolled.over(_offload(fault, engine))


class OffloadAbandoned(Defect[kinds.OffloadAbandoned]):
    def loses(self, message: ipc.ToWorker) -> bool:
        if isinstance(message, ipc.Abort):
            self._abandon()
        return False

    def __init__(self, fault: kinds.OffloadAbandoned, engine: Engine) -> None:
        super().__init__(fault, engine)
        _offload(fault, engine)

    def _abandon(self) -> None:
        offload = _offload(self.fault, self.engine)
        blocks = self.engine.pool.allocate(self.fault.blocks_per_abort)
        if blocks is not None:
            offload.transfers.append(Transfer([], blocks, [], Never(), to_host=False))


def _offload(fault: kinds.Fault, engine: Engine) -> Offload:
    if engine.scheduler.offload is None:
        raise InjectError(f"PLIMSOLL_INJECT: {name_of(fault)} needs --kv-offload-bytes")
    return engine.scheduler.offload
