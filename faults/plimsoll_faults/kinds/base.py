"""Base class of all faults, with the affected process, the memory that grows, and the cure."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from plimsoll_api.admin import Role

MIB = 1 << 20
# The number of the first worker of an engine's frontend.
FIRST_EPOCH = 1

Cure = Literal["trim", "worker restart", "engine restart", "pod replacement", "none: no defect"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that can be injected.

    ``owner`` names what holds the leaked memory, ``segment`` is the memory segment that grows, and
    ``cure`` is the least disruptive action that helps.
    """

    owner: ClassVar[str]
    segment: ClassVar[str]
    cure: ClassVar[Cure] = "worker restart"
    process: ClassVar[Role] = Role.WORKER

    epochs: Literal["first", "all"] = "first"

    def is_active_in(self, epoch: int) -> bool:
        """Report whether the worker of epoch number ``epoch`` has the fault."""
        return self.epochs == "all" or epoch == FIRST_EPOCH
