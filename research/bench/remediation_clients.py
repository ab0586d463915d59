"""Clients of several replicas, balanced over those that are ready: short requests and streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from plimsoll_cli.demo.streams import PROMPTS, Reply, ReplyState, get_unix_time, send_prompt

READY_S = 0.5
ANSWER_S = 60.0
"""Longest wait for an answer: longer than any restart, so that a hang is seen as a failure."""
IDLE_S = 2.0
"""A connection that rested longer is not used again: the server may be closing it."""
AFTER_ERROR_S = 0.5
WORDS = ("water", "line", "cargo", "hull", "harbour", "north", "winter", "sailor")


@dataclass
class Target:
    """One replica as its clients know it."""

    url: str
    model: str
    ready: bool = False
    in_flight: int = 0
    answered: int = 0
    replies: list[Reply] = field(default_factory=list)


class Balancer:
    """``failures`` counts what went wrong by its words."""

    def __init__(self, targets: list[Target], texts: list[str], seed: int = 1) -> None:
        self.targets = targets
        self.failures: Counter[str] = Counter()
        self.waits: list[float] = []
        self.unready = 0
        self._texts = texts
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._ending = False

    @property
    def answered(self) -> int:
        """Whole answers to short requests."""
        return sum(target.answered for target in self.targets)

    @property
    def replies(self) -> list[Reply]:
        return [reply for target in self.targets for reply in target.replies]

    def different(self) -> int:
        """Complete streams with another text than in an undisturbed run."""
        return sum(
            r.state is ReplyState.COMPLETE and r.text != self._texts[r.prompt] for r in self.replies
        )

    def finish(self) -> None:
        """No new request; :meth:`run` ends with the last answer."""
        self._ending = True

    async def run(self, short: int, streams: int) -> None:
        """``short`` requests and ``streams`` streams at a time until :meth:`finish`."""
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(short):
                    group.create_task(self._short())
                for number in range(streams):
                    group.create_task(self._stream(number))
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while True:
                for target in self.targets:
                    target.ready = await _is_ready(client, target.url)
                    self.unready += not target.ready
                await asyncio.sleep(READY_S)

    async def _pick(self) -> Target:
        """The ready replica with the fewest requests of ours; waits while none is ready."""
        while True:
            ready = [target for target in self.targets if target.ready]
            if ready:
                break
            await asyncio.sleep(READY_S / 4)
        return min(ready, key=lambda target: (target.in_flight, self._rng.random()))

    async def _short(self) -> None:
        connections: dict[str, Connection] = {}
        while not self._ending:
            target = await self._pick()
            connection = connections.setdefault(target.url, Connection(target.url))
            number = next(self._numbers)
            tokens = 1 + number % 4
            target.in_flight += 1
            begin = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_S):
                    trouble = _wrong(*await connection.post(_body(target, number, tokens)), tokens)
            except (OSError, EOFError, TimeoutError, IndexError, ValueError) as error:
                connection.close()
                trouble = f"{type(error).__name__}: {error}"
            finally:
                target.in_flight -= 1
            if trouble is None:
                target.answered += 1
                self.waits.append(time.monotonic() - begin)
            else:
                self.failures[trouble] += 1
                await asyncio.sleep(AFTER_ERROR_S)
        for connection in connections.values():
            connection.close()

    async def _stream(self, number: int) -> None:
        limits = httpx.Timeout(ANSWER_S)
        async with contextlib.AsyncExitStack() as stack:
            clients = {
                target.url: await stack.enter_async_context(
                    httpx.AsyncClient(base_url=target.url, timeout=limits, trust_env=False)
                )
                for target in self.targets
            }
            for turn in itertools.count(number):
                if self._ending:
                    return
                target = await self._pick()
                reply = Reply(number, turn % len(PROMPTS), get_unix_time())
                target.replies.append(reply)
                target.in_flight += 1
                await send_prompt(clients[target.url], target.model, reply)
                target.in_flight -= 1
                if reply.state is not ReplyState.COMPLETE:
                    self.failures[f"stream {reply.state}: {reply.error}"] += 1
                    await asyncio.sleep(AFTER_ERROR_S)


class Connection:
    """One HTTP/1.1 connection that is kept; a client that costs less than the engine it asks.

    Raises OSError, EOFError, IndexError and ValueError where the server does not answer properly.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used = 0.0

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer of ``/v1/completions``."""
        if self._streams is not None and time.monotonic() - self._used > IDLE_S:
            self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        if b"transfer-encoding: chunked" in lines:
            answer = await _chunks(reader)
        else:
            lengths = [line[15:] for line in lines if line.startswith(b"content-length:")]
            answer = await reader.readexactly(int(lengths[0]))
        self._used = time.monotonic()
        if b"connection: close" in lines:
            self.close()
        return int(lines[0].split()[1]), answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body (RFC 9112, section 7.1), without trailers."""
    pieces = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(pieces)


def _body(target: Target, number: int, tokens: int) -> bytes:
    prompt = f"{number} " + " ".join(WORDS[(number * 5 + i * i) % len(WORDS)] for i in range(6))
    wish = {"model": target.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return json.dumps({**wish, "ignore_eos": True}).encode()


def _wrong(status: int, answer: bytes, tokens: int) -> str | None:
    """What is wrong with an answer; None where it is whole."""
    if status != httpx.codes.OK:
        return f"HTTP {status}: {answer[:200].decode(errors='replace')}"
    content = json.loads(answer)
    choice, made = content["choices"][0], content["usage"]["completion_tokens"]
    if choice["finish_reason"] != "length" or made != tokens:
        return f"finish_reason {choice['finish_reason']} after {made} of {tokens} tokens"
    return None


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
