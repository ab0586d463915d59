"""Clients that stream completions over HTTP and record when each chunk arrives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import httpx

from plimsoll_cli.errors import RunError
from plimsoll_cli.local.view import Traffic

PROMPTS = tuple(
    f"Tell me about {subject} in the {place}."
    for subject, place in (
        ("the water line", "harbour"),
        ("the cargo", "north"),
        ("the master", "morning"),
        ("the owners", "south"),
        ("the memory", "night"),
        ("the requests", "east"),
        ("the weights", "winter"),
        ("the cache", "west"),
        ("the sailors", "summer"),
        ("the insurers", "fresh water"),
        ("the buffers", "salt water"),
        ("the mark", "hull"),
    )
)
MAX_TOKENS = 128
"""A request takes at least a second, so a restart interrupts most streams."""
READ_TIMEOUT_S = 60.0
"""Maximum silence of a stream: longer than any restart, so that a hang counts as a break."""
PAUSE_AFTER_ERROR_S = 0.5


class ReplyState(StrEnum):
    """State of a reply. ``failed``: no stream began. ``broken``: it did not end properly."""

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"
    BROKEN = "broken"


@dataclass
class Reply:
    """One request. Times are Unix seconds; ``chunks`` are the arrival times of its pieces."""

    stream: int
    prompt: int
    sent_at: float
    text: str = ""
    chunks: list[float] = field(default_factory=list)
    end: ReplyState = ReplyState.RUNNING
    error: str | None = None

    @property
    def ended_at(self) -> float:
        """Time of the last chunk, or of sending, in Unix seconds."""
        return self.chunks[-1] if self.chunks else self.sent_at


class StreamingClients:
    """Group of ``count`` streams that send one prompt after the other until :meth:`finish`."""

    def __init__(self, url: str, model: str, count: int, references: Sequence[str]) -> None:
        self.replies: list[Reply] = []
        self._url, self._model, self._count = url, model, count
        self._references = references
        self._finishing = False

    async def run(self) -> None:
        """Run until :meth:`finish` was called and all requests have ended."""
        async with _client(self._url, self._count) as client, asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._stream(client, number))

    def finish(self) -> None:
        """Let each stream end after its current reply."""
        self._finishing = True

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        turn = number
        while not self._finishing:
            index = turn % len(PROMPTS)
            reply = Reply(number, index, now())
            self.replies.append(reply)
            await ask(client, self._model, reply)
            if reply.end is not ReplyState.COMPLETE:
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)
            turn += 1

    def count_different(self) -> int:
        """Return the number of complete replies that differ from the reference."""
        return sum(
            reply.end is ReplyState.COMPLETE and reply.text != self._references[reply.prompt]
            for reply in self.replies
        )

    def traffic(self) -> Traffic:
        """Return the totals for the live view."""
        ends = [reply.end for reply in self.replies]
        gaps = [gap for reply in self.replies for gap in (longest_gap(reply),) if gap is not None]
        return Traffic(
            streams=self._count,
            answered=ends.count(ReplyState.COMPLETE),
            broken=ends.count(ReplyState.BROKEN),
            failed=ends.count(ReplyState.FAILED),
            different=self.count_different(),
            longest_gap_s=max(gaps, default=None),
        )


def longest_gap(reply: Reply) -> float | None:
    """Return the longest time between two chunks in seconds, or None."""
    pairs = zip(reply.chunks, reply.chunks[1:], strict=False)
    return max((after - before for before, after in pairs), default=None)


async def references(url: str, model: str) -> list[str]:
    """Return the reference text of each prompt. Raises RunError if a request fails."""
    replies = [Reply(0, index, now()) for index in range(len(PROMPTS))]
    async with _client(url, len(PROMPTS)) as client, asyncio.TaskGroup() as group:
        for reply in replies:
            group.create_task(ask(client, model, reply))
    for reply in replies:
        if reply.end is not ReplyState.COMPLETE:
            raise RunError(f"the clean run: {PROMPTS[reply.prompt]!r} {reply.end}: {reply.error}")
    return [reply.text for reply in replies]


async def ask(client: httpx.AsyncClient, model: str, reply: Reply) -> None:
    """Send the prompt of ``reply`` and record the answer or the error in it."""
    began = False
    try:
        wish = body(model, PROMPTS[reply.prompt])
        async with client.stream("POST", "/v1/completions", json=wish) as answer:
            if answer.status_code != httpx.codes.OK:
                detail = (await answer.aread()).decode(errors="replace")
                reply.error = f"HTTP {answer.status_code}: {detail[:300]}"
            else:
                began = True
                reply.error = await _read(answer, reply)
    except (httpx.HTTPError, ValueError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    failure = ReplyState.BROKEN if began else ReplyState.FAILED
    reply.end = ReplyState.COMPLETE if reply.error is None else failure


async def _read(answer: httpx.Response, reply: Reply) -> str | None:
    """Read the events of a stream; say what is wrong with it, None if it ends as it should.

    Raises ValueError for an event that is not JSON.
    """
    finish = None
    async for line in answer.aiter_lines():
        data = line.removeprefix("data: ")
        if data == line:
            continue
        if data == "[DONE]":
            return None if finish == "length" else f"finish_reason is {finish}, not length"
        event = json.loads(data)
        if "error" in event:
            return json.dumps(event["error"])[:300]
        for choice in event.get("choices", ()):
            finish = choice.get("finish_reason") or finish
            if choice.get("text"):
                reply.text += choice["text"]
                reply.chunks.append(now())
    return "the stream ended without [DONE]"


_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Return Unix time from a monotonic clock."""
    return _EPOCH + time.monotonic()


def _client(url: str, connections: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=10.0),
        limits=httpx.Limits(max_connections=connections + 1),
        trust_env=False,
    )


def body(model: str, prompt: str) -> dict[str, object]:
    """Return the request: greedy, of fixed length, streamed."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
