"""Incremental detokenization into whole characters, up to a stop string."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT_CHARACTER = "\ufffd"
# Tokens that may begin a character are held back. A character has at most four bytes, and a
# vocabulary may have a token for each byte.
MAX_PENDING_TOKENS = 32


class Detokenizer:
    """Incremental decoder of the text that follows the tokens in ``context``.

    ``context`` is the end of the prompt. The token IDs in ``skipped`` produce no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context: list[int] = []
        self._pending: list[int] = []
        self._restart(list(context))

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that is now complete, which may be empty."""
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - the library raises bare Exception
            # Bytes that complete no character make the whole byte sequence around them invalid,
            # including characters that were sent already. Decode only the new bytes then.
            piece = self.finish()
            self._restart(self._pending)
            return piece
        if piece is not None:
            self._context, self._pending = self._pending, []
            return piece
        if len(self._pending) <= MAX_PENDING_TOKENS:
            return ""
        piece = self.finish()
        self._restart(self._context)
        return piece

    def finish(self) -> str:
        """Return the remaining text. An incomplete character becomes replacement characters."""
        if not self._pending:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if text.startswith(before):
            return text[len(before) :]
        return self._decode(self._pending)

    def has_text(self, token_id: int) -> bool:
        """Report whether the token produces text."""
        return token_id not in self._skipped

    def _restart(self, context: list[int]) -> None:
        self._context, self._pending = context, []
        self._stream = DecodeStream(ids=context, skip_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def find_special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the IDs of the special tokens of ``tokenizer``."""
    added = tokenizer.get_added_tokens_decoder().items()
    return frozenset(number for number, token in added if token.special)


def find_prompt_context(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int] = frozenset()
) -> list[int]:
    """Return the shortest end of a prompt that decodes to whole characters.

    The list is empty if the last tokens have no text.
    """
    shown = [
        token_id for token_id in prompt_ids[-2 * MAX_PENDING_TOKENS :] if token_id not in skipped
    ]
    for end in range(len(shown), max(0, len(shown) - 4), -1):
        for start in range(end - 1, max(-1, end - MAX_PENDING_TOKENS - 1), -1):
            ids = shown[start:end]
            text = tokenizer.decode(ids, skip_special_tokens=False)
            if text and not text.endswith(REPLACEMENT_CHARACTER):
                return ids
    return []


class StopMatcher:
    """Matcher that ends a text at the first stop string, and holds back partial matches."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop  # whether the text ends after the stop string
        self._held = ""
        # By stop string. An overlap grows by no more than the new text.
        self._overlaps = [0] * len(self._stops)
        # Stop string that ended the text; None if there was none so far.
        self.matched_stop: str | None = None

    @property
    def held_text(self) -> str:
        """Text that is held back because it may be the beginning of a stop string."""
        return self._held

    def push(self, piece: str) -> tuple[str, bool]:
        """Add text. Return the text that can be sent now, and whether a stop string was found."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        matches = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            start, self.matched_stop = min(matches, key=lambda match: match[0])
            return text[: start + len(self.matched_stop) if self._include else start], True
        self._overlaps = [
            find_overlap(text, stop, before + len(piece))
            for stop, before in zip(self._stops, self._overlaps, strict=True)
        ]
        keep = max(self._overlaps)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """Return the text that was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


def find_overlap(text: str, stop: str, max_length: int = sys.maxsize) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``.

    The overlap must not be longer than ``max_length``.
    """
    for length in range(min(len(text), len(stop) - 1, max_length), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
