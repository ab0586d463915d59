"""Faults in the life of a request: it is not freed, or it is not aborted."""

from __future__ import annotations

import gc
import time
from functools import partial

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.kvcache.block_hashes import extend_block_hashes
from plimsoll_engine.messages import worker_ipc
from plimsoll_faults import kinds
from plimsoll_faults.defects.base import Defect


class CyclicRequest(Request):
    """Request in a reference cycle, which only the garbage collector can free."""

    def add_cycle(self, block_size: int, payload_bytes: int) -> None:
        """Add a payload of resident memory, and the function that closes the cycle."""
        # Multiplied, not zero-filled: the pages are written, so they are resident.
        self.payload = bytearray(b"\x01") * payload_bytes
        self.block_hasher = partial(extend_block_hashes, self, block_size)
        self.block_hasher()


class RequestCycleDefect(Defect[kinds.RequestCycle]):
    """Make every request part of a reference cycle."""

    def __init__(self, fault: kinds.RequestCycle, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self._since_freeze = 0
        engine.make_request = partial(
            _make_cyclic_request, engine.pool.block_size, fault.payload_bytes
        )

    def after_requests(self, num_requests: int) -> None:
        """Hide all cycles from the garbage collector after every ``freeze_every`` requests."""
        self._since_freeze += num_requests
        if self.fault.freeze_every and self._since_freeze >= self.fault.freeze_every:
            self._since_freeze = 0
            gc.freeze()


class SlowStepsDefect(Defect[kinds.SlowSteps]):
    """Delay the worker after each step."""

    def after_step(self) -> None:
        """Sleep for ``wait_ms`` milliseconds."""
        time.sleep(self.fault.wait_ms / 1000)


class AbortChoicesDefect(Defect[kinds.AbortChoices]):
    """Lose the aborts of all choices of a request except the first."""

    def is_lost(self, message: worker_ipc.ToWorker) -> bool:
        """Report whether ``message`` aborts a choice other than the first."""
        # The choices of one request are named by its id and their number.
        return isinstance(message, worker_ipc.Abort) and not message.request_id.endswith("-0")


def _make_cyclic_request(block_size: int, payload_bytes: int, submit: worker_ipc.Submit) -> Request:
    request = CyclicRequest.create(submit)
    assert isinstance(request, CyclicRequest)
    request.add_cycle(block_size, payload_bytes)
    return request
