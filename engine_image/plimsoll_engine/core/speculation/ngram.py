"""Prompt lookup: find an earlier occurrence of the last tokens, and propose the tokens after it.

The index is that of LZ77: a table maps each hash of ``shortest`` tokens to its newest position. An
array maps each position to the previous one with the same hash.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# The table then takes 128 KiB.
MAX_TABLE_BITS = 15
# A lookup compares at most this many positions, from the newest on.
MAX_COMPARED_POSITIONS = 32
NO_POSITION = -1


class NgramIndex:
    """Index of all sequences of ``shortest`` tokens in a text of up to ``max_tokens`` tokens."""

    __slots__ = ("_mask", "_newest", "_previous", "_shortest")

    def __init__(self, shortest: int, max_tokens: int) -> None:
        self._shortest = shortest
        self._mask = (1 << min(MAX_TABLE_BITS, max_tokens.bit_length())) - 1
        self._newest = array("i", [NO_POSITION]) * (self._mask + 1)
        # Previous position with the same hash. Item i belongs to the sequence that ends at token
        # ``shortest + i - 1``.
        self._previous = array("i")

    @property
    def nbytes(self) -> int:
        """Host memory of the index in bytes."""
        return (len(self._newest) + len(self._previous)) * self._newest.itemsize

    def extend(self, tokens: Sequence[int], max_sequences: int) -> int:
        """Index up to ``max_sequences`` more sequences of ``tokens``, and return their number.

        Between calls, tokens may only be appended.
        """
        size = self._shortest
        first = size + len(self._previous)
        last = min(len(tokens) - 1, first + max_sequences - 1)
        for end in range(first, last + 1):
            place = hash(tuple(tokens[end - size : end])) & self._mask
            self._previous.append(self._newest[place])
            self._newest[place] = end
        return max(0, last - first + 1)

    def propose(self, tokens: Sequence[int], max_match_length: int, num_tokens: int) -> list[int]:
        """Return ``num_tokens`` tokens that may follow ``tokens``; empty without a match.

        They follow the longest earlier match with the end of ``tokens``, of up to
        ``max_match_length`` tokens. If too few tokens follow it, they are repeated.
        """
        size, total = self._shortest, len(tokens)
        if total <= size or num_tokens < 1:
            return []
        newest = tuple(tokens[total - size :])
        end = self._newest[hash(newest) & self._mask]
        best, follows = 0, NO_POSITION
        for _ in range(MAX_COMPARED_POSITIONS):
            if end == NO_POSITION:
                break
            if tuple(tokens[end - size : end]) == newest:
                matched = _count_matching(tokens, end, size, max_match_length)
                if matched > best:
                    best, follows = matched, end
                if best >= max_match_length:
                    break
            end = self._previous[end - size]
        if follows == NO_POSITION:
            return []
        found = list(tokens[follows : follows + num_tokens])
        while len(found) < num_tokens:
            found.append(found[len(found) - (total - follows)])
        return found


def _count_matching(tokens: Sequence[int], end: int, num_known: int, max_length: int) -> int:
    # Counts up to ``max_length`` tokens. The first ``num_known`` of them are known to be equal.
    total, matched = len(tokens), num_known
    while matched < min(max_length, end):
        if tokens[end - 1 - matched] != tokens[total - 1 - matched]:
            break
        matched += 1
    return matched
