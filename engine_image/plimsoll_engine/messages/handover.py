"""What a worker hands over to its successor: which block of the KV pool holds which tokens of whom.

The keys and values stay where they are, in the weight server's memory. The worker that stops writes
this message once its last step has ended, the frontend passes it on without a look inside, and the
successor believes nothing of it that it has not checked. Whatever is wrong with it, the requests
are computed again.

Nothing here knows torch: the frontend imports it.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated

import msgspec

MAGIC = b"plimsoKV"
VERSION = 1
MAX_BYTES = 64 << 20
"""Of one message: the tables of two million blocks. A larger one is not handed over."""
DIGEST_BYTES = 32
_HEAD = struct.Struct(f">8sH{DIGEST_BYTES}s")
_VERSION = struct.Struct(">H")

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Outcome(StrEnum):
    """What became of the keys and values in a planned restart, and why."""

    HANDED_OVER = "handed_over"
    NOT_ASKED = "not_asked"
    """The restart keeps no weights, carries nothing, or found no room for a successor."""
    NO_HOLDER = "no_holder"
    """The KV pool is the worker's own and ends with it."""
    WORKER_LOST = "worker_lost"
    """The old worker hung, crashed or lost its device: it gave no last word."""
    SUCCESSOR_LOST = "successor_lost"
    UNFENCED = "unfenced"
    """Something in the old worker, or another worker, could still write to the pool."""
    TOO_LARGE = "too_large"
    DAMAGED = "damaged"
    """The message is not what was written."""
    OTHER_VERSION = "other_version"
    OTHER_MODEL = "other_model"
    OTHER_POOL = "other_pool"
    BAD_TABLES = "bad_tables"
    BAD_CONTENTS = "bad_contents"
    """A block does not hold what it held when the old worker stopped."""
    FAILED = "failed"
    """An unexpected error, on either side."""


class HandoverRefused(Exception):
    """Nothing is handed over; the requests are computed again."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """:class:`HandoverRefused` on the wire."""

    outcome: Outcome
    message: str


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """What the blocks' bytes mean: equal for both workers, or nothing is handed over.

    ``weights`` and ``memory`` are the weight server's identities of the weights and of the memory.
    ``shape`` is (layers, heads, dimensions of a head) of one rank.
    """

    weights: bytes
    memory: bytes
    dtype: str
    shape: tuple[int, int, int]
    block_size: int
    num_blocks: int
    ranks: int


class Table(msgspec.Struct, array_like=True, frozen=True):
    """The blocks of one request that ran.

    ``computed`` tokens have their keys and values in ``blocks``, in this order. ``hashes`` are of
    the full blocks, each of which covers all tokens before it; ``tail`` of the tokens in the last
    block, where that is not full, and of all before them; empty where it is. ``sums`` are of the
    contents of each block. ``started_at`` (CLOCK_MONOTONIC) and ``cached_tokens`` are those of the
    request's first start.
    """

    request_id: str
    computed: Count
    blocks: list[Count]
    hashes: list[bytes]
    tail: bytes
    sums: list[int]
    started_at: float | None = None
    cached_tokens: Count = 0


class Handover(msgspec.Struct, array_like=True, frozen=True):
    """The tables of all requests that ran.

    ``used`` different blocks are in them, ``held`` with their repetitions.
    """

    layout: Layout
    tables: list[Table]
    used: Count
    held: Count


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Handover)


def seal(handover: Handover) -> bytes:
    """Return the message. Raises :class:`HandoverRefused` where it would be too large."""
    body = _encoder.encode(handover)
    if len(body) > MAX_BYTES - _HEAD.size:
        raise HandoverRefused(
            Outcome.TOO_LARGE, f"the block tables take {len(body)} bytes, the most is {MAX_BYTES}"
        )
    return _HEAD.pack(MAGIC, VERSION, _digest(VERSION, body)) + body


def unseal(data: bytes) -> Handover:
    """Return what :func:`seal` was given. Raises :class:`HandoverRefused` for anything else."""
    if not _HEAD.size <= len(data) <= MAX_BYTES:
        raise HandoverRefused(Outcome.DAMAGED, f"a message of {len(data)} bytes")
    magic, version, digest = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != MAGIC or digest != _digest(version, body):
        raise HandoverRefused(Outcome.DAMAGED, "its checksum is of other bytes")
    if version != VERSION:
        raise HandoverRefused(
            Outcome.OTHER_VERSION, f"its version is {version}, this worker reads {VERSION}"
        )
    try:
        handover: Handover = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HandoverRefused(Outcome.DAMAGED, str(error)) from None
    return handover


def _digest(version: int, body: bytes) -> bytes:
    return blake2b(_VERSION.pack(version) + body, digest_size=DIGEST_BYTES).digest()
