"""What every fault of the worker is: a defect at work in one engine."""

from __future__ import annotations

from typing import Generic, TypeVar

from plimsoll_engine import ipc
from plimsoll_engine.core.engine import Engine
from plimsoll_engine.fault_kinds import Fault

F = TypeVar("F", bound=Fault)


class Defect(Generic[F]):
    """One fault in one engine. It is called between steps; what it does not override is sound."""

    def __init__(self, fault: F, engine: Engine) -> None:
        self.fault = fault
        self.engine = engine

    def finished(self, count: int) -> None:
        """``count`` requests ended in the last step."""

    def tick(self, passed_s: float) -> None:
        """``passed_s`` seconds went by, also while idle."""

    def loses(self, message: ipc.ToWorker) -> bool:
        """Whether the engine never hears of ``message``."""
        return False
