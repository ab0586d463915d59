"""A message nested deeper than Python's stack ends its connection, as any other that is none.

Tests ``messages/worker_ipc.py``.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from plimsoll_engine.frontend.workers.worker_link import WorkerLink, WorkerSocket
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.framing import add_length_prefix

# An unknown field is skipped, but all of it is read.
DEEP = b"\x82\xa4type\xa5ready\xa1x" + b"\x91" * 100_000


@pytest.mark.parametrize("body", [b"\xc1", DEEP], ids=["no-message", "deep"])
def test_a_worker_that_sends_what_is_no_message_is_lost(tmp_path: Path, body: bytes) -> None:
    async def received() -> list[object]:
        lost = asyncio.Event()
        heard: list[object] = []
        link = WorkerLink(1, 1 << 20, heard.append, lost.set)
        server = WorkerSocket(tmp_path / "s")
        await server.listen()
        server.expect(link)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(worker_ipc.encode_frame(worker_ipc.Hello(1, os.getpid())))
        writer.write(add_length_prefix(body))
        async with asyncio.timeout(10):
            await lost.wait()
            assert await reader.read() == b""
        writer.close()
        await server.close()
        return heard

    assert asyncio.run(received()) == [worker_ipc.Hello(1, os.getpid())]
