"""The operator's own limit on requests."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from plimsoll_operator.ratelimit import RateLimit


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
        asyncio.run(limit.turn())
        sent.append(time.now)
    for first, begin in enumerate(sent):
        for last in range(first, len(sent)):
            span = sent[last] - begin
            assert last - first + 1 <= burst + 10.0 * span + 1e-6


def test_whoever_came_first_goes_first() -> None:
    async def scenario() -> list[int]:
        limit, order = RateLimit(200.0, 1), []

        async def ask(number: int) -> None:
            await limit.turn()
            order.append(number)

        await asyncio.gather(*(ask(number) for number in range(6)))
        return order

    assert asyncio.run(scenario()) == list(range(6))
