"""Replaces the methods of an existing object by faulty ones.

Ledger, metrics and shutdown refer to the same object, so a faulty copy in one place would not be
consistent.
"""

from __future__ import annotations

from typing import TypeVar, cast

K = TypeVar("K")


def replace_methods(sound: object, kind: type[K]) -> K:
    """Put the methods of ``kind`` in front of those of ``sound``; return ``sound``.

    ``kind`` derives from a class of ``sound``. An object can have several faults.
    """
    sound.__class__ = type(kind.__name__, (kind, type(sound)), {})
    return cast(K, sound)
