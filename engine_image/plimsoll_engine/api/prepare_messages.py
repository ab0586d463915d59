"""Messages between the frontend and the preparer process, on a Unix stream socket.

A message is an 8-byte big-endian length and a body. The frontend sends a :class:`PreparationJob`
and then the raw request body. The preparer process replies with one :data:`Outcome`.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal

import msgspec

from plimsoll_engine.api.prepare import EngineLimits

LENGTH_PREFIX = struct.Struct(">Q")

JobKind = Literal["completion", "chat", "chats", "responses", "tokenize", "detokenize", "form"]


class PreparationJob(msgspec.Struct, frozen=True):
    """Job of the preparer process. ``content_type`` is set only for forms."""

    kind: JobKind
    context: EngineLimits
    content_type: str = ""


class PreparationRefused(msgspec.Struct, tag=True):
    """Reply: the request is refused, with the fields of an ApiError."""

    status: int
    message: str
    param: str | None
    code: str | None
    retry: bool


class PreparationDone(msgspec.Struct, tag=True):
    """Reply: the job's result, encoded as msgpack."""

    result: msgspec.Raw


Outcome = PreparationRefused | PreparationDone


def send_message(connection: socket.socket, data: bytes | bytearray) -> None:
    """Send the length of ``data``, then ``data``. Raises OSError if the connection is closed."""
    connection.sendall(LENGTH_PREFIX.pack(len(data)))
    connection.sendall(data)


def receive_message(connection: socket.socket) -> bytearray:
    """Return the next message. Raises EOFError if the connection is closed."""
    (length,) = LENGTH_PREFIX.unpack(_read_exactly(connection, LENGTH_PREFIX.size))
    return _read_exactly(connection, length)


def _read_exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection is closed")
        view = view[count:]
    return data
