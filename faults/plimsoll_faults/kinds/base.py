"""The base of all faults: the process, the memory that grows, and the cure."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from plimsoll_api.admin import Role

MIB = 1 << 20
FIRST_EPOCH = 1
"""The frontend numbers the workers of an engine start from 1."""

Cure = Literal["trim", "worker restart", "engine restart", "pod replacement", "none: no defect"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that can be injected. ``epochs`` are the workers of an engine start that have it.

    ``owner`` is what holds the memory, ``segment`` which segment grows, and ``cure`` the least
    disruptive action that helps.
    """

    owner: ClassVar[str]
    segment: ClassVar[str]
    cure: ClassVar[Cure] = "worker restart"
    process: ClassVar[Role] = Role.WORKER

    epochs: Literal["first", "all"] = "first"

    def is_active_in(self, epoch: int) -> bool:
        """Report whether the worker of ``epoch`` has the fault, as numbered by the frontend."""
        return self.epochs == "all" or epoch == FIRST_EPOCH
