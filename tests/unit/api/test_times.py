"""Times far outside any sensible range: each is unknown, or the nearest that can be written."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import pytest

from plimsoll_api import trace
from plimsoll_api.times import UNKNOWN_CLOCK_TIME, format_clock_time, format_rfc3339, parse_rfc3339

YEAR_2273 = 9_561_801_600.0
"""Beyond 2106, where 32 bits of seconds end, and 2262, where 63 bits of nanoseconds do."""


def test_a_late_year_is_read_written_and_shown() -> None:
    assert parse_rfc3339("2273-01-01T00:00:00Z") == YEAR_2273
    assert format_rfc3339(YEAR_2273) == "2273-01-01T00:00:00Z"
    assert format_clock_time(YEAR_2273) != UNKNOWN_CLOCK_TIME


@pytest.mark.parametrize("at", [None, 1e18, -1e18, 1e300, float("inf"), float("nan")])
def test_what_no_clock_shows_is_no_time_of_day(at: float | None) -> None:
    assert format_clock_time(at) == UNKNOWN_CLOCK_TIME


def test_a_trace_is_written_by_a_clock_of_a_late_year(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of gzip has 32 bits for the time of writing."""
    monkeypatch.setattr(time, "time", lambda: YEAR_2273)
    with trace.open_for_writing(tmp_path / "t.jsonl.gz") as out:
        out.write(b"x")
    assert gzip.decompress((tmp_path / "t.jsonl.gz").read_bytes()) == b"x"
