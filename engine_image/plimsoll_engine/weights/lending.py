"""What the weight holder and a worker say to each other, on a Unix stream socket.

The connection is the lease. A worker begins: it asks for the weights of its rank. On CUDA it then
asks for the KV pool, which the holder keeps as well. A lease stands as long as the worker uses
either: the holder frees nothing before every lease has ended, and a worker whose lease is cut has
lost its memory. A worker that is done says :class:`Returned`; a lease that ends without it was cut
by a crash, and the holder looks at the weights before it lends them again.
"""

from __future__ import annotations

import socket

import msgspec

from plimsoll_engine.ipc import LENGTH, MAX_MESSAGE_BYTES
from plimsoll_engine.weights.layout import Manifest


class Lent(msgspec.Struct, tag="lent"):
    """``handle`` is the CUDA IPC handle; without one the message carries a descriptor."""

    manifest: Manifest
    handle: bytes | None = None


class LentPool(msgspec.Struct, tag="lent_pool"):
    """The KV pool; of 0 bytes and without a handle where there is none yet."""

    nbytes: int
    handle: bytes | None = None


class Refused(msgspec.Struct, tag="refused"):
    """There is no such memory. ``permanent``: the checkpoint or a setting is wrong."""

    message: str
    permanent: bool


Answer = Lent | LentPool | Refused


class WeightsAsked(msgspec.Struct, tag="weights_asked"):
    """The part of the weights that rank ``rank`` of a worker has; before all else."""

    rank: int


class PoolAsked(msgspec.Struct, tag="pool_asked"):
    """A KV pool of ``nbytes`` for the same rank; with 0 the one that there is."""

    nbytes: int


class Returned(msgspec.Struct, tag="returned"):
    """The worker has unmapped everything: its lease may end."""


Request = WeightsAsked | PoolAsked | Returned

_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)
_requests = msgspec.msgpack.Decoder(Request)


class LeaseCut(ConnectionError):
    """The other side of the lease is gone. For a worker: its weights are gone as well."""


def send(connection: socket.socket, message: Answer | Request, fd: int | None = None) -> None:
    """Raises :class:`LeaseCut`."""
    body = _encoder.encode(message)
    data = LENGTH.pack(len(body)) + body
    try:
        sent = socket.send_fds(connection, [data], [] if fd is None else [fd])
        connection.sendall(data[sent:])
    except OSError as error:
        raise LeaseCut(f"lease of the weights: {error}") from None


def receive(connection: socket.socket) -> tuple[Answer, int | None]:
    """The holder's answer and the descriptor that came with it. Raises :class:`LeaseCut`."""
    body, fds = _read(connection)
    return _answers.decode(body), fds[0] if fds else None


def receive_request(connection: socket.socket) -> Request:
    """What a worker wants. Raises :class:`LeaseCut`."""
    request: Request = _requests.decode(_read(connection)[0])
    return request


def _read(connection: socket.socket) -> tuple[bytes, list[int]]:
    data = bytearray()
    fds: list[int] = []
    wanted = LENGTH.size
    while len(data) < wanted:
        try:
            part, found, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        except OSError as error:
            raise LeaseCut(f"lease of the weights: {error}") from None
        fds += found
        if not part:
            raise LeaseCut("lease of the weights: the other side has ended")
        data += part
        if len(data) >= LENGTH.size:
            wanted = LENGTH.size + LENGTH.unpack_from(data)[0]
            if wanted > MAX_MESSAGE_BYTES:
                raise LeaseCut(f"lease of the weights: a message of {wanted} bytes")
    return bytes(data[LENGTH.size :]), fds
