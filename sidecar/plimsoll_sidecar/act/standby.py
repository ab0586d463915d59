"""Lease the engine's standby worker while it is needed, in a separate thread.

If the supervisor disappears, the lease expires and the engine stops the standby worker.
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

LEASE_DURATION_S = 60.0
RENEW_INTERVAL_S = 15.0
MAX_ERROR_CHARS = 500


class StandbyLease:
    """Lease on the engine's standby worker, renewed while a standby worker is wanted."""

    def __init__(self, engine: EngineAdapter, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._request = ("", False)
        """Current epoch of the engine, and whether a standby worker is wanted in that epoch."""
        self._thread: BackgroundThread | None = None
        self._leased_epoch: str | None = None
        """Epoch in which the lease was granted; None if there is no lease."""
        self._expires_at = 0.0
        self._logged = ""

    def set_wanted(self, epoch: str, is_wanted: bool) -> None:
        """Set whether a standby worker is wanted in the engine's current epoch. Does not block."""
        if (epoch, is_wanted) == self._request:
            return
        self._request = epoch, is_wanted
        if self._thread is not None:
            self._thread.wake()
        elif is_wanted:
            thread = BackgroundThread("standby", self._run_once)
            if thread.try_start():
                self._thread = thread
            else:
                self._request = ("", False)  # the next sample tries again

    def stop(self) -> None:
        """Stop renewing the lease, but keep it for the next supervisor."""
        if self._thread is not None:
            self._thread.stop()

    def _run_once(self) -> float | None:
        self.renew_or_release()
        _, is_wanted = self._request
        idle = not is_wanted and self._leased_epoch is None
        return None if idle else RENEW_INTERVAL_S

    def renew_or_release(self) -> None:
        """Renew the lease if a standby worker is wanted, or else release it."""
        epoch, is_wanted = self._request
        if not is_wanted:
            if self._leased_epoch not in (None, epoch):
                self._leased_epoch = None
                self._log_change("the lease ended, because the engine is in another epoch")
            elif self._clock() >= self._expires_at:
                self._leased_epoch = None  # the lease has expired
            if self._leased_epoch is None:
                return
        try:
            standby = self._engine.lease_standby(epoch, LEASE_DURATION_S if is_wanted else 0.0)
        except EngineError as error:
            self._log_change(
                f"failed to lease the standby worker: {error}"
                if is_wanted
                else f"failed to release the standby worker: {error}"
            )
            return
        if is_wanted:
            self._leased_epoch = epoch
            self._expires_at = self._clock() + LEASE_DURATION_S
            self._log_change(_format_status(standby))
        else:
            self._leased_epoch = None
            self._log_change("the supervisor released the lease")

    def _log_change(self, text: str) -> None:
        if text != self._logged:
            log.info("status of the standby worker: %s", text)
        self._logged = text


def _format_status(standby: StandbyStatus | None) -> str:
    if standby is None:
        return "unknown, because the engine does not report it"
    return standby.state.value + (f": {standby.error[:MAX_ERROR_CHARS]}" if standby.error else "")
