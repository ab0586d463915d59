"""Frame messages on a stream socket: a 4-byte big-endian length, then the body.

The frontend reads frames with asyncio. The worker's processes read them from a non-blocking socket.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 256 << 20


def frame_bytes(body: bytes) -> bytes:
    """Return ``body`` preceded by its length."""
    return LENGTH.pack(len(body)) + body


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """Return the body of the next message; None at the end of the stream.

    Raises ValueError if the body exceeds :data:`MAX_MESSAGE_BYTES`.
    """
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"the message has {length} bytes; the maximum is {MAX_MESSAGE_BYTES}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class FrameReader:
    """Buffer that splits received bytes into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes and yield the bodies that became complete.

        Raises ValueError if a body exceeds :data:`MAX_MESSAGE_BYTES`.
        """
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(
                    f"the message has {length} bytes; the maximum is {MAX_MESSAGE_BYTES}"
                )
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield body
