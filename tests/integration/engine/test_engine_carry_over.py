"""Many streams over many restarts: not one is broken, loses a token or repeats one.

A third of the streams is greedy, a third draws with a seed, a third ends at a stop string. Each is
compared with itself undisturbed, in float32, where the tiny checkpoint's best token is far ahead.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import openai
import pytest

SETTLE_S = 0.2
"""Between two restarts: some tokens, also on a busy machine."""


@dataclass
class Seen:
    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


async def stream(client: Any, number: int, tokens: int, stop: str | None) -> Seen:
    fields: dict[str, Any] = {"temperature": 0.9, "seed": number} if number % 3 == 1 else {}
    if stop is not None:
        fields["stop"] = [stop]
    seen = Seen()
    chunks = await client.completions.create(
        model="tiny", prompt=f"Ship number {number} sails", max_tokens=tokens, stream=True,
        stream_options={"include_usage": True}, **{"temperature": 0, **fields},
    )  # fmt: skip
    async for chunk in chunks:
        if chunk.usage is not None:
            seen.completion_tokens = chunk.usage.completion_tokens
            seen.prompt_tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            seen.text += choice.text
            seen.finish_reason = choice.finish_reason or seen.finish_reason
    return seen


async def all_streams(
    engine: Any, tokens: int, stops: list[str | None], restarts: int
) -> tuple[list[Seen], list[int]]:
    """What every stream saw, and how many each restart carried over."""
    carried = []
    before = engine.status()["load"]["generation_tokens_total"]
    client = openai.AsyncOpenAI(
        base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=600
    )
    async with client:
        tasks = [
            asyncio.create_task(stream(client, number, tokens, stop))
            for number, stop in enumerate(stops)
        ]
        made = before
        while made < before + 3 * len(stops):  # every stream has text
            await asyncio.sleep(0.05)
            load = (await asyncio.to_thread(engine.status))["load"]
            made = load["generation_tokens_total"] if load["inflight"] == len(stops) else before
        for number in range(restarts):
            name = f"carry-{len(stops)}-{number}"
            await asyncio.to_thread(engine.begin, "restart", name)
            operation = await asyncio.to_thread(engine.finish, name, 60)
            assert operation["state"] == "succeeded", operation
            carried.append(operation["carried_requests"])
            await asyncio.sleep(SETTLE_S)
        return list(await asyncio.gather(*tasks)), carried


def compare(engine: Any, streams: int, tokens: int, restarts: int) -> None:
    free: list[str | None] = [None] * streams
    whole, _ = asyncio.run(all_streams(engine, tokens, free, 0))
    # A stop string from three quarters of the way, longer than a token: the cut is the client's.
    stops = [
        one.text[3 * len(one.text) // 4 :][:9] if number % 3 == 2 else None
        for number, one in enumerate(whole)
    ]
    found, carried = asyncio.run(all_streams(engine, tokens, stops, restarts))
    for number, (one, other, stop) in enumerate(zip(found, whole, stops, strict=True)):
        if stop is None:
            assert one == other, f"stream {number}"
            assert one.completion_tokens == tokens
        else:
            assert one.text == other.text[: other.text.find(stop)], f"stream {number}"
            assert one.finish_reason == "stop"
            assert one.completion_tokens is not None
            assert 0 < one.completion_tokens < tokens
        assert one.prompt_tokens == other.prompt_tokens
    assert min(carried) > 0, carried
    assert carried[0] == streams
    engine.clean()
    status = engine.status()
    assert status["worker_starts"] == restarts + 1
    assert status["load"]["inflight"] == 0


def test_streams_over_three_restarts(start_engine: Any) -> None:
    compare(start_engine().wait_ready(), streams=12, tokens=250, restarts=3)


@pytest.mark.long
def test_64_streams_over_twenty_restarts(start_engine: Any) -> None:
    engine = start_engine("--max-num-seqs", "64").wait_ready()
    compare(engine, streams=64, tokens=900, restarts=20)
