"""What must hold in each of the engine's processes, whatever it computes.

It is about the collector's state and the caches that Python itself offers.

``gc.freeze()`` hides all that exists from every later collection. That is right once, for what
lives as long as the engine; done again while requests come and go it hides their garbage, and no
collection finds it. The permanent generation is the process's, so freezing is counted here for all
engines of the process: the last one that unfreezes does.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator

OURS = "plimsoll_"


class Frozen:
    """The pairs of freeze and unfreeze of one process."""

    def __init__(self) -> None:
        self._engines = 0
        self._objects = 0
        self._inherited: int | None = None

    def before_forks(self) -> None:
        """Freeze what the processes forked from this one inherit.

        It is counted here, once: to count some 300,000 objects takes 30 ms, which each restart
        would wait for.
        """
        gc.collect()
        gc.freeze()
        self._inherited = gc.get_freeze_count()

    def freeze(self) -> None:
        """Freeze what exists by now, which lives as long as the engine: no collection looks."""
        gc.collect()
        if self._inherited is None or self._engines:
            gc.freeze()
            self._objects = gc.get_freeze_count()
        else:
            self._objects = self._inherited + len(gc.get_objects())
            gc.freeze()
        self._engines += 1

    def unfreeze(self) -> None:
        """Undo :meth:`freeze`. Without one before it, this does nothing."""
        self._engines = max(0, self._engines - 1)
        if not self._engines:
            gc.unfreeze()

    def problems(self) -> list[str]:
        """Objects that somebody else has frozen since; frozen ones that died are fewer."""
        if not self._engines:
            return []
        more = gc.get_freeze_count() - self._objects
        if more <= 0:
            return []
        return [f"{more} objects were frozen while the engine serves: no collection sees them"]


frozen = Frozen()


def method_cache_problems() -> list[str]:
    """Return each ``functools.lru_cache`` on a method of ours.

    It belongs to the class and holds every instance that it was called on.
    """
    return [
        f"{name} is cached for its class, which holds {size} calls with their instances"
        for name, size in _method_caches()
        if size
    ]


def _method_caches() -> Iterator[tuple[str, int]]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(OURS)]
    for module in modules:
        for kind in list(vars(module).values()):
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                for name, member in list(vars(kind).items()):
                    if isinstance(member, functools._lru_cache_wrapper):
                        yield f"{kind.__qualname__}.{name}", member.cache_info().currsize
