"""Clients that stream completions over HTTP and record the arrival time of each chunk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import httpx

from plimsoll_cli.errors import RunError
from plimsoll_cli.local.view import TrafficTotals

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
TOKENS_PER_COMPLETION = 128
"""Number of tokens in each reply, which takes a second or more, so that a restart interrupts it."""
CHUNK_TIMEOUT_S = 60.0
"""Time without a chunk after which a stream counts as broken; longer than any restart."""
PAUSE_AFTER_ERROR_S = 0.5


class ReplyState(StrEnum):
    """State of a reply; ``failed`` is an error before the stream, and ``broken`` an error in it."""

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"
    BROKEN = "broken"


@dataclass
class Reply:
    """Reply to one request; times, such as the arrivals of ``chunks``, are in Unix seconds."""

    stream: int
    prompt: int
    sent_at: float
    text: str = ""
    chunks: list[float] = field(default_factory=list)
    state: ReplyState = ReplyState.RUNNING
    error: str | None = None

    @property
    def ended_at(self) -> float:
        """Time of the last chunk, or of the request if no chunk has arrived."""
        return self.chunks[-1] if self.chunks else self.sent_at


class StreamingClients:
    """Concurrent clients, each of which sends one prompt after another.

    ``references`` are the expected texts of the prompts.
    """

    def __init__(self, url: str, model: str, count: int, references: Sequence[str]) -> None:
        self.replies: list[Reply] = []
        self._url, self._model, self._count = url, model, count
        self._references = references
        self._finishing = False

    async def run(self) -> None:
        """Run until :meth:`finish` is called and all requests have ended."""
        async with _make_client(self._url, self._count) as client, asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._run_stream(client, number))

    def finish(self) -> None:
        """Make each client stop after its current reply."""
        self._finishing = True

    async def _run_stream(self, client: httpx.AsyncClient, stream_number: int) -> None:
        turn = stream_number
        while not self._finishing:
            index = turn % len(PROMPTS)
            reply = Reply(stream_number, index, get_unix_time())
            self.replies.append(reply)
            await send_prompt(client, self._model, reply)
            if reply.state is not ReplyState.COMPLETE:
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)
            turn += 1

    def count_different_replies(self) -> int:
        """Return the number of complete replies whose text differs from the expected text."""
        return sum(
            reply.state is ReplyState.COMPLETE and reply.text != self._references[reply.prompt]
            for reply in self.replies
        )

    def get_traffic_totals(self) -> TrafficTotals:
        """Return the totals that the live view shows."""
        ends = [reply.state for reply in self.replies]
        gaps = [
            gap for reply in self.replies for gap in (find_longest_gap(reply),) if gap is not None
        ]
        return TrafficTotals(
            streams=self._count,
            answered=ends.count(ReplyState.COMPLETE),
            broken=ends.count(ReplyState.BROKEN),
            failed=ends.count(ReplyState.FAILED),
            different=self.count_different_replies(),
            longest_gap_s=max(gaps, default=None),
        )


def find_longest_gap(reply: Reply) -> float | None:
    """Return the longest time between two chunks in seconds; None with fewer than two chunks."""
    pairs = zip(reply.chunks, reply.chunks[1:], strict=False)
    return max((after - before for before, after in pairs), default=None)


async def collect_reference_texts(url: str, model: str) -> list[str]:
    """Return the service's reply to each prompt, as expected texts. Raises RunError.

    The service must run without the leak.
    """
    replies = [Reply(0, index, get_unix_time()) for index in range(len(PROMPTS))]
    async with _make_client(url, len(PROMPTS)) as client, asyncio.TaskGroup() as group:
        for reply in replies:
            group.create_task(send_prompt(client, model, reply))
    for reply in replies:
        if reply.state is not ReplyState.COMPLETE:
            raise RunError(
                f"reference run without the leak: the request {PROMPTS[reply.prompt]!r} ended with"
                f" state {reply.state}: {reply.error}"
            )
    return [reply.text for reply in replies]


async def send_prompt(client: httpx.AsyncClient, model: str, reply: Reply) -> None:
    """Send the prompt of ``reply``, and record the response or the error in ``reply``."""
    began = False
    try:
        wish = make_request_body(model, PROMPTS[reply.prompt])
        async with client.stream("POST", "/v1/completions", json=wish) as answer:
            if answer.status_code != httpx.codes.OK:
                detail = (await answer.aread()).decode(errors="replace")
                reply.error = f"HTTP {answer.status_code}: {detail[:300]}"
            else:
                began = True
                reply.error = await _read_stream(answer, reply)
    except (httpx.HTTPError, ValueError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    failure = ReplyState.BROKEN if began else ReplyState.FAILED
    reply.state = ReplyState.COMPLETE if reply.error is None else failure


# Returns what is wrong with the stream; None if it is complete. Raises ValueError for an event
# that is not JSON.
async def _read_stream(answer: httpx.Response, reply: Reply) -> str | None:
    finish = None
    async for line in answer.aiter_lines():
        data = line.removeprefix("data: ")
        if data == line:
            continue
        if data == "[DONE]":
            return None if finish == "length" else f"finish_reason is {finish}, but must be length"
        event = json.loads(data)
        if "error" in event:
            return json.dumps(event["error"])[:300]
        for choice in event.get("choices", ()):
            finish = choice.get("finish_reason") or finish
            if choice.get("text"):
                reply.text += choice["text"]
                reply.chunks.append(get_unix_time())
    return "the stream ended without [DONE]"


_CLOCK_OFFSET_S = time.time() - time.monotonic()


def get_unix_time() -> float:
    """Return the Unix time, from a clock that never goes back."""
    return _CLOCK_OFFSET_S + time.monotonic()


def _make_client(url: str, connections: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(CHUNK_TIMEOUT_S, connect=10.0),
        limits=httpx.Limits(max_connections=connections + 1),
        trust_env=False,
    )


def make_request_body(model: str, prompt: str) -> dict[str, object]:
    """Return the body of a streaming request with greedy sampling and a fixed length."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS_PER_COMPLETION,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
