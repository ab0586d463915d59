"""Size limits of request bodies, derived from the model.

With 32 bytes per token, every prompt that fits into the context is accepted. The size of media is
added, with base64's overhead of a third.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

BYTES_PER_TOKEN = 32
# For tools, schemas and batches of prompts, regardless of the context.
MIN_TEXT_BYTES = MIB
# One image of maximum size (20 MiB), or many smaller ones.
MAX_MEDIA_BYTES = 32 * MIB
# An audio file (25 MiB, as in OpenAI's API) and other fields.
MAX_FORM_BYTES = 26 * MIB
MIN_BUFFER_BYTES = 64 * MIB
# Bodies of maximum size that fit into memory. A client may have two of them.
NUM_BUFFERED_BODIES = 4


@dataclass(frozen=True, slots=True)
class BodySizes:
    """Size limits of bodies by path. ``max_bytes`` replaces the derived limits."""

    accepts_images: bool
    accepts_audio: bool
    max_bytes: int | None = None

    def compute_text_limit(self, max_model_len: int | None) -> int:
        """Return the maximum size of a body without media, in bytes."""
        derived = max(MIN_TEXT_BYTES, BYTES_PER_TOKEN * (max_model_len or 0))
        return derived if self.max_bytes is None else self.max_bytes

    def compute_chat_limit(self, max_model_len: int | None) -> int:
        """Return the maximum size of a chat in bytes, including images."""
        if self.max_bytes is not None or not self.accepts_images:
            return self.compute_text_limit(max_model_len)
        return self.compute_text_limit(max_model_len) + MAX_MEDIA_BYTES

    @property
    def form_limit(self) -> int:
        """Maximum size in bytes of a form with an audio file."""
        if self.max_bytes is not None:
            return self.max_bytes
        return MAX_FORM_BYTES if self.accepts_audio else MIB

    def compute_buffer_bytes(self, max_model_len: int | None) -> int:
        """Return the memory budget for all bodies together, in bytes."""
        largest = max(self.compute_chat_limit(max_model_len), self.form_limit)
        return max(MIN_BUFFER_BYTES, NUM_BUFFERED_BODIES * largest)
