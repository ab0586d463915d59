"""Who holds how much: each owner of memory declares its bytes and the most it will ever hold.

An owner is a function that counts, not a number, so that the ledger cannot go stale; the functions
belong to the engine's parts, and the ledger is cleared at shutdown before they go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plimsoll_api.admin import LedgerEntry, MemoryKind, Role


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds memory.

    ``count`` gives its bytes now, ``bound`` the most it will hold, None without a limit.
    """

    name: str
    kind: MemoryKind
    count: Callable[[], int]
    bound: int | None
    process: Role


class Ledger:
    """The owners of one worker, by name."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}

    def register(
        self,
        name: str,
        kind: MemoryKind,
        count: Callable[[], int],
        bound: int | None,
        process: Role = Role.WORKER,
    ) -> None:
        """Add an owner; ``count`` gives its bytes now, ``bound`` the most, None where unknown.

        ``process`` is whose memory it is.
        """
        if name in self._owners:
            raise ValueError(f"ledger owner {name!r} is already registered")
        self._owners[name] = Owner(name, kind, count, bound, process)

    def entries(self) -> list[LedgerEntry]:
        """Every owner's bytes at this instant."""
        return [
            LedgerEntry(owner.name, owner.kind, owner.count(), owner.bound, owner.process)
            for owner in self._owners.values()
        ]

    def problems(self) -> list[str]:
        """Return the owners outside their bounds."""
        return [
            f"{entry.owner} holds {entry.bytes} bytes, its bound is {entry.bound}"
            for entry in self.entries()
            if entry.bound is not None and entry.bytes > entry.bound
        ]

    def clear(self) -> None:
        """Forget every owner, and with them what their functions refer to."""
        self._owners.clear()
