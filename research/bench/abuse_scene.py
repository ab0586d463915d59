"""What an abuser knows of a replica, how it asks, and whether a refusal says what was wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
ANSWER_S = 90.0
"""Longest wait for an answer to an abuse: longer than any that was seen."""
PIECE = 1 << 16
INSIDE = re.compile(rb"0x[0-9a-f]{6,}|Traceback| object at |File \"/")


@dataclass(frozen=True)
class Scene:
    """One replica. ``scale`` is the share of the whole abuse that is played, for short runs."""

    port: int
    admin_port: int
    metrics_port: int
    probe_port: int
    model: str
    key: str
    admin_token: str
    scale: float = 1.0

    def many(self, whole: int, least: int = 2) -> int:
        return max(least, round(whole * self.scale))

    def hold_s(self, whole: float) -> float:
        """How long something is held."""
        return max(1.0, whole * self.scale)


@dataclass(frozen=True)
class Answer:
    """``status`` is 0 where the connection ended without one."""

    status: int
    body: bytes = b""


@dataclass
class Played:
    """What one class did. ``figures`` are its own, beside those that every class has; ``notes`` say
    what is behind them."""

    attempts: int = 0
    unclear: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def saw(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            self.attempts += 1
            if (why := unclear(answer)) is not None:
                self.unclear.append(why)


Class = Callable[[Scene], Coroutine[Any, Any, Played]]


def unclear(answer: Answer) -> str | None:
    """Why an answer does not tell a client what to do; None where it does."""
    if 200 <= answer.status < 400:
        return None
    shown = f"{answer.status} {answer.body[:300]!r}"
    if answer.status == 0:
        return "the connection ended without an answer"
    if INSIDE.search(answer.body):
        return f"shows the inside: {shown}"
    try:
        error = json.loads(answer.body)
        error = error.get("error", error)  # the admin API has no envelope
        message, code = str(error["message"]), str(error["code"])
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"not in the API's shape: {shown}"
    if answer.status == 500 or not message or not code:
        return f"says nothing: {shown}"
    named = error.get("param") or "body" in message or re.search(r"\d|--[a-z]", message)
    if answer.status in (400, 413, 422) and not named:
        return f"names no field and no limit: {shown}"
    return None


def request(
    scene: Scene, path: str, content: bytes = b"", method: str = "POST", length: int | None = None
) -> bytes:
    """Head and body. ``length`` is what the head says where that is not the body's own."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {scene.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: "
        f"{len(content) if length is None else length}\r\n\r\n"
    )
    return head.encode() + content


async def ask(scene: Scene, path: str, content: bytes | dict[str, Any]) -> Answer:
    """One request on a connection of its own."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return await exchange(scene.port, request(scene, path, body))


async def exchange(port: int, sent: bytes, timeout_s: float = ANSWER_S) -> Answer:
    """The first answer to ``sent``; reads while it writes, for a refusal may come early."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(HOST, port)
            writing = asyncio.create_task(_write(writer, sent))
            try:
                return await read(reader)
            finally:
                writing.cancel()
                writer.close()
    except (OSError, TimeoutError):
        return Answer(0)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    try:
        for start in range(0, len(data), PIECE):
            writer.write(data[start : start + PIECE])
            await writer.drain()
    except OSError:
        return  # the answer says why


async def read(reader: asyncio.StreamReader) -> Answer:
    """One whole answer. A stream is read to its end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(None, 2)[1])
        if b"transfer-encoding: chunked" in head:
            pieces = []
            while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
                pieces.append(await reader.readexactly(size))
                await reader.readexactly(2)
            return Answer(status, b"".join(pieces))
        found = re.search(rb"content-length: (\d+)", head)
        return Answer(status, await reader.readexactly(int(found.group(1)) if found else 0))
    except (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError):
        return Answer(0)


async def at_once(work: Iterable[Awaitable[Answer]]) -> list[Answer]:
    return list(await asyncio.gather(*work))
