"""What the engine's ledger accounts for. Growth inside declared bounds is explained."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_sidecar.trace import LedgerLine


def declared(ledger: Sequence[LedgerLine], kind: str) -> int:
    """Bytes of all owners of ``kind``, each counted up to its bound.

    An owner without a bound explains nothing: whoever cannot say how much it will ever hold cannot
    be told from a leak.
    """
    return sum(
        max(0, min(line.bytes, line.bound))
        for line in ledger
        if line.kind == kind and line.bound is not None
    )


def out_of_bounds(ledger: Sequence[LedgerLine], kind: str) -> list[str]:
    """One line of evidence for each owner that holds more than it declared."""
    return [
        f"owner {line.owner} holds {line.bytes} bytes, its declared bound is {line.bound}"
        for line in ledger
        if line.kind == kind and line.bound is not None and line.bytes > line.bound
    ]
