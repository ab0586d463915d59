"""Hashes of full blocks: each covers its own tokens and, through its parent, all before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from plimsoll_engine.messages.worker_ipc import Media

HASH_BYTES = 16
"""128 bits: a collision would serve another prompt's keys and values; 2**64 blocks away."""


class Identity(Protocol):
    """A loaded LoRA adapter.

    Within one worker no two loadings have an equal name and number. A later worker loads the same
    folder under the same number, and its files may have changed since: hence the digest.
    """

    @property
    def number(self) -> int:
        """The number of this loading, never used again."""

    @property
    def name(self) -> str:
        """The name that requests call it by."""

    @property
    def digest(self) -> bytes:
        """A digest of its tensors."""


class Hashed(Protocol):
    """A request, as far as its hashes depend on it.

    They are computed by a function that is handed the request: a request that stored one would hold
    itself.
    """

    block_hashes: list[bytes]
    media: list[Media]
    cache_salt: str

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens so far, the prompt's first."""

    @property
    def adapter(self) -> Identity | None:
        """The adapter that the request's keys and values depend on; None for the model alone."""


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Return the hash of one full block after ``parent`` (for the first block: the prompt's root).

    ``extra`` is what the tokens do not say: which media their placeholders stand for.
    """
    content = array("q", token_ids).tobytes() + extra
    return blake2b(content, digest_size=HASH_BYTES, key=parent).digest()


def root(cache_salt: str, adapter: Identity | None = None) -> bytes:
    """Return what stands before a prompt's first block.

    It is equal for those that may share cached blocks.
    """
    salted = b""
    if cache_salt:
        salted = blake2b(cache_salt.encode(), digest_size=HASH_BYTES, person=b"cache salt").digest()
    if adapter is None:
        return salted
    identity = adapter.digest + f" {adapter.number} {adapter.name}".encode()
    return blake2b(identity, digest_size=HASH_BYTES, key=salted, person=b"adapter").digest()


def extend_block_hashes(request: Hashed, block_size: int) -> None:
    """Hash the blocks of ``request`` that became full since the last call."""
    hashes = request.block_hashes
    for start in range(len(hashes) * block_size, len(request.token_ids), block_size):
        tokens = request.token_ids[start : start + block_size]
        if len(tokens) < block_size:
            break
        parent = hashes[-1] if hashes else root(request.cache_salt, request.adapter)
        hashes.append(hash_block(parent, tokens, _media_in(request.media, start, block_size)))


def hash_tail(request: Hashed, computed: int, block_size: int) -> bytes:
    """Return the hash of the tokens before ``computed`` that fill no block, and of all before them.

    Empty where there are none. The full blocks are hashed already.
    """
    full = computed // block_size
    start = full * block_size
    if start == computed:
        return b""
    parent = request.block_hashes[full - 1] if full else root(request.cache_salt, request.adapter)
    tokens = request.token_ids[start:computed]
    return hash_block(parent, tokens, _media_in(request.media, start, len(tokens)))


def _media_in(media: Sequence[Media], start: int, size: int) -> bytes:
    """Return the keys of the media with placeholders among ``size`` tokens from ``start`` on.

    Each comes with its place. One without placeholders counts where it is: at the beginning of its
    prompt.
    """
    if not media:
        return b""
    return b"".join(
        item.key + (item.start - start).to_bytes(8, signed=True)
        for item in media
        if item.start < start + size and item.start + max(1, item.length) > start
    )
