"""The memory that bodies may take while they are read and prepared: in all, and of one client.

A body is announced (Content-Length) before it is read, so that it is refused before it takes
anything. What is announced is reserved, what has come is held; the ledger tells what is held.
"""

from __future__ import annotations

from collections.abc import Callable

from plimsoll_engine.http.limits import SMALL_BODY_BYTES


class OverBudget(Exception):
    """The body does not fit now.

    ``client`` is true where this client's own bodies take its share, false where all bodies
    together take all.
    """

    def __init__(self, message: str, client: bool) -> None:
        super().__init__(message)
        self.client = client


class BodyBudget:
    """``total`` gives the bytes of all bodies above the small ones; one client has half of it."""

    def __init__(self, total: Callable[[], int], connections: int) -> None:
        self._total = total
        self._connections = connections
        self._reserved = 0
        self._of: dict[str, int] = {}
        self.held = 0

    @property
    def bound(self) -> int:
        """The most that is ever held: the total, and a small body on each connection."""
        return self._total() + self._connections * SMALL_BODY_BYTES

    def open(self, client: str) -> Reservation:
        """For one body of ``client``; close it when the body's bytes are gone."""
        return Reservation(self, client)

    def _reserve(self, client: str, size: int) -> None:
        total = self._total()
        own = self._of.get(client, 0)
        if own + size > total // 2:
            raise OverBudget(
                f"a body of {size} bytes: your other requests' bodies take {own} of the"
                f" {total // 2} bytes that one client may have in work; send one after another",
                client=True,
            )
        if self._reserved + size > total:
            raise OverBudget(
                f"a body of {size} bytes: {self._reserved} of {total} bytes for bodies in work are"
                " taken; try again",
                client=False,
            )
        self._reserved += size
        self._of[client] = own + size

    def _give_back(self, client: str, size: int) -> None:
        self._reserved -= size
        left = self._of[client] - size
        if left:
            self._of[client] = left
        else:
            del self._of[client]


class Reservation:
    """A context manager: leaving it gives everything back."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._reserved = 0
        self._held = 0

    def announce(self, size: int) -> None:
        """Reserve for a body of ``size`` bytes, more than before. Raises :class:`OverBudget`."""
        if size > SMALL_BODY_BYTES and size > self._reserved:
            self._budget._reserve(self._client, size - self._reserved)
            self._reserved = size

    def came(self, size: int) -> None:
        """``size`` more bytes are in memory."""
        self._held += size
        self._budget.held += size

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self._budget.held -= self._held
        self._held = 0
        if self._reserved:
            self._budget._give_back(self._client, self._reserved)
            self._reserved = 0
