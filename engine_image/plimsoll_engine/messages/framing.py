"""Framing of messages on a stream socket: a 4-byte big-endian length, then the body."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

LENGTH_PREFIX = struct.Struct(">I")
MAX_MESSAGE_BYTES = 256 << 20


def add_length_prefix(body: bytes) -> bytes:
    """Return the frame of a message: its length, then ``body``."""
    return LENGTH_PREFIX.pack(len(body)) + body


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """Return the body of the next message; None at the end of the stream.

    Raises ValueError if the body exceeds :data:`MAX_MESSAGE_BYTES`.
    """
    try:
        (length,) = LENGTH_PREFIX.unpack(await reader.readexactly(LENGTH_PREFIX.size))
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {length} bytes exceeds the maximum of {MAX_MESSAGE_BYTES} bytes"
            )
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class FrameReader:
    """Buffer that splits received bytes into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Buffer received bytes and yield each complete message body.

        Raises ValueError if a body exceeds :data:`MAX_MESSAGE_BYTES`.
        """
        self._buffer += data
        while len(self._buffer) >= LENGTH_PREFIX.size:
            (length,) = LENGTH_PREFIX.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(
                    f"a message of {length} bytes exceeds the maximum of {MAX_MESSAGE_BYTES} bytes"
                )
            end = LENGTH_PREFIX.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH_PREFIX.size : end])
            del self._buffer[:end]
            yield body
