"""What the weight server and a worker say to each other, on a Unix stream socket.

One connection is one mapping. A worker first asks for the weights of its rank, then for the KV
pool, which the weight server keeps as well. The mapping lasts as long as the worker uses either:
the weight server frees nothing before every mapping has ended, and a worker whose connection breaks
has lost its memory. A worker that is done sends :class:`Returned`; a connection that ends without
it ended in a crash, and the weight server checks the weights before it maps them again.

Before its first write to the pool a worker sends :class:`PoolClaim`. The answer says whether it is
the only writer: only then what a predecessor left in the pool is what it left there.
"""

from __future__ import annotations

import socket

import msgspec

from plimsoll_engine.messages.framing import LENGTH, MAX_MESSAGE_BYTES, framed


class Place(msgspec.Struct, array_like=True, frozen=True):
    """One tensor: its first byte in the buffer, its shape, and its type by torch's name."""

    offset: int
    shape: list[int]
    dtype: str


class Manifest(msgspec.Struct, frozen=True):
    """Every tensor by its name in the model, and the buffer's size in bytes."""

    places: dict[str, Place]
    nbytes: int


class WeightsShared(msgspec.Struct, tag="weights"):
    """``handle`` is the CUDA IPC handle; without one the message carries a descriptor.

    ``identity`` is a hash of the weights' bytes and of how they lie.
    """

    manifest: Manifest
    handle: bytes | None = None
    identity: bytes = b""


class PoolShared(msgspec.Struct, tag="pool"):
    """The KV pool; of 0 bytes and without ``identity`` where there is none yet.

    ``handle`` as of :class:`WeightsShared`. ``identity`` is random, of this memory alone.
    """

    nbytes: int
    handle: bytes | None = None
    identity: bytes = b""


class PoolClaimed(msgspec.Struct, tag="claimed"):
    """``alone``: no other worker may write to the pool any more."""

    alone: bool


class WeightsRefused(msgspec.Struct, tag="refused"):
    """There is no such memory. ``permanent``: the checkpoint or a setting is wrong."""

    message: str
    permanent: bool


Answer = WeightsShared | PoolShared | PoolClaimed | WeightsRefused


class WeightsRequest(msgspec.Struct, tag="weights_asked"):
    """The part of the weights that rank ``rank`` of a worker has; before all else."""

    rank: int


class PoolRequest(msgspec.Struct, tag="pool_asked"):
    """A KV pool of ``nbytes`` for the same rank; with 0 the one that there is."""

    nbytes: int


class PoolClaim(msgspec.Struct, tag="claim"):
    """The worker is about to write to the pool; it may until its mapping ends."""


class Returned(msgspec.Struct, tag="returned"):
    """The worker has unmapped everything: its mapping may end."""


Request = WeightsRequest | PoolRequest | PoolClaim | Returned

_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)
_requests = msgspec.msgpack.Decoder(Request)


class MappingLost(ConnectionError):
    """The other side of the mapping is gone. For a worker: its weights are gone as well."""


def send(connection: socket.socket, message: Answer | Request, fd: int | None = None) -> None:
    """Send a message; raise :class:`MappingLost` where the other side is gone."""
    data = framed(_encoder.encode(message))
    try:
        sent = socket.send_fds(connection, [data], [] if fd is None else [fd])
        if sent < len(data):  # the other side may have answered and closed by now
            connection.sendall(data[sent:])
    except OSError as error:
        raise MappingLost(f"mapping of the weights: {error}") from None


def receive(connection: socket.socket) -> tuple[Answer, int | None]:
    """Return the weight server's answer and its descriptor. Raises :class:`MappingLost`."""
    body, fds = _read(connection)
    return _answers.decode(body), fds[0] if fds else None


def receive_request(connection: socket.socket) -> Request:
    """Return what a worker wants. Raises :class:`MappingLost`."""
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
            raise MappingLost(f"mapping of the weights: {error}") from None
        fds += found
        if not part:
            raise MappingLost("mapping of the weights: the other side has ended")
        data += part
        if len(data) >= LENGTH.size:
            wanted = LENGTH.size + LENGTH.unpack_from(data)[0]
            if wanted > MAX_MESSAGE_BYTES:
                raise MappingLost(f"mapping of the weights: a message of {wanted} bytes")
    return bytes(data[LENGTH.size :]), fds
