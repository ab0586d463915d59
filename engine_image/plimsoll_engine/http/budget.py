"""Memory budget of request bodies and answers, in total and per client.

The size of a body is reserved according to its Content-Length before the body is read, so an
oversized request is refused before it takes memory. Reserved bytes count against the budget. Held
bytes are the bytes that have been received, which the ledger reports.
"""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_engine.http.limits import SMALL_BODY_BYTES


class OverBudget(Exception):
    """The budget has no space for this body.

    ``client`` is True if this client exceeds its share, and False if all clients together use up
    the budget.
    """

    def __init__(self, message: str, client: bool) -> None:
        super().__init__(message)
        self.client = client


class BodyBudget:
    """Byte budget of all bodies larger than SMALL_BODY_BYTES. A client may use half of it.

    ``total`` returns the current size of the budget. ``connections`` is the maximum number of
    connections.
    """

    def __init__(self, total: Callable[[], int], connections: int) -> None:
        self._total = total
        self._connections = connections
        self._reserved = 0
        self._reserved_by_client: dict[str, int] = {}
        self.held = 0

    @property
    def bound(self) -> int:
        """Maximum of ``held``: the budget, plus a small body on each connection."""
        return self._total() + self._connections * SMALL_BODY_BYTES

    def open(self, client: str) -> Reservation:
        """Return a context manager that reserves memory for one body of ``client``."""
        return Reservation(self, client)

    def _reserve(self, client: str, size: int) -> None:
        total = self._total()
        own = self._reserved_by_client.get(client, 0)
        if own + size > total // 2:
            raise OverBudget(
                f"no memory for a body of {size} bytes: your other requests use {own} of the"
                f" {total // 2} bytes per client; wait for one to finish",
                client=True,
            )
        if self._reserved + size > total:
            raise OverBudget(
                f"no memory for a body of {size} bytes: {self._reserved} of {total} bytes for"
                " request bodies are in use; try again",
                client=False,
            )
        self._reserved += size
        self._reserved_by_client[client] = own + size

    def _release(self, client: str, size: int) -> None:
        self._reserved -= size
        rest = self._reserved_by_client[client] - size
        if rest:
            self._reserved_by_client[client] = rest
        else:
            del self._reserved_by_client[client]


class Reservation:
    """Reserved memory of one body. Leaving the context releases it."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._reserved = 0
        self._held = 0

    def reserve(self, size: int) -> None:
        """Raise the reservation to ``size`` bytes. Raises :class:`OverBudget`."""
        if size > SMALL_BODY_BYTES and size > self._reserved:
            self._budget._reserve(self._client, size - self._reserved)
            self._reserved = size

    def add_held(self, size: int) -> None:
        """Count ``size`` more received bytes."""
        self._held += size
        self._budget.held += size

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self._budget.held -= self._held
        self._held = 0
        if self._reserved:
            self._budget._release(self._client, self._reserved)
            self._reserved = 0
