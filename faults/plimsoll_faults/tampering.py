"""How a fault takes the place of sound code: the object stays, its methods are others.

Ledger, metrics and shutdown hold the engine's parts too, so a copy in one place would split them.
"""

from __future__ import annotations

from typing import TypeVar, cast

K = TypeVar("K")


def turned(sound: object, kind: type[K]) -> K:
    """``sound`` itself, with the methods of ``kind`` before its own from now on.

    ``kind`` derives from a class of ``sound``; several faults may turn one object.
    """
    sound.__class__ = type(kind.__name__, (kind, type(sound)), {})
    return cast(K, sound)
