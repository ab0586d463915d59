"""Times in RFC 3339, as Kubernetes writes them."""

from __future__ import annotations

import time
from datetime import UTC, datetime

LAST_TIME = 253_402_300_799.0
"""End of the year 9999 in Unix seconds, the last time that RFC 3339 can represent."""
NO_TIME = "--:--:--"


def rfc3339(at: float) -> str:
    """Format Unix seconds as Kubernetes' Time: whole seconds, UTC, clamped to the valid range."""
    return _moment(at).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(at: float) -> str:
    """Format Unix seconds as Kubernetes' MicroTime, for Leases and Events."""
    return _moment(at).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def unix_seconds(text: str) -> float:
    """Parse an RFC 3339 time to Unix seconds. Raises ValueError for other text."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: write for example 2026-01-31T12:00:00Z")
    return moment.timestamp()


def clock_time(at: float | None, form: str = "%H:%M:%S") -> str:
    """Format Unix seconds as local time (``form`` as in ``strftime``); ``--:--:--`` if unknown.

    A time outside the valid range also counts as unknown.
    """
    try:
        return time.strftime(form, time.localtime(at)) if at is not None else NO_TIME
    except (ValueError, OverflowError, OSError):
        return NO_TIME


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(min(max(at, 0.0), LAST_TIME), UTC)
