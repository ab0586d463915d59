"""The operator's own limit on requests.

Tests ``runtime/queue.py``.
"""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_operator.runtime.queue import RateLimit


class _Time:
    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=80), st.integers(1, 10))
def test_in_any_span_there_are_no_more_than_rate_and_burst(gaps: list[float], burst: int) -> None:
    time, sent = _Time(), []
    limit = RateLimit(10.0, burst, clock=lambda: time.now, sleep=time.sleep)
    for gap in gaps:
        time.now += gap
        asyncio.run(limit.acquire())
        sent.append(time.now)
    for first, begin in enumerate(sent):
        for last in range(first, len(sent)):
            span = sent[last] - begin
            assert last - first + 1 <= burst + 10.0 * span + 1e-6


def test_whoever_comes_first_books_the_first_turn() -> None:
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(round(seconds, 6))

    limit = RateLimit(10.0, 2, clock=lambda: 0.0, sleep=sleep)
    for _ in range(5):
        asyncio.run(limit.acquire())
    assert delays == [0.1, 0.2, 0.3], "two go at once, then one each tenth of a second"
    assert limit.waited_s == sum(delays)
