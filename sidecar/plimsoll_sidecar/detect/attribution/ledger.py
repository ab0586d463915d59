"""What the engine's ledger accounts for. Growth inside declared bounds is explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from plimsoll_api.trace import LedgerLine

MAX_OWNERS = 64
"""Owners of one kind that are followed. Engines have about ten; later ones explain nothing."""


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """One owner, as it is kept.

    Bytes: ``bound`` is the largest that it declared, and ``earlier`` what of its memory was there
    before it was seen: this explains no growth.
    """

    bound: int
    earlier: int = 0


class Account:
    """What the owners of one kind explain, from one ledger to the next.

    An owner may be declared late: vLLM's probe sees the key-value cache only once the engine's loop
    runs, and a busy process may say nothing for a while. Its memory was there all the while. So an
    owner that appears explains no more than the growth that nothing explains by then, and the same
    holds for what it adds while it is away, or when its bound rises. While it is away, or declares
    less than its largest bound (one of several ranks is silent), the least that it ever held
    counts.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.owners: dict[str, Owner] = {}
        self._least: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._whole: set[str] = set()

    def resume(self, owners: Mapping[str, Owner] | None) -> None:
        """Go on from what :attr:`owners` gave in this epoch.

        None is an account of a release that kept none, in which all that was declared counted.
        """
        if owners is None:
            owners = {name: Owner(one.bound) for name, one in self.owners.items()}
        self.owners = {**self.owners, **owners}

    def declared(self, ledger: Sequence[LedgerLine], grown: Callable[[int], int]) -> int:
        """Return the bytes that the owners explain, comparable with every other answer.

        ``grown`` says what nothing explains of the growth so far, where so many bytes are declared.
        """
        sizes = bounded(ledger, self.kind)
        whole = self._whole_of(sizes)
        for name in whole:
            size = sizes[name][0]
            self._least[name] = min(size, self._least.get(name, size))
        fresh = {name: sizes[name] for name in whole if self._is_fresh(name, sizes[name][1])}
        known = sum(
            self._before(name, sizes[name][0])
            if name in fresh
            else self._held(name, sizes.get(name, (0, 0))[0], name in whole)
            for name in self.owners
        )
        total = known - sum(one.earlier for one in self.owners.values())
        left = max(0, grown(total)) if fresh else 0
        for name, (size, bound) in sorted(fresh.items()):
            rise = size - self._before(name, size)
            explained = max(0, min(rise, left))
            left, total = left - explained, total + min(rise, explained)
            earlier = self.owners[name].earlier if name in self.owners else 0
            self.owners[name] = Owner(bound, earlier + max(0, rise) - explained)
        for name in whole:
            size = sizes[name][0]
            self._most[name] = max(size, self._most.get(name, size))
        self._whole = whole
        return total

    def _whole_of(self, sizes: Mapping[str, tuple[int, int]]) -> set[str]:
        """Return the owners whose bound has not shrunk, and new ones while there is room.

        New ones come in the order of the ledger.
        """
        known = {
            n
            for n, (_, bound) in sizes.items()
            if n in self.owners and bound >= self.owners[n].bound
        }
        fresh = [name for name in sizes if name not in self.owners]
        return known | set(fresh[: max(0, MAX_OWNERS - len(self.owners))])

    def _is_fresh(self, name: str, bound: int) -> bool:
        """Whether it is here for the first time, or again, or has another bound."""
        return name not in self._whole or bound > self.owners[name].bound

    def _before(self, name: str, size: int) -> int:
        """Return what counted of a fresh owner before.

        One that a predecessor of this detector knew held as much then as it does now.
        """
        return self._most.get(name, size) if name in self.owners else 0

    def _held(self, name: str, size: int, whole: bool) -> int:
        return size if whole else max(size, self._least.get(name, 0))


def bounded(ledger: Sequence[LedgerLine], kind: str) -> dict[str, tuple[int, int]]:
    """Bytes, up to the bound, and the bound of each owner of ``kind``.

    An owner without a bound explains nothing: whoever cannot say how much it will ever hold cannot
    be told from a leak.
    """
    return {
        line.owner: (max(0, min(line.bytes, line.bound)), line.bound)
        for line in ledger
        if line.kind == kind and line.bound is not None
    }


def out_of_bounds(ledger: Sequence[LedgerLine], kind: str) -> list[str]:
    """One line of evidence for each owner that holds more than it declared."""
    return [
        f"owner {line.owner} holds {line.bytes} bytes, more than its declared bound of {line.bound}"
        for line in ledger
        if line.kind == kind and line.bound is not None and line.bytes > line.bound
    ]
