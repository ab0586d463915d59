"""Memory budget of request bodies and responses, in total and per client.

The budget limits reserved bytes. The ledger reports the bytes that are in memory.
"""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_engine.http.limits import MAX_SMALL_BODY_BYTES


class BodyBudgetExceededError(Exception):
    """A body exceeds the total budget, or its client's half (``is_client_share``)."""

    def __init__(self, message: str, is_client_share: bool) -> None:
        super().__init__(message)
        self.is_client_share = is_client_share


class BodyBudget:
    """Memory budget of all bodies larger than MAX_SMALL_BODY_BYTES. A client may use half of it."""

    def __init__(self, get_total_bytes: Callable[[], int], max_connections: int) -> None:
        self._get_total_bytes = get_total_bytes
        self._max_connections = max_connections
        self._reserved = 0
        self._reserved_by_client: dict[str, int] = {}
        self.held_bytes = 0

    @property
    def max_held_bytes(self) -> int:
        """Maximum of ``held_bytes``: the budget, plus a small body on each connection."""
        return self._get_total_bytes() + self._max_connections * MAX_SMALL_BODY_BYTES

    def open_reservation(self, client: str) -> Reservation:
        """Return a context manager that can reserve memory for one body of ``client``."""
        return Reservation(self, client)

    def _reserve(self, client: str, size_bytes: int) -> None:
        total = self._get_total_bytes()
        own = self._reserved_by_client.get(client, 0)
        if own + size_bytes > total // 2:
            raise BodyBudgetExceededError(
                f"no memory for a body of {size_bytes} bytes: your other requests use {own} of the"
                f" {total // 2} bytes per client; retry when one has finished",
                is_client_share=True,
            )
        if self._reserved + size_bytes > total:
            raise BodyBudgetExceededError(
                f"no memory for a body of {size_bytes} bytes: {self._reserved} of {total} bytes for"
                " request bodies are in use; retry later",
                is_client_share=False,
            )
        self._reserved += size_bytes
        self._reserved_by_client[client] = own + size_bytes

    def _release(self, client: str, size_bytes: int) -> None:
        self._reserved -= size_bytes
        rest = self._reserved_by_client[client] - size_bytes
        if rest:
            self._reserved_by_client[client] = rest
        else:
            del self._reserved_by_client[client]


class Reservation:
    """Memory reservation of one body, released when its context exits."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._reserved = 0
        self._held_bytes = 0

    def reserve(self, size_bytes: int) -> None:
        """Increase the reservation to ``size_bytes`` in total. Raises BodyBudgetExceededError."""
        if size_bytes > MAX_SMALL_BODY_BYTES and size_bytes > self._reserved:
            self._budget._reserve(self._client, size_bytes - self._reserved)
            self._reserved = size_bytes

    def add_held(self, size_bytes: int) -> None:
        """Count ``size_bytes`` more bytes as held in memory."""
        self._held_bytes += size_bytes
        self._budget.held_bytes += size_bytes

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0
        if self._reserved:
            self._budget._release(self._client, self._reserved)
            self._reserved = 0
