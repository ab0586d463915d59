"""How large a body may be: what the model could make of it. Pure.

A text fills the context with some 4 bytes a token; escaped Chinese takes 9, token ids take 8. At 32
there is no prompt that fits and is refused. Media come on top, where the model takes them, with
base64's third.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

BYTES_PER_TOKEN = 32
MIN_TEXT_BYTES = MIB
"""Tools, schemas and prompts of a batch, whatever the context."""
MEDIA_BYTES = 32 * MIB
"""All images of a request: one of the largest (20 MiB), or many of usual size."""
FORM_BYTES = 26 * MIB
"""A sound file (25 MiB, as OpenAI takes them) and the fields around it."""
MIN_IN_WORK_BYTES = 64 * MIB
BODIES_IN_WORK = 4
"""Of the largest size, read and prepared at a time: one client has two."""


@dataclass(frozen=True, slots=True)
class BodySizes:
    """The largest body of each path.

    ``sees`` and ``hears`` are the model's; ``max_bytes`` is ``--max-body-bytes``, which holds
    instead of what is derived.
    """

    sees: bool
    hears: bool
    max_bytes: int | None = None

    def text(self, max_model_len: int | None) -> int:
        """Return the largest size of a body without media, in bytes."""
        derived = max(MIN_TEXT_BYTES, BYTES_PER_TOKEN * (max_model_len or 0))
        return derived if self.max_bytes is None else self.max_bytes

    def chat(self, max_model_len: int | None) -> int:
        """Return the largest size of a body that may hold images, in bytes."""
        if self.max_bytes is not None or not self.sees:
            return self.text(max_model_len)
        return self.text(max_model_len) + MEDIA_BYTES

    @property
    def form(self) -> int:
        """Return the largest size of a body with a sound, in bytes."""
        if self.max_bytes is not None:
            return self.max_bytes
        return FORM_BYTES if self.hears else MIB

    def in_work(self, max_model_len: int | None) -> int:
        """Return the largest size of all bodies together, in bytes."""
        largest = max(self.chat(max_model_len), self.form)
        return max(MIN_IN_WORK_BYTES, BODIES_IN_WORK * largest)
