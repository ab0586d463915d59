"""Interfaces of media processors, which turn files into the encoder's input tensors.

This package runs in the frontend, which has no torch: numpy, Pillow and libsndfile follow the
checkpoint's processor configuration.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from plimsoll_engine.messages.worker_ipc import Media

Kind = Literal["image", "audio"]


class MediaError(Exception):
    """The client's image or audio is invalid or unsupported. The message says what is supported."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Processed(NamedTuple):
    """Input tensor of the encoder, as little-endian bytes of ``shape`` and ``dtype``.

    ``key`` is a hash of the content and of its processing.
    """

    kind: Kind
    key: bytes
    shape: list[int]
    data: bytes
    dtype: str = "float32"

    def media(self, start: int, length: int, tokens: int) -> Media:
        """Return the tensor as part of a prompt.

        ``start`` and ``length`` are the position and number of its placeholder tokens, ``tokens``
        its cost in the encoder cache's budget.
        """
        return Media(self.kind, self.key, start, length, tokens, self.shape, self.dtype, self.data)


class Processor(Protocol):
    """Media processor of a model, for one kind of media."""

    kind: Kind
    placeholder: int | None
    """Token id that the chat template writes for an item; None if the prompt has none."""
    placeholders: int
    """Number of placeholder tokens that an item takes in the prompt."""
    tokens: int
    """Cost of an item in the encoder cache's budget, in tokens."""

    def key(self, data: bytes) -> bytes:
        """Return the cache key of the file ``data`` without decoding it."""
        ...

    def process(self, data: bytes) -> Processed:
        """Return the tensor of the file ``data``. Raises :class:`MediaError`.

        Takes milliseconds, so do not call it on the event loop.
        """
        ...
