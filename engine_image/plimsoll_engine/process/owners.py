"""Owners of memory: each counts its bytes, declares a bound, checks itself and closes itself.

An owner counts when it is asked and stores no figure, so what it reports cannot go stale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from plimsoll_api.admin import MemoryKind, Role


class Flush(NamedTuple):
    """Way to free memory of an owner that no request needs.

    ``act`` frees the bytes that ``nbytes`` returns. ``what`` describes them for logs.
    """

    what: str
    nbytes: Callable[[], int]
    act: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Component of ``process`` that holds memory of one ``kind``.

    ``bound`` is the maximum number of bytes, None without a limit. ``checks`` are its audit rules
    by name; each returns the problems it finds. ``close`` releases everything and is idempotent.
    """

    name: str
    kind: MemoryKind
    nbytes: Callable[[], int]
    bound: int | None = None
    process: Role = Role.WORKER
    checks: Mapping[str, Callable[[], list[str]]] = field(default_factory=dict)
    flush: Flush | None = None
    close: Callable[[], object] | None = None


class Part(Protocol):
    """A part of a worker process. Parts are closed in the reverse of the order of their opening."""

    @property
    def name(self) -> str:
        """Return the name under which the time of its closing is reported."""
        ...

    def owners(self) -> list[Owner]:
        """Return what holds memory in this part while it is open."""
        ...

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        ...
