"""A part that fails starts again, and ends the operator only if nothing works without it.

Tests ``runtime/background.py``.
"""

from __future__ import annotations

import asyncio
import os
from typing import cast

import pytest

from plimsoll_operator import main
from plimsoll_operator.kinds import SERVICE
from plimsoll_operator.runtime.background import (
    MAX_FAILURES,
    MAX_RETRY_DELAY_S,
    MIN_RUN_FOR_FAILURE_RESET_S,
    BackgroundTasks,
)
from plimsoll_operator.runtime.client import Api
from plimsoll_operator.runtime.election import Election, LeadershipLostError
from plimsoll_operator.runtime.queue import RateLimit
from tests import virtual_time


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def background(clock: Clock) -> BackgroundTasks:
    return BackgroundTasks(clock.sleep, lambda: clock.now)


def test_a_needed_part_is_tried_again_with_back_off_before_it_ends_the_operator() -> None:
    clock = Clock()

    async def part() -> None:
        raise OverflowError("cannot convert float infinity to integer")

    made = background(clock)
    with pytest.raises(OverflowError):
        asyncio.run(made.run_forever("resync", part))
    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert made.failures == {"resync": MAX_FAILURES}


def test_a_part_that_works_has_failed_zero_times() -> None:
    """Without a series at zero, Prometheus would not count its first failure."""
    made = background(Clock())

    async def part() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        running = asyncio.create_task(made.run_forever("scrape", part))
        await asyncio.sleep(0)
        running.cancel()

    asyncio.run(run())
    assert dict(made.failures) == {"scrape": 0}


def test_a_part_that_is_not_needed_never_ends_the_operator() -> None:
    clock, runs = Clock(), 0

    async def part() -> None:
        nonlocal runs
        runs += 1
        if runs > 50:
            raise asyncio.CancelledError
        raise ValueError("a pod's page")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(background(clock).run_forever("scrape", part, is_required=False))
    assert clock.slept[-1] == MAX_RETRY_DELAY_S


def test_a_part_that_had_recovered_is_counted_from_zero() -> None:
    clock, runs = Clock(), 0

    async def part() -> None:
        nonlocal runs
        runs += 1
        clock.now += MIN_RUN_FOR_FAILURE_RESET_S
        if runs > 3 * MAX_FAILURES:
            raise asyncio.CancelledError
        raise ValueError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(background(clock).run_forever("canary", part))
    assert set(clock.slept) == {1.0}


def test_a_part_that_ends_by_itself_has_failed() -> None:
    clock = Clock()

    async def part() -> None:
        return None

    with pytest.raises(RuntimeError, match="ended unexpectedly"):
        asyncio.run(background(clock).run_forever("resync", part))


@pytest.mark.parametrize("answer", [b"<html>a proxy</html>", b"", b"\xff\xfe"])
def test_an_answer_that_is_no_json_is_one_that_the_server_did_not_give(answer: bytes) -> None:
    async def send(*_: object) -> tuple[int, bytes, float]:
        return 200, answer, 1.0

    api = Api(None, 1.0, RateLimit(10.0, 10))
    api._send = send  # type: ignore[assignment,method-assign]
    with pytest.raises(OSError, match="is not JSON"):
        asyncio.run(api.probe(SERVICE, None))


def test_a_standby_whose_canary_ends_does_not_end_well() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def dead() -> None:
        raise ValueError("a canary")

    async def run() -> bool:
        return await main._run_before_stop(asyncio.Event(), never(), dead())

    with pytest.raises(ValueError, match="a canary"):
        asyncio.run(run())


def test_a_process_that_lost_its_lease_ends_although_something_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    class Lost:
        async def keep_renewing(self) -> None:
            raise LeadershipLostError("not renewed for 10 s")

    async def play() -> None:
        with pytest.raises(LeadershipLostError):
            await main._keep_lease(cast(Election, Lost()))
        await asyncio.sleep(main.EXIT_TIMEOUT_S - 0.1)
        assert ended == []
        await asyncio.sleep(0.2)
        assert ended == [1]

    virtual_time.run(play())
