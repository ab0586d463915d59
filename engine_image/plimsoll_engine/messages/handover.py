"""Handover of the KV pool from a worker to its successor: block tables with checksums.

The keys and values stay in the weight server's memory. This module must not import torch, because
the frontend imports it.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated

import msgspec

HANDOVER_MAGIC = b"plimsoKV"
HANDOVER_VERSION = 1
# Enough for two million blocks.
MAX_HANDOVER_BYTES = 64 << 20
DIGEST_BYTES = 32
_HEADER = struct.Struct(f">8sH{DIGEST_BYTES}s")
_VERSION_FIELD = struct.Struct(">H")

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class HandoverOutcome(StrEnum):
    """Outcome of the handover of the KV pool in a planned restart."""

    HANDED_OVER = "handed_over"
    # The restart does not keep the weights, carries over no requests, or has no successor.
    NOT_ASKED = "not_asked"
    # No weight server holds the KV pool, so the worker's exit frees the pool.
    NO_HOLDER = "no_holder"
    # The old worker hung, crashed or lost its device before it sent the handover.
    WORKER_LOST = "worker_lost"
    SUCCESSOR_LOST = "successor_lost"
    # The old worker or a third worker can possibly still write to the pool.
    UNFENCED = "unfenced"
    TOO_LARGE = "too_large"
    # The checksum or the format of the message is wrong.
    DAMAGED = "damaged"
    OTHER_VERSION = "other_version"
    OTHER_MODEL = "other_model"
    OTHER_POOL = "other_pool"
    BAD_TABLES = "bad_tables"
    # The contents of a block differ from its checksum.
    BAD_CONTENTS = "bad_contents"
    # An unexpected error occurred in one of the workers.
    FAILED = "failed"


class HandoverRefusedError(Exception):
    """The handover failed, so the requests are prefilled again."""

    def __init__(self, outcome: HandoverOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class HandoverRefusal(msgspec.Struct, array_like=True, frozen=True):
    """Message with the outcome and the reason of a failed handover."""

    outcome: HandoverOutcome
    message: str


class PoolLayout(msgspec.Struct, array_like=True, frozen=True):
    """Layout of the KV pool, which must be equal in both workers of a handover.

    Attributes:
        weights: Identity of the shared weights, assigned by the weight server.
        memory: Identity of the pool's shared memory, assigned by the weight server.
        shape: (layers, heads, head dimension) of one rank.

    """

    weights: bytes
    memory: bytes
    dtype: str
    shape: tuple[int, int, int]
    block_size: int
    num_blocks: int
    ranks: int


class BlockTable(msgspec.Struct, array_like=True, frozen=True):
    """Block table of one running request.

    Attributes:
        computed: Number of tokens whose keys and values are in the blocks.
        blocks: Numbers of the blocks, in the order of the tokens.
        hashes: Prefix hash of each full block.
        tail: Prefix hash of the partly filled last block; empty without such a block.
        sums: Checksum of each block's contents.
        started_at: Time of the request's first token in CLOCK_MONOTONIC seconds.
        cached_tokens: Number of prompt tokens that the prefix cache provided.

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
    """Block tables of all running requests.

    ``used_blocks`` is the number of distinct blocks, and ``block_references`` the number of entries
    in all tables.
    """

    layout: PoolLayout
    tables: list[BlockTable]
    used_blocks: Count
    block_references: Count


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Handover)


def encode_handover(handover: Handover) -> bytes:
    """Return the handover as a message. Raises HandoverRefusedError if it is too large."""
    body = _encoder.encode(handover)
    if len(body) > MAX_HANDOVER_BYTES - _HEADER.size:
        raise HandoverRefusedError(
            HandoverOutcome.TOO_LARGE,
            f"the block tables have {len(body)} bytes, but the maximum is {MAX_HANDOVER_BYTES}",
        )
    return (
        _HEADER.pack(HANDOVER_MAGIC, HANDOVER_VERSION, _compute_digest(HANDOVER_VERSION, body))
        + body
    )


def decode_handover(data: bytes) -> Handover:
    """Return the handover in a message. Raises HandoverRefusedError if it is invalid."""
    if not _HEADER.size <= len(data) <= MAX_HANDOVER_BYTES:
        raise HandoverRefusedError(
            HandoverOutcome.DAMAGED,
            f"the handover message has an invalid length of {len(data)} bytes",
        )
    magic, version, digest = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if magic != HANDOVER_MAGIC or digest != _compute_digest(version, body):
        raise HandoverRefusedError(
            HandoverOutcome.DAMAGED, "the checksum of the handover does not match its contents"
        )
    if version != HANDOVER_VERSION:
        raise HandoverRefusedError(
            HandoverOutcome.OTHER_VERSION,
            f"the handover message has version {version}, but only version "
            f"{HANDOVER_VERSION} is supported",
        )
    try:
        handover: Handover = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HandoverRefusedError(
            HandoverOutcome.DAMAGED, f"cannot decode the handover message: {error}"
        ) from None
    return handover


def _compute_digest(version: int, body: bytes) -> bytes:
    return blake2b(_VERSION_FIELD.pack(version) + body, digest_size=DIGEST_BYTES).digest()
