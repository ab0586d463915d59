"""The base of all worker faults: a defect in one engine."""

from __future__ import annotations

from typing import Generic, TypeVar

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.messages import worker_ipc
from plimsoll_faults.inject import InjectError, name_of
from plimsoll_faults.kinds import Fault

F = TypeVar("F", bound=Fault)


class Defect(Generic[F]):
    """One fault in one engine. Its methods are called between steps and do nothing by default."""

    def __init__(self, fault: F, engine: EngineCore) -> None:
        self.fault = fault
        self.engine = engine

    def after_requests(self, count: int) -> None:
        """Handle that ``count`` requests ended in the last step."""

    def after_step(self) -> None:
        """Handle the end of a step."""

    def tick(self, passed_s: float) -> None:
        """Handle that ``passed_s`` seconds have passed, also while the engine is idle."""

    def is_lost(self, message: worker_ipc.ToWorker) -> bool:
        """Report whether ``message`` is lost before it reaches the engine."""
        return False


def inject_error(fault: Fault, why: str) -> InjectError:
    """Return the error for a fault that is not possible in this engine."""
    return InjectError(f"PLIMSOLL_INJECT: {name_of(fault)} {why}")


def require_cuda(fault: Fault, engine: EngineCore) -> None:
    """Raise InjectError if the engine has no CUDA device."""
    if engine.runner.device.type != "cuda":
        raise inject_error(fault, "needs a CUDA device; this is a CPU")
