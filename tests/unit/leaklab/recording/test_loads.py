"""The clients of a recording, against a small HTTP server: how each of their requests is counted.

Tests ``leaklab/recording/loads.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter

import pytest

from leaklab.recording import loads
from leaklab.recording.loads import Crowd, Phase

A_SECOND, SECONDS = 50.0, 1.5


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait for their answer, however busy this machine is."""
    monkeypatch.setattr(loads, "PATIENCE_S", 30.0)
    monkeypatch.setattr(loads, "EARLY_S", 30.0)


async def served(shape: str, answers: list[str | None]) -> tuple[Counter[str], str]:
    """What clients of ``shape`` count; None in ``answers`` is a request that is never answered."""
    turns = itertools.cycle(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split()[0])
        await reader.readexactly(size)
        status = next(turns)
        if status is None:
            await reader.read()
        else:
            answer = f"HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}"
            writer.write(answer.encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    host, port = server.sockets[0].getsockname()
    async with server:
        return await counted(f"http://{host}:{port}", shape)


async def counted(url: str, shape: str) -> tuple[Counter[str], str]:
    crowd = Crowd(url, (Phase(60.0, A_SECOND, shape),))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(crowd.run(), SECONDS)
    return crowd.counts, crowd.last_error


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("shape", loads.SHAPES)
def test_a_request_that_is_refused_has_failed(shape: str) -> None:
    counts, error = asyncio.run(served(shape, ["400 Bad Request"]))
    assert set(counts) == {"failed"}
    assert error.startswith("HTTPStatusError: Client error '400 Bad Request'")


@pytest.mark.parametrize("shape", ["leaving", "leaving_early"])
def test_every_other_client_leaves_where_no_answer_comes(shape: str) -> None:
    counts, _ = asyncio.run(served(shape, [None]))
    assert set(counts) == {"left"}


@pytest.mark.usefixtures("patient")
def test_a_client_that_is_answered_before_it_leaves_is_counted_as_answered() -> None:
    counts, _ = asyncio.run(served("leaving", ["200 OK"]))
    assert set(counts) == {"answered"}


def test_a_stream_that_does_not_end_as_it_should_has_failed() -> None:
    counts, error = asyncio.run(served("streaming", ["200 OK"]))
    assert counts["failed"] > counts["answered"] > 0
    assert error == "BrokenStream: finish_reason is None, not length "


def test_an_engine_that_is_gone_fails_its_clients() -> None:
    async def run() -> tuple[Counter[str], str]:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1")
        host, port = server.sockets[0].getsockname()
        server.close()
        await server.wait_closed()
        return await counted(f"http://{host}:{port}", "answers")

    counts, error = asyncio.run(run())
    assert set(counts) == {"failed"}
    assert error.startswith("ConnectError")
