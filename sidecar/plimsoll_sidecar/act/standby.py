"""Lease the engine's standby worker while it is needed, in a thread of its own.

If the supervisor disappears, the lease ends and the engine stops the standby. Nothing depends on
the lease: without it, the next restart is slower.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from plimsoll_api.admin import StandbyStatus
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.background import BackgroundThread
from plimsoll_sidecar.clients.http import EngineError

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""Seconds that a lease lasts after its last renewal."""
RENEW_PERIOD_S = 15.0
MAX_ERROR_CHARS = 500
"""Maximum number of characters of the engine's error in the log."""


class StandbyLease:
    """Lease on the engine's standby worker, renewed while the worker is wanted."""

    def __init__(self, engine: EngineAdapter, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._wanted = ("", False)
        """Current epoch, and whether a standby is wanted in it."""
        self._part: BackgroundThread | None = None
        self._leased_epoch: str | None = None
        """Epoch of the lease; None if it was released or has ended."""
        self._ends_at = 0.0
        self._logged = ""

    def set_wanted(self, epoch: str, wanted: bool) -> None:
        """Set whether a standby is wanted in the current ``epoch``. Does not block."""
        if (epoch, wanted) == self._wanted:
            return
        self._wanted = epoch, wanted
        if self._part is not None:
            self._part.wake()
        elif wanted:
            self._part = BackgroundThread("standby", self._renew_in_turn)
            self._part.start()

    def stop(self) -> None:
        """Stop renewing the lease, but keep it, so that the next supervisor can renew it."""
        if self._part is not None:
            self._part.stop()

    def _renew_in_turn(self) -> float | None:
        self.renew_or_release()
        _, wanted = self._wanted
        idle = not wanted and self._leased_epoch is None
        return None if idle else RENEW_PERIOD_S

    def renew_or_release(self) -> None:
        """Renew the lease if a standby is wanted, or else release it."""
        epoch, wanted = self._wanted
        if not wanted:
            if self._leased_epoch not in (None, epoch):
                self._leased_epoch = None
                self._log_change("the lease ended together with its epoch")
            elif self._clock() >= self._ends_at:
                self._leased_epoch = None  # the lease has expired
            if self._leased_epoch is None:
                return
        try:
            standby = self._engine.standby(epoch, LEASE_S if wanted else 0.0)
        except EngineError as error:
            self._log_change(
                f"cannot lease the standby worker: {error}"
                if wanted
                else f"cannot release the standby worker: {error}"
            )
            return
        if wanted:
            self._leased_epoch, self._ends_at = epoch, self._clock() + LEASE_S
            self._log_change(_describe(standby))
        else:
            self._leased_epoch = None
            self._log_change("released")

    def _log_change(self, text: str) -> None:
        if text != self._logged:
            log.info("standby worker: %s", text)
        self._logged = text


def _describe(standby: StandbyStatus | None) -> str:
    if standby is None:
        return "unknown"
    return standby.state.value + (f": {standby.error[:MAX_ERROR_CHARS]}" if standby.error else "")
