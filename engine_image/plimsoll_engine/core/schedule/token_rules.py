"""Compute which tokens may come next, and the token counts for penalties. Pure.

``allowed_token_ids`` and ``bad_words`` work as in vLLM.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from plimsoll_engine.messages.worker_ipc import Sampling

WORD_BITS = 32
# CPython 3.11.
COUNTED_TOKEN_BYTES = 90


def make_token_mask(token_ids: Iterable[int]) -> bytes:
    """Return the shortest bit mask in which exactly the bits of ``token_ids`` are set.

    The bit of token t is bit t % 32 of the little-endian int32 word t // 32.
    """
    allowed = list(token_ids)
    words = max(allowed, default=0) // WORD_BITS + 1
    found = bytearray(words * WORD_BITS // 8)
    for token in allowed:
        found[token // 8] |= 1 << token % 8
    return bytes(found)


def find_banned_tokens(words: Sequence[Sequence[int]], output: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that would complete one of ``words`` after ``output``."""
    found: dict[int, None] = {}
    for word in words:
        before = len(word) - 1
        if not before or (len(output) >= before and list(output[-before:]) == list(word[:-1])):
            found[word[-1]] = None
    return tuple(found)


def count_bad_word_lookback(words: Sequence[Sequence[int]]) -> int:
    """Return the number of preceding tokens on which the bad ``words`` depend."""
    return max((len(word) - 1 for word in words), default=0)


class TokenCounts:
    """Number of occurrences in the output, for each token of the prompt and the output."""

    __slots__ = ("_indices", "outputs", "tokens")

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> None:
        self.tokens = array("q")
        self.outputs = array("d")
        self._indices: dict[int, int] = {}
        for token in prompt_ids:
            self._get_index(token)
        for token in output_ids:
            self.add(token)

    @classmethod
    def create_if_needed(
        cls, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> TokenCounts | None:
        """Return the counts for the penalties in ``sampling``; None if there are no penalties."""
        if sampling.repetition_penalty != 1.0:
            return cls(prompt_ids, output_ids)
        if sampling.presence_penalty or sampling.frequency_penalty:
            return cls((), output_ids)
        return None

    def __len__(self) -> int:
        return len(self.tokens)

    def copy_with_outputs(self, tokens: Iterable[int]) -> TokenCounts:
        """Return a read-only copy that also counts ``tokens``."""
        copy = TokenCounts((), ())
        copy.tokens, copy.outputs = self.tokens[:], self.outputs[:]
        for token, count in Counter(tokens).items():
            index = self._indices.get(token)
            if index is None:
                copy.tokens.append(token)
                copy.outputs.append(count)
            else:
                copy.outputs[index] += count
        return copy

    def add(self, token: int) -> None:
        """Count one more occurrence of ``token`` in the output."""
        self.outputs[self._get_index(token)] += 1

    def _get_index(self, token: int) -> int:
        index = self._indices.setdefault(token, len(self.tokens))
        if index == len(self.tokens):
            self.tokens.append(token)
            self.outputs.append(0)
        return index
