"""Interfaces of media processors, which turn files into input tensors of the encoder.

This package must not import torch, because it runs in the frontend.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from plimsoll_engine.messages.worker_ipc import Media

MediaKind = Literal["image", "audio"]


class MediaError(Exception):
    """The client's image or audio is invalid or unsupported."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ProcessedMedia(NamedTuple):
    """Input tensor of the encoder, as little-endian bytes. The key is for caches."""

    kind: MediaKind
    key: bytes
    shape: list[int]
    data: bytes
    dtype: str = "float32"

    def to_media(self, start: int, num_placeholders: int, num_tokens: int) -> Media:
        """Return the message that sends the tensor to the worker.

        ``num_tokens`` is the number of tokens that the encoder output takes in the encoder cache.
        """
        return Media(
            self.kind,
            self.key,
            start,
            num_placeholders,
            num_tokens,
            self.shape,
            self.dtype,
            self.data,
        )


class Processor(Protocol):
    """Processor of one kind of media for one model."""

    kind: MediaKind
    # ID of the token that the chat template writes for each item; None if it writes none.
    placeholder: int | None
    placeholders: int
    # Number of tokens that the encoder output of an item takes in the encoder cache.
    tokens: int

    def hash_file(self, data: bytes) -> bytes:
        """Return the cache key of the file ``data``, without decoding it."""
        ...

    def process(self, data: bytes) -> ProcessedMedia:
        """Return the tensor of the file ``data``. Raises MediaError.

        This takes milliseconds: do not call it on the event loop.
        """
        ...
