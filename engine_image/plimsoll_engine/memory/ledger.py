"""List the memory of a worker by owner."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.admin import LedgerEntry
from plimsoll_engine.process.owners import Owner, WorkerPart


class Ledger:
    """Memory owners in ``parts`` and their sizes."""

    def __init__(self, parts: Sequence[WorkerPart] = ()) -> None:
        self._parts = parts

    def list_owners(self) -> list[Owner]:
        """Return all owners, in the order of ``parts``. Raises ValueError for a repeated name."""
        owners = [owner for part in self._parts for owner in part.list_owners()]
        names = [owner.name for owner in owners]
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the ledger owner {duplicate!r} is registered twice")
        return owners

    def list_entries(self) -> list[LedgerEntry]:
        """Return a ledger entry for each owner."""
        return [
            LedgerEntry(owner.name, owner.kind, owner.nbytes(), owner.bound, owner.process)
            for owner in self.list_owners()
        ]

    def find_problems(self) -> list[str]:
        """Return a message for each owner that exceeds its bound."""
        return [
            f"{entry.owner} holds {entry.bytes} bytes, which exceeds its bound of {entry.bound}"
            for entry in self.list_entries()
            if entry.bound is not None and entry.bytes > entry.bound
        ]
