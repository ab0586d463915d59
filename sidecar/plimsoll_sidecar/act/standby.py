"""Keeps the engine's standby worker for as long as one is wanted, in a thread of its own.

It is a lease: where the supervisor disappears the engine gives the standby back. Nothing depends on
it. A lease that cannot be had makes the next restart slower, and no request of ours is repeated for
its sake after that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from plimsoll_api.admin import StandbyStatus
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.background import Part
from plimsoll_sidecar.clients.http import EngineError

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""From the last renewal on."""
RENEWAL_S = 15.0
MAX_ERROR = 500
"""Characters of the engine's reason that are logged."""


class StandbyLease:
    """One lease on the standby worker of ``engine``, renewed while it is wanted."""

    def __init__(self, engine: EngineAdapter, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._followed = ("", False)
        """The engine's epoch, and whether a standby is wanted in it."""
        self._part: Part | None = None
        self._leased: str | None = None
        """The epoch of a lease that was not given back."""
        self._until = 0.0
        self._told = ""

    def follow(self, epoch: str, wanted: bool) -> None:
        """Want a standby in ``epoch``, which is the engine's now, or none. Never waits."""
        if (epoch, wanted) == self._followed:
            return
        self._followed = epoch, wanted
        if self._part is not None:
            self._part.wake()
        elif wanted:
            self._part = Part("standby", self._turn)
            self._part.start()

    def stop(self) -> None:
        """Renew it no more. It is not given back: the next supervisor may go on with it."""
        if self._part is not None:
            self._part.stop()

    def _turn(self) -> float | None:
        self.renew()
        _, wanted = self._followed
        idle = not wanted and self._leased is None
        return None if idle else RENEWAL_S

    def renew(self) -> None:
        """Once: ask for what is wanted now, or give back what is not wanted any more."""
        epoch, wanted = self._followed
        if not wanted:
            if self._leased not in (None, epoch):
                self._leased = None
                self._tell("the lease has ended with its epoch")
            elif self._clock() >= self._until:
                self._leased = None  # it has ended by itself
            if self._leased is None:
                return
        try:
            standby = self._engine.standby(epoch, LEASE_S if wanted else 0.0)
        except EngineError as error:
            self._tell(f"not leased: {error}" if wanted else f"not given back: {error}")
            return
        if wanted:
            self._leased, self._until = epoch, self._clock() + LEASE_S
            self._tell(_described(standby))
        else:
            self._leased = None
            self._tell("given back")

    def _tell(self, text: str) -> None:
        if text != self._told:
            log.info("standby worker: %s", text)
        self._told = text


def _described(standby: StandbyStatus | None) -> str:
    if standby is None:
        return "unknown"
    return standby.state.value + (f": {standby.error[:MAX_ERROR]}" if standby.error else "")
