"""Bytes of a stream socket back into message bodies."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll_engine.ipc import LENGTH, MAX_MESSAGE_BYTES


class FrameReader:
    """Collects what arrives until a body is whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that ``data`` completes; ValueError for a length no sender of ours writes."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes; the most is {MAX_MESSAGE_BYTES}")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield body
