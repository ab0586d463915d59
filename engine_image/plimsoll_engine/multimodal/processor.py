"""What becomes of an image or a sound before the model's encoder takes it.

Everything in this package runs in the frontend, which knows no torch: numpy, Pillow and libsndfile
do what the checkpoint's processor configs say.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from plimsoll_engine.messages.worker_ipc import Media

Kind = Literal["image", "audio"]


class MediaError(Exception):
    """The client's image or sound cannot be taken; the message says why and what is taken."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Processed(NamedTuple):
    """A tensor of ``shape`` and ``dtype`` as little-endian bytes.

    ``key`` is a hash of the content and of how it was processed.
    """

    kind: Kind
    key: bytes
    shape: list[int]
    data: bytes
    dtype: str = "float32"

    def media(self, start: int, length: int, tokens: int) -> Media:
        """As part of a prompt: its placeholders, and its tokens of the encoder's budget."""
        return Media(self.kind, self.key, start, length, tokens, self.shape, self.dtype, self.data)


class Processor(Protocol):
    """One kind of media for one model."""

    kind: Kind
    placeholder: int | None
    """The token that the chat template writes for one item; None where none is in the prompt."""
    placeholders: int
    """How many tokens of the prompt one item takes."""
    tokens: int
    """How many tokens of the encoder cache's budget one item takes."""

    def key(self, data: bytes) -> bytes:
        """Return the key of the file ``data``, without looking into it."""
        ...

    def process(self, data: bytes) -> Processed:
        """Return the tensor of the file ``data``.

        Raises :class:`MediaError`. Takes milliseconds: not for the event loop.
        """
        ...
