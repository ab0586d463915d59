"""Audit rules of a process: no later ``gc.freeze()``, and no ``lru_cache`` on methods.

The garbage collector ignores frozen objects for good, so only objects that live as long as the
engine may be frozen.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator

PROJECT_PREFIX = "plimsoll_"


class FreezeCounter:
    """Counter of the engines in this process that have frozen their objects."""

    def __init__(self) -> None:
        self._engines = 0
        self._objects = 0
        self._inherited: int | None = None

    def freeze_before_forks(self) -> None:
        """Freeze and count the objects that forked processes inherit.

        Counting these 300,000 objects in each forked process would add 30 ms to each restart.
        """
        gc.collect()
        gc.freeze()
        self._inherited = gc.get_freeze_count()

    def freeze(self) -> None:
        """Exclude all existing objects from garbage collection, for one engine."""
        gc.collect()
        if self._inherited is None or self._engines:
            gc.freeze()
            self._objects = gc.get_freeze_count()
        else:
            self._objects = self._inherited + len(gc.get_objects())
            gc.freeze()
        self._engines += 1

    def unfreeze(self) -> None:
        """Undo one call of :meth:`freeze`. The last call makes all objects collectable again."""
        self._engines = max(0, self._engines - 1)
        if not self._engines:
            gc.unfreeze()

    def find_problems(self) -> list[str]:
        """Return an audit message if objects were frozen after the last :meth:`freeze`."""
        if not self._engines:
            return []
        more = gc.get_freeze_count() - self._objects
        if more <= 0:
            return []
        return [
            f"gc.freeze() was called while the engine served: {more} objects are never collected"
        ]


freeze_counter = FreezeCounter()


def find_method_caches() -> list[str]:
    """Return an audit message for each used ``functools.lru_cache`` on a method.

    Such a cache keeps alive each instance on which the method was called.
    """
    return [
        f"the method {name} has an lru_cache, which keeps the instances of {size} calls alive"
        for name, size in _list_method_caches()
        if size
    ]


def _list_method_caches() -> Iterator[tuple[str, int]]:
    modules = [
        module for name, module in list(sys.modules.items()) if name.startswith(PROJECT_PREFIX)
    ]
    for module in modules:
        for kind in list(vars(module).values()):
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                for name, member in list(vars(kind).items()):
                    if isinstance(member, functools._lru_cache_wrapper):
                        yield f"{kind.__qualname__}.{name}", member.cache_info().currsize
