"""One length-prefixed message from an asyncio stream."""

from __future__ import annotations

import asyncio

from plimsoll_engine.ipc import LENGTH, MAX_MESSAGE_BYTES


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """The next message's body; None at the end of the stream. ValueError for an absurd length."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes; the most is {MAX_MESSAGE_BYTES}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
