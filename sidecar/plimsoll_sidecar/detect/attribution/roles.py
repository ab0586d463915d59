"""Which of an engine's processes grew: by role, since the epoch became warm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from plimsoll_api.trace import RoleRss


class Roles:
    """One kind of a process's memory, which ``size`` reads; null is unknown."""

    def __init__(self, size: Callable[[RoleRss], int | None]) -> None:
        self._size = size
        self._bases: dict[str, int] = {}
        self._newest: dict[str, int] = {}

    def update(self, processes: Iterable[RoleRss], warm: bool) -> None:
        """Take in one sample. Until the epoch is warm its sizes are the bases."""
        sums: dict[str, int] = {}
        for process in processes:
            size = self._size(process)
            if size is not None:
                sums[process.role] = sums.get(process.role, 0) + size
        for role, size in sums.items():
            if not warm or role not in self._bases:
                self._bases[role] = size
        self._newest |= sums

    @property
    def known(self) -> bool:
        """Whether any process has been seen with this kind of memory known."""
        return bool(self._newest)

    @property
    def bases(self) -> dict[str, int]:
        """Bytes of each role when its baseline was taken."""
        return dict(self._bases)

    def resume(self, bases: Mapping[str, int]) -> None:
        """Go on from what :attr:`bases` gave in this epoch."""
        self._bases |= bases

    def largest(self) -> str | None:
        """Return the role that grew most; None where none did."""
        grown = self._grown()
        return max(grown, key=lambda role: grown[role], default=None)

    def sole(self) -> str | None:
        """Return the role that has more than half of all growth.

        Pages that two processes share count for each of them: then it is neither's.
        """
        role = self.largest()
        grown = self._grown()
        return role if role is not None and 2 * grown[role] > sum(grown.values()) else None

    def _grown(self) -> dict[str, int]:
        growth = {role: size - self._bases.get(role, size) for role, size in self._newest.items()}
        return {role: size for role, size in growth.items() if size > 0}
