"""Memory owners. Each counts its bytes, declares a bound, and has audit rules and a cleanup.

Bytes are counted on each call and never stored, so reports are up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from plimsoll_api.admin import MemoryKind, Role


class FlushAction(NamedTuple):
    """Action that frees memory which an owner can do without.

    ``content`` names the memory in logs, ``nbytes`` returns its size, and ``free`` frees it.
    """

    content: str
    nbytes: Callable[[], int]
    free: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Component of a process that holds memory of one ``kind``.

    ``bound`` is the maximum number of bytes; None means no limit. ``checks`` maps the name of each
    audit rule to a function that returns the problems it finds. ``close`` releases everything and
    is idempotent.
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
        """Name in the report of shutdown durations."""
        ...

    def list_owners(self) -> list[Owner]:
        """Return this part's memory owners while it is open."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...
