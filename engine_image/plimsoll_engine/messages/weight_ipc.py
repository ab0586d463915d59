"""Messages between a worker and the weight server, on a Unix stream socket.

A connection is a mapping of one rank. If it ends without :class:`MappingReleased`, the worker has
crashed, and the weight server verifies the weights before it maps them again.
"""

from __future__ import annotations

import socket

import msgspec

from plimsoll_engine.messages.framing import LENGTH_PREFIX, MAX_MESSAGE_BYTES, add_length_prefix


class TensorLocation(msgspec.Struct, array_like=True, frozen=True):
    """Location of a tensor in the shared buffer: byte offset, shape and torch dtype name."""

    offset: int
    shape: list[int]
    dtype: str


class Manifest(msgspec.Struct, frozen=True):
    """Locations of all tensors by name, and the size of the shared buffer in bytes."""

    places: dict[str, TensorLocation]
    nbytes: int


class SharedWeights(msgspec.Struct, tag="weights"):
    """Reply: the shared weights, as a CUDA IPC ``handle`` or a file descriptor.

    ``identity`` is a hash of the weights' bytes and of their layout.
    """

    manifest: Manifest
    handle: bytes | None = None
    identity: bytes = b""


class SharedPool(msgspec.Struct, tag="pool"):
    """Reply: the shared KV pool, as a CUDA IPC ``handle`` or a file descriptor.

    Without a pool, ``nbytes`` is 0. ``identity`` is random and unique to this memory.
    """

    nbytes: int
    handle: bytes | None = None
    identity: bytes = b""


class PoolClaimReply(msgspec.Struct, tag="claimed"):
    """Reply: the worker may write to the pool. No other worker may if ``is_sole_writer``."""

    is_sole_writer: bool


class MappingRefusal(msgspec.Struct, tag="refused"):
    """Reply: the memory cannot be shared. If ``permanent``, a retry would also fail."""

    message: str
    permanent: bool


Reply = SharedWeights | SharedPool | PoolClaimReply | MappingRefusal


class WeightsRequest(msgspec.Struct, tag="weights_asked"):
    """First request: the weights of one rank."""

    rank: int


class PoolRequest(msgspec.Struct, tag="pool_asked"):
    """Request: the KV pool of the same rank, or a new pool of ``nbytes`` bytes if there is none."""

    nbytes: int


class PoolClaim(msgspec.Struct, tag="claim"):
    """Request: permission to write to the pool until the mapping ends."""


class MappingReleased(msgspec.Struct, tag="returned"):
    """Message: the worker has unmapped all buffers, so the mapping ends."""


Request = WeightsRequest | PoolRequest | PoolClaim | MappingReleased

_encoder = msgspec.msgpack.Encoder()
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_request_decoder = msgspec.msgpack.Decoder(Request)


class MappingLostError(ConnectionError):
    """The connection to the weight server failed."""


def send_message(
    connection: socket.socket, message: Reply | Request, fd: int | None = None
) -> None:
    """Send ``message``, with the file descriptor ``fd`` if set. Raises MappingLostError."""
    data = add_length_prefix(_encoder.encode(message))
    try:
        sent = socket.send_fds(connection, [data], [] if fd is None else [fd])
        if sent < len(data):
            connection.sendall(data[sent:])
    except OSError as error:
        raise MappingLostError(f"cannot map the weights: {error}") from None


def receive_reply(connection: socket.socket) -> tuple[Reply, int | None]:
    """Return the reply and its file descriptor, if any. Raises MappingLostError."""
    body, fds = _receive_frame(connection)
    return _reply_decoder.decode(body), fds[0] if fds else None


def receive_request(connection: socket.socket) -> Request:
    """Return a worker's next request. Raises MappingLostError."""
    request: Request = _request_decoder.decode(_receive_frame(connection)[0])
    return request


def _receive_frame(connection: socket.socket) -> tuple[bytes, list[int]]:
    # Message body and file descriptors.
    data = bytearray()
    fds: list[int] = []
    wanted = LENGTH_PREFIX.size
    while len(data) < wanted:
        try:
            part, found, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        except OSError as error:
            raise MappingLostError(f"cannot map the weights: {error}") from None
        fds += found
        if not part:
            raise MappingLostError(
                "cannot map the weights: the weight server closed the connection"
            )
        data += part
        if len(data) >= LENGTH_PREFIX.size:
            wanted = LENGTH_PREFIX.size + LENGTH_PREFIX.unpack_from(data)[0]
            if wanted > MAX_MESSAGE_BYTES:
                raise MappingLostError(
                    f"cannot map the weights: a message of {wanted} bytes exceeds the maximum of "
                    f"{MAX_MESSAGE_BYTES} bytes"
                )
    return bytes(data[LENGTH_PREFIX.size :]), fds
