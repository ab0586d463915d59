"""Memory owners, which count, bound, audit and release the memory of a component."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from plimsoll_api.admin import MemoryKind, Role


class FlushAction(NamedTuple):
    """Action that frees memory that an owner can do without, such as a cache."""

    content: str
    nbytes: Callable[[], int]
    free: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Component of a process that holds memory of one ``kind``.

    Attributes:
        bound: Maximum size of this memory in bytes; None without a limit.
        checks: Audit rules by name. Each function returns a message for each violation.
        flush: Action that frees a part of the memory; None without such a part.
        close: Function that releases all memory. It may be called more than once.

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
        """Name of this part in the report of shutdown durations."""
        ...

    def list_owners(self) -> list[Owner]:
        """Return the memory owners of this open part."""
        ...

    def close(self) -> None:
        """Release everything that this part holds. Idempotent."""
        ...
