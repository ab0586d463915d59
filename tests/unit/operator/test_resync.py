"""A list of everything waits for watches that begin anew together, and not for ever.

Tests ``runtime/resync.py``.
"""

from __future__ import annotations

import asyncio

import pytest

from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_operator.runtime import resync


@pytest.mark.parametrize(("beginnings", "waits"), [(0, 1), (4, 5), (10**9, resync.MAX_LIST_DELAYS)])
def test_it_waits_until_no_watch_begins_any_more(
    monkeypatch: pytest.MonkeyPatch, beginnings: int, waits: int
) -> None:
    listing, waited = asyncio.Event(), 0

    async def sleep(seconds: float) -> None:
        nonlocal waited
        assert seconds == DEFAULT_INTERVALS.quiet
        waited += 1
        if waited <= beginnings:
            listing.set()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    listing.set()
    asyncio.run(resync.wait_until_quiet(listing, DEFAULT_INTERVALS.quiet))
    assert waited == waits
    assert not listing.is_set()
