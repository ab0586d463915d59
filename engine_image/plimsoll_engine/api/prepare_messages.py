"""What frontend and preparing process say to each other over a Unix stream socket.

A message is a length (8 bytes, big-endian) and so many bytes. The frontend sends a :class:`Job` and
the raw body, the process answers with one :data:`Outcome`.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal

import msgspec

from plimsoll_engine.api.prepare import Context

LENGTH = struct.Struct(">Q")

Kind = Literal["completion", "chat", "chats", "responses", "tokenize", "detokenize", "form"]


class Job(msgspec.Struct, frozen=True):
    """``content_type`` is a form's."""

    kind: Kind
    context: Context
    content_type: str = ""


class PreparationRefused(msgspec.Struct, tag=True):
    """The fields of ApiError."""

    status: int
    message: str
    param: str | None
    code: str | None
    retry: bool


class Done(msgspec.Struct, tag=True):
    """``result`` is the msgpack of what the kind of job makes."""

    result: msgspec.Raw


Outcome = PreparationRefused | Done


def send(connection: socket.socket, data: bytes | bytearray) -> None:
    """Send ``data`` behind its length. Raises OSError when the other side is gone."""
    connection.sendall(LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> bytearray:
    """Return the next message; raise EOFError where the other side is gone."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other side is gone")
        view = view[count:]
    return data
