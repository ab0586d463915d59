"""Hashes of full KV blocks. Each covers its tokens and, through its parent, all tokens before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from plimsoll_engine.messages.worker_ipc import Media

HASH_BYTES = 16
"""Size of a hash: 128 bits, so a collision is unlikely below 2**64 blocks.

A collision would use another prompt's keys and values.
"""


class AdapterIdentity(Protocol):
    """Identity of a loaded LoRA adapter.

    Within one worker, name and number are unique for each loading. A later worker may load changed
    files under the same number, hence the digest.
    """

    @property
    def number(self) -> int:
        """Number of this loading, never reused."""

    @property
    def name(self) -> str:
        """Name in requests."""

    @property
    def digest(self) -> bytes:
        """Digest of the adapter's tensors."""


class HashableRequest(Protocol):
    """Request properties that its block hashes depend on.

    Functions compute the hashes, because a request that stored a hasher would reference itself.
    """

    block_hashes: list[bytes]
    media: list[Media]
    cache_salt: str

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far, starting with the prompt."""

    @property
    def adapter(self) -> AdapterIdentity | None:
        """Adapter that the request uses; None for the base model."""


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Return the hash of one full block after ``parent``; the first block's parent is :func:`root`.

    ``extra`` identifies the media behind placeholder tokens.
    """
    content = array("q", token_ids).tobytes() + extra
    return blake2b(content, digest_size=HASH_BYTES, key=parent).digest()


def root(cache_salt: str, adapter: AdapterIdentity | None = None) -> bytes:
    """Return the parent of a prompt's first block.

    It is equal for requests that may share cached blocks.
    """
    salted = b""
    if cache_salt:
        salted = blake2b(cache_salt.encode(), digest_size=HASH_BYTES, person=b"cache salt").digest()
    if adapter is None:
        return salted
    identity = adapter.digest + f" {adapter.number} {adapter.name}".encode()
    return blake2b(identity, digest_size=HASH_BYTES, key=salted, person=b"adapter").digest()


def extend_block_hashes(request: HashableRequest, block_size: int) -> None:
    """Hash the blocks of ``request`` that became full since the previous call."""
    hashes = request.block_hashes
    for start in range(len(hashes) * block_size, len(request.token_ids), block_size):
        tokens = request.token_ids[start : start + block_size]
        if len(tokens) < block_size:
            break
        parent = hashes[-1] if hashes else root(request.cache_salt, request.adapter)
        hashes.append(hash_block(parent, tokens, _media_in(request.media, start, block_size)))


def hash_tail(request: HashableRequest, computed: int, block_size: int) -> bytes:
    """Return the hash of the tokens before ``computed`` that follow the last full block.

    It covers all tokens before as well, whose blocks must be hashed already. Empty if no token
    follows.
    """
    full = computed // block_size
    start = full * block_size
    if start == computed:
        return b""
    parent = request.block_hashes[full - 1] if full else root(request.cache_salt, request.adapter)
    tokens = request.token_ids[start:computed]
    return hash_block(parent, tokens, _media_in(request.media, start, len(tokens)))


def _media_in(media: Sequence[Media], start: int, size: int) -> bytes:
    """Return keys and offsets of the media with placeholders in ``size`` tokens from ``start`` on.

    Media without placeholders count at their position, the beginning of the prompt.
    """
    if not media:
        return b""
    return b"".join(
        item.key + (item.start - start).to_bytes(8, signed=True)
        for item in media
        if item.start < start + size and item.start + max(1, item.length) > start
    )
