"""What every fault of the worker is: a defect at work in one engine."""

from __future__ import annotations

from typing import Generic, TypeVar

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages import worker_ipc
from plimsoll_faults.inject import InjectError, name_of
from plimsoll_faults.kinds import Fault

F = TypeVar("F", bound=Fault)


class Defect(Generic[F]):
    """One fault in one engine. It is called between steps; what it does not override is sound."""

    def __init__(self, fault: F, engine: EngineCore) -> None:
        self.fault = fault
        self.engine = engine

    def finished(self, count: int) -> None:
        """``count`` requests ended in the last step."""

    def stepped(self) -> None:
        """Take in that a step has ended."""

    def tick(self, passed_s: float) -> None:
        """Take in that ``passed_s`` seconds went by, also while idle."""

    def loses(self, message: worker_ipc.ToWorker) -> bool:
        """Whether the engine never hears of ``message``."""
        return False

    def declare(self, ledger: Ledger) -> None:
        """Say something else in ``ledger`` than what is so. Once, before the engine serves."""


def impossible(fault: Fault, why: str) -> InjectError:
    """Return the refusal of a fault that this engine cannot have."""
    return InjectError(f"PLIMSOLL_INJECT: {name_of(fault)} {why}")


def need_cuda(fault: Fault, engine: EngineCore) -> None:
    """Raise InjectError on a CPU."""
    if engine.runner.device.type != "cuda":
        raise impossible(fault, "needs a CUDA device; this is a CPU")
