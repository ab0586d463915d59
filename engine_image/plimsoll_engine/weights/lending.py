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


class Wanted(msgspec.Struct, tag="wanted"):
    """What a worker says first: the part of the weights that rank ``rank`` of its group has."""

    rank: int = 0


_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)
_requests = msgspec.msgpack.Decoder(Wanted)


class LeaseCut(ConnectionError):
    """The weight holder is gone, and the weights with it."""


def send(connection: socket.socket, message: Answer | Wanted, fd: int | None = None) -> None:
    """Raises OSError where the other end is gone."""
    body = _encoder.encode(message)
    data = LENGTH.pack(len(body)) + body
    sent = socket.send_fds(connection, [data], [] if fd is None else [fd])
    connection.sendall(data[sent:])


def receive(connection: socket.socket) -> tuple[Answer, int | None]:
    """The answer and the descriptor that came with it. Raises :class:`LeaseCut`."""
    try:
        body, fd = _receive(connection)
    except EOFError:
        raise LeaseCut("the weight holder ended before it lent the weights") from None
    except OSError as error:
        raise LeaseCut(f"weight holder: {error}") from None
    return _answers.decode(body), fd


def receive_request(connection: socket.socket) -> Wanted:
    """Raises OSError where the worker says nothing in the connection's time, or no request."""
    try:
        body, _ = _receive(connection)
        return _requests.decode(body)
    except (EOFError, msgspec.DecodeError) as error:
        raise ConnectionError(f"no request: {error}") from None


def _receive(connection: socket.socket) -> tuple[bytes, int | None]:
    data = bytearray()
    fds: list[int] = []
    wanted = LENGTH.size
    while len(data) < wanted:
        part, found, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        fds += found
        if not part:
            raise EOFError
        data += part
        if len(data) >= LENGTH.size:
            wanted = LENGTH.size + LENGTH.unpack_from(data)[0]
            if wanted > MAX_MESSAGE_BYTES:
                raise ConnectionError(f"a message of {wanted} bytes")
    return bytes(data[LENGTH.size :]), fds[0] if fds else None
