"""The maintenance window: when restarts that can wait are done."""

from __future__ import annotations

from plimsoll_api.maintenance_window import MaintenanceWindow
from plimsoll_api.units import DAY_S

THURSDAY = 3
"""The weekday of 1 January 1970, where 0 is Monday."""


def opens_in(window: MaintenanceWindow | None, now: float) -> float:
    """Seconds until the window opens; zero while it is open, and where there is none.

    ``now`` is Unix seconds. A window that began yesterday may be open still.
    """
    if window is None:
        return 0.0
    today = int(now // DAY_S)
    for day in range(today - 1, today + 8):
        begin = day * DAY_S + window.start_s
        if window.days and (day + THURSDAY) % 7 not in window.days:
            continue
        if now < begin + window.duration_s:
            return max(0.0, begin - now)
    raise AssertionError("a week has no such day")  # days are 0 to 6: one of eight is among them


def clock(window: MaintenanceWindow) -> str:
    """``HH:MM`` in UTC at which the window opens."""
    minutes = int(window.start_s // 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d} UTC"
