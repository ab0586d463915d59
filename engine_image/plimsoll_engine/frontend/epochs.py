"""The present epoch and its fence."""

from __future__ import annotations

import secrets

from plimsoll_api.admin import Epoch


class StaleEpoch(Exception):
    """A call that was decided on another epoch."""


class Epochs:
    """Number 0 means that no worker was started yet.

    A number is reserved for each worker that is forked and never used again; the epoch begins when
    that worker takes over. A successor that fails while it prepares has no epoch.
    """

    def __init__(self, boot_id: str | None = None) -> None:
        self.current = Epoch(boot_id or secrets.token_hex(4), 0)
        self._reserved = 0

    def reserve(self) -> Epoch:
        """Return the epoch of a worker that is about to be forked."""
        self._reserved += 1
        return Epoch(self.current.boot_id, self._reserved)

    def enter(self, epoch: Epoch) -> None:
        """``epoch`` begins. ValueError for one that is not later than the present one."""
        if epoch <= self.current:
            raise ValueError(f"epoch {epoch} is not later than {self.current}")
        self.current = epoch

    def check(self, expected: str) -> None:
        """Raise :class:`StaleEpoch` unless ``expected`` is now, ValueError if it is no epoch."""
        if Epoch.parse(expected) != self.current:
            raise StaleEpoch(
                f"the call is for epoch {expected}, but the engine is in epoch {self.current}: "
                "read /admin/v1/status and decide again"
            )
