"""Times in RFC 3339, as Kubernetes writes them."""

from __future__ import annotations

import time
from datetime import UTC, datetime

MAX_UNIX_TIME_S = 253_402_300_799.0
"""End of the year 9999; RFC 3339 cannot represent a later time."""
UNKNOWN_CLOCK_TIME = "--:--:--"


def format_rfc3339(at: float) -> str:
    """Format Unix seconds as Kubernetes' Time, in whole seconds and UTC.

    Times before 1970 or after :data:`MAX_UNIX_TIME_S` are replaced by these limits.
    """
    return _to_datetime(at).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_rfc3339_micro(at: float) -> str:
    """Format Unix seconds as Kubernetes' MicroTime, for Leases and Events."""
    return _to_datetime(at).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_rfc3339(text: str) -> float:
    """Parse an RFC 3339 time to Unix seconds. Raises ValueError for any other text."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone: use a time such as 2026-01-31T12:00:00Z")
    return moment.timestamp()


def format_clock_time(at: float | None, form: str = "%H:%M:%S") -> str:
    """Format Unix seconds as local time; ``--:--:--`` if unknown or not representable.

    ``form`` is a format for ``strftime``.
    """
    try:
        return time.strftime(form, time.localtime(at)) if at is not None else UNKNOWN_CLOCK_TIME
    except (ValueError, OverflowError, OSError):
        return UNKNOWN_CLOCK_TIME


def _to_datetime(at: float) -> datetime:
    return datetime.fromtimestamp(min(max(at, 0.0), MAX_UNIX_TIME_S), UTC)
