"""Clients of one engine of the leak lab: a steady stream of requests, of one shape a case.

Two long streams are always under way beside them, so that a restart meets streams in the middle.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
from PIL import Image

MODEL = "tiny"
WORDS = ("water", "line", "cargo", "hull", "harbour", "north", "winter", "sailor", "mark", "owner")
LONG_TOKENS = 150
TIMEOUT_S = 60.0
AFTER_ERROR_S = 0.5
PATIENCE_S = 0.15
"""What a client waits that leaves before its first token."""
ALBUM = 8
"""Images of a chat."""


@dataclass
class ClientCounts:
    """What the clients saw. ``left`` are requests that their client gave up, as it meant to;
    ``failed`` were not answered, ``broken`` are streams that began and did not end as they should.
    """

    requests: int = 0
    left: int = 0
    failed: int = 0
    streams: int = 0
    broken: int = 0
    errors: str = ""


class Clients:
    """``per_s`` requests a second of one of :data:`SHAPES`, and ``long_streams`` without end.

    With a ``busy_s`` all clients leave at once after each so many seconds, whatever they wait for,
    and others come ``rest_s`` later."""

    def __init__(
        self,
        url: str,
        shape: str,
        per_s: float,
        long_streams: int = 2,
        busy_s: float | None = None,
        rest_s: float = 0.0,
    ) -> None:
        self.counts = ClientCounts()
        self._url, self._per_s, self._long_streams = url, per_s, long_streams
        self._busy_s, self._rest_s = busy_s, rest_s
        self._request = SHAPES[shape]
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._busy_s):
                    await self._come()
            await asyncio.sleep(self._rest_s)

    async def _come(self) -> None:
        async with (
            httpx.AsyncClient(
                base_url=self._url,
                timeout=TIMEOUT_S,
                trust_env=False,
                limits=httpx.Limits(max_connections=None),
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._long_streams):
                group.create_task(self._streams(client))
            due = time.monotonic()
            while True:
                group.create_task(self._one(client))
                due = max(due + 1 / self._per_s, time.monotonic() - 1.0)
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _one(self, client: httpx.AsyncClient) -> None:
        try:
            finished = await self._request(client, next(self._numbers))
        except asyncio.CancelledError:
            self.counts.requests += 1
            self.counts.left += 1
            raise
        except httpx.HTTPError as error:
            self.counts.failed += 1
            self.counts.errors = f"{type(error).__name__}: {error}"
        else:
            self.counts.requests += 1
            self.counts.left += not finished

    async def _streams(self, client: httpx.AsyncClient) -> None:
        while True:
            try:
                await stream(client, prompt(next(self._numbers), 8), LONG_TOKENS)
                self.counts.streams += 1
            except (httpx.HTTPError, BrokenStream) as error:
                broken = isinstance(error, BrokenStream)
                self.counts.broken += broken
                self.counts.failed += not broken
                self.counts.errors = f"{type(error).__name__}: {error}"
                await asyncio.sleep(AFTER_ERROR_S)


class BrokenStream(Exception):
    """A stream that began and did not end as it should."""


async def stream(client: httpx.AsyncClient, text: str, tokens: int) -> None:
    """A whole stream; HTTPError where none began, BrokenStream where it did not end well."""
    finish = None
    wish = body(text, tokens, stream=True)
    async with client.stream("POST", "/v1/completions", json=wish) as answer:
        answer.raise_for_status()
        try:
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data in (line, "[DONE]"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise BrokenStream(str(event["error"])[:300])
                for choice in event.get("choices", ()):
                    finish = choice.get("finish_reason") or finish
        except (httpx.HTTPError, ValueError) as error:
            raise BrokenStream(f"{type(error).__name__}: {error}") from error
    if finish != "length":
        raise BrokenStream(f"finish_reason is {finish}, not length")


def prompt(number: int, words: int) -> str:
    """A text that no other number has."""
    return f"{number} " + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(words))


def body(text: str, tokens: int, **fields: object) -> dict[str, object]:
    wish: dict[str, object] = {"model": MODEL, "prompt": text, "max_tokens": tokens}
    return {**wish, "temperature": 0, "ignore_eos": True, **fields}


async def complete(client: httpx.AsyncClient, wish: dict[str, object]) -> bool:
    """Send a completion and wait for its end; HTTPStatusError where it is refused."""
    answer = await client.post("/v1/completions", json=wish)
    answer.raise_for_status()
    return True


# ---- shapes: true where the request ran to its end


async def short(client: httpx.AsyncClient, number: int) -> bool:
    return await complete(client, body(prompt(number, 12), 3))


async def wordy(client: httpx.AsyncClient, number: int) -> bool:
    """Long prompts: what grows by the prompt shows."""
    return await complete(client, body(prompt(number, 160), 2))


async def leaving(client: httpx.AsyncClient, number: int) -> bool:
    """The client leaves before the first token, where there are others before it."""
    try:
        answer = await client.post(
            "/v1/completions", json=body(prompt(number, 12), 30), timeout=PATIENCE_S
        )
    except httpx.TimeoutException:
        return False
    answer.raise_for_status()
    return True


async def choices(client: httpx.AsyncClient, number: int) -> bool:
    """Two choices of one prompt, given up after the first piece."""
    wish = body(prompt(number, 12), 600, n=2, stream=True)
    async with client.stream("POST", "/v1/completions", json=wish) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                return False
    return True


async def returning(client: httpx.AsyncClient, number: int) -> bool:
    """One of a dozen long prompts, each of them again and again."""
    return await complete(client, body(prompt(number % 12, 160), 2))


async def albums(client: httpx.AsyncClient, number: int) -> bool:
    answer = await client.post("/v1/chat/completions", json=_album(number, 2))
    answer.raise_for_status()
    return True


async def albums_left(client: httpx.AsyncClient, number: int) -> bool:
    """Every other client of an album leaves at once, in the middle of its prompt."""
    wish = _album(number, 8)
    try:
        timeout = PATIENCE_S if number % 2 else TIMEOUT_S
        answer = await client.post("/v1/chat/completions", json=wish, timeout=timeout)
    except httpx.TimeoutException:
        if number % 2:
            return False
        raise
    answer.raise_for_status()
    return True


def _album(number: int, tokens: int) -> dict[str, object]:
    """A chat of images that no other number has."""
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": _image(number * ALBUM + i)}}
        for i in range(ALBUM)
    ]
    content = [*parts, {"type": "text", "text": "What?"}]
    wish = body("", tokens, messages=[{"role": "user", "content": content}])
    del wish["prompt"]
    return wish


def _image(number: int) -> str:
    file = io.BytesIO()
    colour = (number % 251, number // 251 % 251, number * 7 % 251)
    Image.new("RGB", (56, 56), colour).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


Shape = Callable[[httpx.AsyncClient, int], Awaitable[bool]]
SHAPES: dict[str, Shape] = {
    one.__name__: one for one in (short, wordy, returning, leaving, choices, albums, albums_left)
}
