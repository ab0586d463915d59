"""Interface of memory owners: components that count, bound, audit and release their memory.

Owners count their bytes on each call and never store the count, so reports are up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from plimsoll_api.admin import MemoryKind, Role


class FlushAction(NamedTuple):
    """Action that frees memory that an owner can do without, such as a cache.

    ``content`` describes this memory in reports. ``nbytes`` returns its size in bytes. ``free``
    frees it.
    """

    content: str
    nbytes: Callable[[], int]
    free: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Component of a process that holds memory of one ``kind``.

    ``nbytes`` returns the size of this memory in bytes, and ``bound`` is the maximum size; None
    means no limit. ``checks`` has a function for each audit rule, by name, that returns a message
    for each problem. ``close`` releases all memory and is idempotent.
    """

    name: str
    kind: MemoryKind
    nbytes: Callable[[], int]
    bound: int | None = None
    process: Role = Role.WORKER
    checks: Mapping[str, Callable[[], list[str]]] = field(default_factory=dict)
    flush: FlushAction | None = None
    close: Callable[[], object] | None = None


class WorkerPart(Protocol):
    """Part of a worker process. Parts are closed in the reverse order of their opening."""

    @property
    def name(self) -> str:
        """Name of this part in the report of how long each part took to close."""
        ...

    def list_owners(self) -> list[Owner]:
        """Return this part's memory owners. Call this only while the part is open."""
        ...

    def close(self) -> None:
        """Release everything that this part holds. Idempotent."""
        ...
