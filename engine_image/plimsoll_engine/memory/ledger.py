"""Memory ledger: each owner of memory declares its bytes and their upper bound.

An owner is a function that counts, not a number, so that the ledger cannot go stale. The functions
belong to parts of the engine; shutdown clears the ledger before it releases those parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plimsoll_api.admin import LedgerEntry, MemoryKind, Role


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of memory.

    ``count`` returns its bytes. ``bound`` is their maximum, None without a limit.
    """

    name: str
    kind: MemoryKind
    count: Callable[[], int]
    bound: int | None
    process: Role


class Ledger:
    """Memory owners of one worker, by name."""

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
        """Add an owner. ``count`` returns its bytes; ``bound`` is their maximum, None if unknown.

        ``process`` is the process that has the memory. Raises ValueError for a duplicate name.
        """
        if name in self._owners:
            raise ValueError(f"ledger owner {name!r} is already registered")
        self._owners[name] = Owner(name, kind, count, bound, process)

    def entries(self) -> list[LedgerEntry]:
        """Return the current bytes of every owner."""
        return [
            LedgerEntry(owner.name, owner.kind, owner.count(), owner.bound, owner.process)
            for owner in self._owners.values()
        ]

    def problems(self) -> list[str]:
        """Return the owners that exceed their bounds."""
        return [
            f"{entry.owner} holds {entry.bytes} bytes, its bound is {entry.bound}"
            for entry in self.entries()
            if entry.bound is not None and entry.bytes > entry.bound
        ]

    def clear(self) -> None:
        """Remove every owner, and thereby the references of its function."""
        self._owners.clear()
