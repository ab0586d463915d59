"""What the weight holder says to a worker, and how: one message on a Unix stream socket.

The connection is the lease. It stands as long as the worker uses the weights: the holder frees
nothing before every lease has ended, and a worker whose lease is cut has lost its weights. A
worker that is done says so with :data:`RETURNED`; a lease that ends without it was cut by a crash,
and the holder looks at the weights before it lends them again.
"""

from __future__ import annotations

import socket

import msgspec

from plimsoll_engine.ipc import LENGTH, MAX_MESSAGE_BYTES
from plimsoll_engine.weights.layout import Manifest

RETURNED = b"R"


class Lent(msgspec.Struct, tag="lent"):
    """``handle`` is the CUDA IPC handle; without one the message carries a descriptor."""

    manifest: Manifest
    handle: bytes | None = None


class Refused(msgspec.Struct, tag="refused"):
    """The weights could not be loaded. ``permanent``: the checkpoint or a setting is wrong."""

    message: str
    permanent: bool


Answer = Lent | Refused

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Answer)


class LeaseCut(ConnectionError):
    """The weight holder is gone, and the weights with it."""


def send(connection: socket.socket, answer: Answer, fd: int | None = None) -> None:
    """Raises OSError where the worker is gone."""
    body = _encoder.encode(answer)
    data = LENGTH.pack(len(body)) + body
    sent = socket.send_fds(connection, [data], [] if fd is None else [fd])
    connection.sendall(data[sent:])


def receive(connection: socket.socket) -> tuple[Answer, int | None]:
    """The answer and the descriptor that came with it. Raises :class:`LeaseCut`."""
    data = bytearray()
    fds: list[int] = []
    wanted = LENGTH.size
    while len(data) < wanted:
        try:
            part, found, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        except OSError as error:
            raise LeaseCut(f"weight holder: {error}") from None
        fds += found
        if not part:
            raise LeaseCut("the weight holder ended before it lent the weights")
        data += part
        if len(data) >= LENGTH.size:
            wanted = LENGTH.size + LENGTH.unpack_from(data)[0]
            if wanted > MAX_MESSAGE_BYTES:
                raise LeaseCut(f"weight holder: a message of {wanted} bytes")
    return _decoder.decode(bytes(data[LENGTH.size :])), fds[0] if fds else None
