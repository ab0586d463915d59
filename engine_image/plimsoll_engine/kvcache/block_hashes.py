"""Compute hashes of KV blocks, by which the block pool finds the cached prefix of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from plimsoll_engine.messages.worker_ipc import Media

# Collisions of 128 bits are unlikely below 2**64 blocks. After one, a prompt would use the keys and
# values of another prompt.
HASH_BYTES = 16


class AdapterIdentity(Protocol):
    """Identity of a loaded LoRA adapter.

    ``number`` is unique within a worker. Other workers also need ``digest``, because they may load
    changed files.
    """

    @property
    def number(self) -> int:
        """Number of this load, which is never reused."""

    @property
    def name(self) -> str:
        """Name that requests use."""

    @property
    def digest(self) -> bytes:
        """Digest of the tensors."""


class HashableRequest(Protocol):
    """Properties of a request on which its block hashes depend."""

    # A hasher object in the request would create a reference cycle.
    block_hashes: list[bytes]
    media: list[Media]
    cache_salt: str

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens of the prompt and the output so far."""

    @property
    def adapter(self) -> AdapterIdentity | None:
        """Adapter of the request; None for the base model."""


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Return the hash of a block whose previous block, or root, has the hash ``parent``.

    ``extra`` identifies the media of placeholder tokens.
    """
    content = array("q", token_ids).tobytes() + extra
    return blake2b(content, digest_size=HASH_BYTES, key=parent).digest()


def hash_root(cache_salt: str, adapter: AdapterIdentity | None = None) -> bytes:
    """Return the parent hash of a prompt's first block.

    Requests with different salts or adapters have different roots, so they share no cached blocks.
    """
    salted = b""
    if cache_salt:
        salted = blake2b(cache_salt.encode(), digest_size=HASH_BYTES, person=b"cache salt").digest()
    if adapter is None:
        return salted
    identity = adapter.digest + f" {adapter.number} {adapter.name}".encode()
    return blake2b(identity, digest_size=HASH_BYTES, key=salted, person=b"adapter").digest()


def extend_block_hashes(request: HashableRequest, block_size: int) -> None:
    """Append the hashes of blocks that are newly full to ``request.block_hashes``."""
    hashes = request.block_hashes
    for start in range(len(hashes) * block_size, len(request.token_ids), block_size):
        tokens = request.token_ids[start : start + block_size]
        if len(tokens) < block_size:
            break
        parent = hashes[-1] if hashes else hash_root(request.cache_salt, request.adapter)
        hashes.append(hash_block(parent, tokens, _encode_media(request.media, start, block_size)))


def hash_tail(request: HashableRequest, computed: int, block_size: int) -> bytes:
    """Return the hash of the partly filled block at the end of the first ``computed`` tokens.

    Return an empty hash if that block is full. Call :func:`extend_block_hashes` first.
    """
    full = computed // block_size
    start = full * block_size
    if start == computed:
        return b""
    parent = (
        request.block_hashes[full - 1] if full else hash_root(request.cache_salt, request.adapter)
    )
    tokens = request.token_ids[start:computed]
    return hash_block(parent, tokens, _encode_media(request.media, start, len(tokens)))


def _encode_media(media: Sequence[Media], start: int, num_tokens: int) -> bytes:
    # Media without placeholder tokens count as one token.
    if not media:
        return b""
    return b"".join(
        item.key + (item.start - start).to_bytes(8, signed=True)
        for item in media
        if item.start < start + num_tokens and item.start + max(1, item.length) > start
    )
