"""Restrictions on the next token: ``allowed_token_ids`` and ``bad_words``, as in vLLM. Pure.

Both depend on the output alone, so they hold after a request is carried over to another worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WORD_BITS = 32


def mask(token_ids: Iterable[int]) -> bytes:
    """Return the bit mask of the allowed tokens, long enough for the largest of them.

    The bit of token t is bit t % 32 of little-endian int32 word t // 32, as in a grammar's mask.
    """
    allowed = list(token_ids)
    words = max(allowed, default=0) // WORD_BITS + 1
    found = bytearray(words * WORD_BITS // 8)
    for token in allowed:
        found[token // 8] |= 1 << token % 8
    return bytes(found)


def banned(words: Sequence[Sequence[int]], output: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that would complete one of ``words`` after ``output``."""
    found: dict[int, None] = {}
    for word in words:
        before = len(word) - 1
        if not before or (len(output) >= before and list(output[-before:]) == list(word[:-1])):
            found[word[-1]] = None
    return tuple(found)


def reach(words: Sequence[Sequence[int]]) -> int:
    """Return how many preceding tokens the bad words depend on; 0 for none."""
    return max((len(word) - 1 for word in words), default=0)
