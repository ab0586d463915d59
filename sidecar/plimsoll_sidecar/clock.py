"""The time of decisions: wall-clock seconds that no step of the wall clock can bend.

Waits and deadlines of an incident are differences of these times. A clock that is set forward by an
hour must not end them early (a verification that seems late leads to the next restart), one that is
set back must not make them endless. The same holds over a restart of the supervisor: within one
boot of the machine the journal says what the time was when.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

STEP_S = 5.0
"""What a clock may differ by before it was set: slewing and scheduling stay far below."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Reading(msgspec.Struct, frozen=True):
    """The time in Unix seconds at ``boottime``, seconds since the boot that ``boot_id`` names."""

    time: float
    boottime: float
    boot_id: str


def since_boot() -> float:
    """Return seconds since boot, suspend included (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Empty where the kernel does not say."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


class SteadyClock:
    """Unix seconds that go on with the time since boot."""

    def __init__(
        self,
        then: Reading | None = None,
        wall: Callable[[], float] = time.time,
        boottime: Callable[[], float] = since_boot,
        boot: Callable[[], str] = boot_id,
    ) -> None:
        """Goes on from ``then`` where that is of this boot."""
        self._wall, self._boottime, self._boot = wall, boottime, boot()
        self._offset = wall() - boottime()
        if then is not None and self._boot and then.boot_id == self._boot:
            before = then.time - then.boottime
            if abs(self._offset - before) > STEP_S:
                self._offset = before

    def now(self) -> float:
        """Seconds since 1970 that run evenly: a change of the system's clock does not move them."""
        return self._boottime() + self._offset

    def follow(self) -> float:
        """Take over a step of the wall clock and return its seconds, zero where there was none.

        For when nothing waits: later times are right then, and those that are remembered must be
        moved along (see :func:`plimsoll_sidecar.govern.state.shift`).
        """
        step = self._wall() - self._boottime() - self._offset
        if abs(step) <= STEP_S:
            return 0.0
        self._offset += step
        return step

    def reading(self) -> Reading:
        """One instant in both times, with the boot that the monotonic one belongs to."""
        at = self._boottime()
        return Reading(at + self._offset, at, self._boot)
