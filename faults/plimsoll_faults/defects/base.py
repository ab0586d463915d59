"""Base class of all worker faults: a defect in one engine."""

from __future__ import annotations

from typing import Generic, TypeVar

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.messages import worker_ipc
from plimsoll_faults.inject import InjectError, get_fault_name
from plimsoll_faults.kinds import Fault

F = TypeVar("F", bound=Fault)


class Defect(Generic[F]):
    """Implementation of one fault in one engine, whose methods are called between steps."""

    def __init__(self, fault: F, engine: EngineCore) -> None:
        self.fault = fault
        self.engine = engine

    def after_requests(self, num_requests: int) -> None:
        """React to a step in which ``num_requests`` requests ended, at least 1."""

    def after_step(self) -> None:
        """React to the end of a step."""

    def tick(self, elapsed_s: float) -> None:
        """Act periodically, even while the engine is idle."""

    def is_lost(self, message: worker_ipc.ToWorker) -> bool:
        """Report whether ``message`` is lost before it reaches the engine."""
        return False


def make_inject_error(fault: Fault, reason: str) -> InjectError:
    """Return the error for a fault that this engine does not support."""
    return InjectError(f"the fault {get_fault_name(fault)} in PLIMSOLL_INJECT {reason}")


def require_cuda(fault: Fault, engine: EngineCore) -> None:
    """Raise InjectError if the engine has no CUDA device."""
    if engine.runner.device.type != "cuda":
        raise make_inject_error(fault, "needs a CUDA device: start the engine with --device cuda")
