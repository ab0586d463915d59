"""Measure time in Unix seconds, independently of changes of the wall clock.

If the wall clock is set forward, waits must not end early; if it is set back, they must not become
endless. Unless the node has rebooted, a new supervisor continues from the time in the journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

# NTP corrects smaller differences gradually.
MIN_CLOCK_STEP_S = 5.0
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class ClockReading(msgspec.Struct, frozen=True):
    """Unix time and CLOCK_BOOTTIME at the same moment, both in seconds."""

    time: float
    boottime: float
    boot_id: str


def read_boottime_s() -> float:
    """Return the seconds since boot, including suspend (CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_boot_id() -> str:
    """Return the ID of the current boot; empty if unknown."""
    try:
        return BOOT_ID_FILE.read_text().strip()
    except OSError:
        return ""


class SteadyClock:
    """Clock in Unix seconds that advances with the time since boot."""

    def __init__(
        self,
        previous: ClockReading | None = None,
        read_wall_clock: Callable[[], float] = time.time,
        read_boottime: Callable[[], float] = read_boottime_s,
        read_boot_id: Callable[[], str] = read_boot_id,
    ) -> None:
        self._read_wall_clock, self._read_boottime = read_wall_clock, read_boottime
        self._boot_id = read_boot_id()
        self._offset = read_wall_clock() - read_boottime()
        if previous is not None and self._boot_id and previous.boot_id == self._boot_id:
            before = previous.time - previous.boottime
            if abs(self._offset - before) > MIN_CLOCK_STEP_S:
                self._offset = before

    def now(self) -> float:
        """Return the time in Unix seconds. Changes of the wall clock do not affect it."""
        return self._read_boottime() + self._offset

    def apply_step(self) -> float:
        """Apply a step of the wall clock to this clock, and return the step in seconds; 0 without.

        Call this only while no incident is open, and then shift the stored times.
        """
        step = self._read_wall_clock() - self._read_boottime() - self._offset
        if abs(step) <= MIN_CLOCK_STEP_S:
            return 0.0
        self._offset += step
        return step

    def read(self) -> ClockReading:
        """Return the current time, the seconds since boot, and the boot ID."""
        boottime = self._read_boottime()
        return ClockReading(boottime + self._offset, boottime, self._boot_id)
