"""Which tokens a request may choose: those that it allows, and none that make a bad word. Pure.

Both are vLLM's (``allowed_token_ids``, ``bad_words``), and both depend on the output alone, so a
request that is carried to another worker goes on under the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WORD_BITS = 32


def mask(token_ids: Iterable[int]) -> bytes:
    """Return the mask of the allowed tokens, as long as the largest of them needs.

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
    """Return how many tokens before the next one the rules look at; 0 for none."""
    return max((len(word) - 1 for word in words), default=0)
