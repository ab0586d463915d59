"""Many streams over many restarts: not one is broken, loses a token or repeats one.

A third of the streams is greedy, a third draws with a seed, a third ends at a stop string. Each is
compared with itself undisturbed, in float32, where the tiny checkpoint's best token is far ahead.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import openai
import psutil
import pytest


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


class Clients:
    """``streams`` clients, each of which streams again and again until it is told to stop.

    So streams are under way at every restart, however slow the machine is. Lengths differ, or all
    streams would end in one step.
    """

    def __init__(self, url: str, tokens: int, stops: list[str | None]) -> None:
        self._openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600
        )
        self._tokens = tokens
        self._stops = stops
        self.enough = False

    def length(self, number: int) -> int:
        return self._tokens - 4 * number

    async def once(self, number: int) -> Seen:
        return await stream(self._openai, number, self.length(number), self._stops[number])

    async def again_and_again(self, number: int) -> list[Seen]:
        seen = [await self.once(number)]
        while not self.enough:
            seen.append(await self.once(number))
        return seen

    async def close(self) -> None:
        await self._openai.close()


async def undisturbed(url: str, tokens: int, streams: int) -> list[Seen]:
    clients = Clients(url, tokens, [None] * streams)
    seen = await asyncio.gather(*(clients.once(number) for number in range(streams)))
    await clients.close()
    return seen


async def progress(engine: Any, streams: int) -> None:
    """Returns once every client has a stream and the engine has made three tokens for each."""
    before = None
    while True:
        load = (await asyncio.to_thread(engine.status))["load"]
        if load["inflight"] == streams:
            made = load["generation_tokens_total"]
            before = made if before is None or made < before else before
            if made >= before + 3 * streams:
                return
        await asyncio.sleep(0.05)


async def restarted(
    engine: Any, tokens: int, stops: list[str | None], restarts: int
) -> tuple[list[list[Seen]], list[int]]:
    """What every client saw, and how many streams each restart carried over."""
    clients = Clients(engine.url, tokens, stops)
    tasks = [asyncio.create_task(clients.again_and_again(n)) for n in range(len(stops))]
    carried = []
    for number in range(restarts):
        async with asyncio.timeout(120):
            await progress(engine, len(stops))
        name = f"carry-{len(stops)}-{number}"
        await asyncio.to_thread(engine.begin, "restart", name)
        operation = await asyncio.to_thread(engine.finish, name, 120)
        assert operation["state"] == "succeeded", operation
        # With their keys and values, so that nothing is computed twice.
        assert operation["kv_handover"] == "handed_over", operation
        assert operation["carried_prefill_tokens"] == 0, operation
        carried.append(operation["carried_requests"])
    clients.enough = True
    seen = await asyncio.gather(*tasks)
    await clients.close()
    return seen, carried


def held(engine: Any) -> dict[str, int]:
    """Bytes of the weight server, and of each owner that holds as much at every idle moment."""
    engine.until(lambda: engine.status()["load"].get("kv_usage_ratio") == 0, "an idle report")
    status = engine.status()
    owners = ("weights", "kv_pool", "requests", "grammar_cache")
    found = {e["owner"]: e["bytes"] for e in status["ledger"] if e["owner"] in owners}
    (server,) = [p for p in status["processes"] if p["role"] == "weight_server"]
    memory = psutil.Process(server["pid"]).memory_info()
    return found | {"shared": memory.shared, "kv_usage": status["load"]["kv_usage_ratio"]}


def compare(engine: Any, streams: int, tokens: int, restarts: int) -> None:
    whole = asyncio.run(undisturbed(engine.url, tokens, streams))
    engine.clean()
    before = held(engine)
    # A stop string from three quarters of the way, longer than a token: the cut is the client's.
    stops = [
        one.text[3 * len(one.text) // 4 :][:9] if number % 3 == 2 else None
        for number, one in enumerate(whole)
    ]
    found, carried = asyncio.run(restarted(engine, tokens, stops, restarts))
    for number, (seen, other, stop) in enumerate(zip(found, whole, stops, strict=True)):
        for one in seen:
            if stop is None:
                assert one == other, f"stream {number}"
                assert one.completion_tokens == tokens - 4 * number
            else:
                assert one.text == other.text[: other.text.find(stop)], f"stream {number}"
                assert one.finish_reason == "stop"
                assert one.completion_tokens is not None
                assert 0 < one.completion_tokens < tokens
            assert one.prompt_tokens == other.prompt_tokens
    assert min(carried) >= streams // 2, carried
    engine.clean()
    assert held(engine) == before
    status = engine.status()
    assert status["worker_starts"] == restarts + 1
    assert status["load"]["inflight"] == 0


def test_streams_over_three_restarts(start_engine: Any) -> None:
    compare(start_engine().wait_ready(), streams=12, tokens=250, restarts=3)


@pytest.mark.long
def test_64_streams_over_twenty_restarts(start_engine: Any) -> None:
    engine = start_engine("--max-num-seqs", "64").wait_ready()
    compare(engine, streams=64, tokens=900, restarts=20)
