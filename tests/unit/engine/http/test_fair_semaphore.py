"""Clients that wait for the same thing have it in turn."""

from __future__ import annotations

import asyncio
import contextlib

from plimsoll_engine.http.fair_semaphore import FairSemaphore


async def _served(
    order: list[str], semaphore: FairSemaphore, client: str, done: asyncio.Event
) -> None:
    async with semaphore.hold_slot(client):
        order.append(client)
        await done.wait()


def test_who_asks_often_waits_behind_who_asks_once() -> None:
    async def scenario() -> list[str]:
        semaphore, order, done = FairSemaphore(1), list[str](), asyncio.Event()
        async with semaphore.hold_slot("first"):
            tasks = [
                asyncio.create_task(_served(order, semaphore, client, done))
                for client in ["greedy"] * 4 + ["modest"]
            ]
            await asyncio.sleep(0)
            done.set()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(scenario()) == ["greedy", "modest", "greedy", "greedy", "greedy"]


def test_who_gives_up_does_not_keep_the_place() -> None:
    async def scenario() -> list[str]:
        semaphore, order, done = FairSemaphore(1), list[str](), asyncio.Event()
        done.set()
        async with semaphore.hold_slot("first"):
            tasks = [
                asyncio.create_task(_served(order, semaphore, client, done))
                for client in ("a", "b")
            ]
            await asyncio.sleep(0)
            tasks[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]
        await tasks[1]
        async with semaphore.hold_slot("later"):
            return order

    assert asyncio.run(scenario()) == ["b"]


def test_a_place_that_comes_with_the_cancellation_goes_on() -> None:
    async def scenario() -> None:
        semaphore, done = FairSemaphore(1), asyncio.Event()
        holder = semaphore.hold_slot("first")
        await holder.__aenter__()
        late = asyncio.create_task(_served([], semaphore, "late", done))
        await asyncio.sleep(0)
        await holder.__aexit__(None, None, None)  # the place is its own now
        late.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await late
        async with asyncio.timeout(5), semaphore.hold_slot("later"):
            pass

    asyncio.run(scenario())
