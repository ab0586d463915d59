"""What every fault that can be switched on has: where it is, what it makes grow, what cures it."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from plimsoll_api.admin import Role

MIB = 1 << 20
FIRST_EPOCH = 1
"""The frontend numbers the workers of an engine start from 1."""

Cure = Literal["trim", "worker restart", "engine restart", "pod replacement", "none: it is sound"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """``epochs`` says in which workers of an engine start the fault is.

    ``owner`` says what holds the memory, ``segment`` which segment grows, ``cure`` the lightest
    action that helps.
    """

    owner: ClassVar[str]
    segment: ClassVar[str]
    cure: ClassVar[Cure] = "worker restart"
    process: ClassVar[Role] = Role.WORKER

    epochs: Literal["first", "all"] = "first"

    def in_epoch(self, epoch: int) -> bool:
        """Whether the fault is in the worker of ``epoch``, by the frontend's count."""
        return self.epochs == "all" or epoch == FIRST_EPOCH
