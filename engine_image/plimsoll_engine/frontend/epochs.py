"""Epochs of the engine. A disruptive admin call must name the current epoch."""

from __future__ import annotations

import secrets

from plimsoll_api.admin import Epoch


class StaleEpochError(Exception):
    """The call does not name the current epoch."""


class Epochs:
    """Current epoch of the engine, and the numbers reserved for later epochs.

    Epoch 0 lasts until the first worker serves. No number is used twice.
    """

    def __init__(self, boot_id: str | None = None) -> None:
        self.current = Epoch(boot_id or secrets.token_hex(4), 0)
        self._reserved = 0

    def reserve(self) -> Epoch:
        """Return a new epoch, for a worker that is about to be forked."""
        self._reserved += 1
        return Epoch(self.current.boot_id, self._reserved)

    def enter(self, epoch: Epoch) -> None:
        """Make ``epoch`` the current epoch. Raises ValueError unless it is a later one."""
        if epoch <= self.current:
            raise ValueError(f"epoch {epoch} is not later than {self.current}")
        self.current = epoch

    def check_current(self, expected: str) -> None:
        """Raise StaleEpochError unless ``expected`` is the current epoch.

        Raises ValueError if ``expected`` is malformed.
        """
        if Epoch.parse(expected) != self.current:
            raise StaleEpochError(
                f"expected_epoch is {expected}, but the engine is in epoch {self.current}: read "
                "/admin/v1/status, and repeat the call if it is still needed"
            )
