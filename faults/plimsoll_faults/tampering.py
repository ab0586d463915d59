"""Replace methods of an existing object with faulty ones.

The ledger, the metrics and the shutdown refer to the existing object, so a faulty copy would have
no effect on them.
"""

from __future__ import annotations

from typing import TypeVar, cast

K = TypeVar("K")


def replace_methods(target: object, mixin: type[K]) -> K:
    """Override methods of ``target`` with those of ``mixin``, a subclass of its class."""
    target.__class__ = type(mixin.__name__, (mixin, type(target)), {})
    return cast(K, target)
