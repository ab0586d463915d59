"""A second copy of the restart budget: a journal that is lost gives no restarts back.

In a cluster the slot Leases count the service's restarts too; this file counts the replica's own,
and is all there is in local mode.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from plimsoll_api.decoding import Malformed, decode
from plimsoll_sidecar.govern.policy.restart_budget import Restart
from plimsoll_sidecar.govern.state import GovernorState

FILE = "restarts.json"


class Spent(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of the governor's state that must not be lost."""

    restarts: tuple[Restart, ...] = ()
    exhausted: bool = False


class RestartCopy:
    """Written before the journal, so that it never lacks a restart that was begun."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: Spent | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a copy: without one, a new journal is a new replica's."""
        return self._path.exists()

    def write(self, state: GovernorState) -> None:
        """On disk when the call returns, where it changed. Raises OSError."""
        spent = Spent(tuple(msgspec.structs.replace(r) for r in state.restarts), state.exhausted)
        if spent == self._written:
            return
        temporary = self._path.with_name(f"{self._path.name}.new")
        with temporary.open("wb") as out:
            out.write(msgspec.json.encode(spent))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, self._path)
        self._written = spent

    def join(self, state: GovernorState) -> int:
        """Add what ``state`` lacks, and return how many restarts that were."""
        try:
            spent = decode(self._path.read_bytes(), Spent)
        except (OSError, Malformed):
            return 0  # written anew with the next state
        known = {restart.epoch for restart in state.restarts}
        lacking = [restart for restart in spent.restarts if restart.epoch not in known]
        state.restarts = sorted([*state.restarts, *lacking], key=lambda restart: restart.at)
        state.exhausted = state.exhausted or spent.exhausted
        return len(lacking)
