"""Handover of the KV pool from a worker to its successor: block tables with checksums.

The keys and values stay in the weight server's memory. The old worker sends this message after its
last step, and the frontend passes it on unread. The successor verifies everything before it uses a
block. If a check fails, the requests are computed again.

This module must not import torch, because the frontend imports it.
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
"""Maximum size of a message in bytes: the tables of two million blocks.

Larger ones are not sent.
"""
DIGEST_BYTES = 32
_HEAD = struct.Struct(f">8sH{DIGEST_BYTES}s")
_VERSION = struct.Struct(">H")

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class HandoverOutcome(StrEnum):
    """Result of handing over the KV pool in a planned restart."""

    HANDED_OVER = "handed_over"
    NOT_ASKED = "not_asked"
    """The restart keeps no weights, carries over no requests, or prepared no successor."""
    NO_HOLDER = "no_holder"
    """The worker allocated the KV pool itself, so the pool is lost with the worker."""
    WORKER_LOST = "worker_lost"
    """The old worker hung, crashed or lost its device before it sent the handover."""
    SUCCESSOR_LOST = "successor_lost"
    UNFENCED = "unfenced"
    """The old worker or a third worker could still write to the pool."""
    TOO_LARGE = "too_large"
    DAMAGED = "damaged"
    """The checksum or the format of the message is wrong."""
    OTHER_VERSION = "other_version"
    OTHER_MODEL = "other_model"
    OTHER_POOL = "other_pool"
    BAD_TABLES = "bad_tables"
    BAD_CONTENTS = "bad_contents"
    """The contents of a block differ from its checksum."""
    FAILED = "failed"
    """An unexpected error occurred in one of the workers."""


class HandoverRefused(Exception):
    """The handover failed. The requests are computed again."""

    def __init__(self, outcome: HandoverOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class HandoverRefusal(msgspec.Struct, array_like=True, frozen=True):
    """Message with the content of a :class:`HandoverRefused` exception."""

    outcome: HandoverOutcome
    message: str


class PoolLayout(msgspec.Struct, array_like=True, frozen=True):
    """Layout of the KV pool. A handover requires equal layouts in both workers.

    ``weights`` and ``memory`` are the identities that the weight server assigned to the weights and
    to the memory. ``shape`` is (layers, heads, head dimension) of one rank.
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

    ``blocks`` hold the keys and values of the first ``computed`` tokens, in order. ``hashes`` has
    one prefix hash per full block, over all tokens up to the end of that block. ``tail`` is the
    prefix hash of a partly filled last block; empty without such a block. ``sums`` has a checksum
    of each block's contents. ``started_at`` (CLOCK_MONOTONIC seconds) and ``cached_tokens`` belong
    to the request's first start.
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

    ``used`` counts each block once; ``held`` counts a shared block once per table.
    """

    layout: PoolLayout
    tables: list[BlockTable]
    used: Count
    held: Count


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Handover)


def encode_handover(handover: Handover) -> bytes:
    """Return the handover as a message. Raises :class:`HandoverRefused` if it is too large."""
    body = _encoder.encode(handover)
    if len(body) > MAX_BYTES - _HEAD.size:
        raise HandoverRefused(
            HandoverOutcome.TOO_LARGE,
            f"the block tables take {len(body)} bytes, which exceeds the maximum of {MAX_BYTES}",
        )
    return _HEAD.pack(MAGIC, VERSION, _digest(VERSION, body)) + body


def decode_handover(data: bytes) -> Handover:
    """Return the handover in a message. Raises :class:`HandoverRefused` if it is invalid."""
    if not _HEAD.size <= len(data) <= MAX_BYTES:
        raise HandoverRefused(
            HandoverOutcome.DAMAGED, f"the handover has an invalid length of {len(data)} bytes"
        )
    magic, version, digest = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != MAGIC or digest != _digest(version, body):
        raise HandoverRefused(
            HandoverOutcome.DAMAGED, "the checksum of the handover does not match its content"
        )
    if version != VERSION:
        raise HandoverRefused(
            HandoverOutcome.OTHER_VERSION,
            f"the handover has version {version}, but only {VERSION} is supported",
        )
    try:
        handover: Handover = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HandoverRefused(HandoverOutcome.DAMAGED, str(error)) from None
    return handover


def _digest(version: int, body: bytes) -> bytes:
    return blake2b(_VERSION.pack(version) + body, digest_size=DIGEST_BYTES).digest()
