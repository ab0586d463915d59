"""Prompt lookup: find an earlier occurrence of the last tokens, and propose the tokens after it.

The index is that of LZ77. A table maps each hash of ``shortest`` tokens to its newest position. An
array maps each position to the previous position with the same hash, at 4 bytes per token. A lookup
compares a limited number of positions, and a step indexes a limited number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_TABLE_BITS = 15
"""Base-2 logarithm of the maximum number of table entries, which then take 128 KiB."""
MAX_COMPARED_POSITIONS = 32
"""Maximum number of positions that a lookup compares. It starts with the newest."""
NO_POSITION = -1


class NgramIndex:
    """Index of all sequences of ``shortest`` tokens in a text of up to ``length`` tokens."""

    __slots__ = ("_mask", "_newest", "_previous", "_shortest")

    def __init__(self, shortest: int, length: int) -> None:
        self._shortest = shortest
        self._mask = (1 << min(MAX_TABLE_BITS, length.bit_length())) - 1
        self._newest = array("i", [NO_POSITION]) * (self._mask + 1)
        self._previous = array("i")
        """Previous position with the same hash, by position.

        Item i belongs to the sequence that ends at token ``shortest + i - 1``.
        """

    @property
    def nbytes(self) -> int:
        """Host memory of the index in bytes."""
        return (len(self._newest) + len(self._previous)) * self._newest.itemsize

    def extend(self, tokens: Sequence[int], limit: int) -> int:
        """Index up to ``limit`` more sequences of ``tokens``, and return how many were indexed.

        Between calls, tokens may only be appended. The last sequence is not indexed, because no
        token follows it yet.
        """
        size = self._shortest
        first = size + len(self._previous)
        last = min(len(tokens) - 1, first + limit - 1)
        for end in range(first, last + 1):
            place = hash(tuple(tokens[end - size : end])) & self._mask
            self._previous.append(self._newest[place])
            self._newest[place] = end
        return max(0, last - first + 1)

    def propose(self, tokens: Sequence[int], longest: int, count: int) -> list[int]:
        """Return ``count`` tokens that may follow ``tokens``, or an empty list without a match.

        The proposal is the text after the longest earlier match with the end of ``tokens``. Among
        equally long matches, the newest counts. A match has up to ``longest`` tokens. If fewer than
        ``count`` tokens follow it, the proposal repeats them.
        """
        size, total = self._shortest, len(tokens)
        if total <= size or count < 1:
            return []
        newest = tuple(tokens[total - size :])
        end = self._newest[hash(newest) & self._mask]
        best, follows = 0, NO_POSITION
        for _ in range(MAX_COMPARED_POSITIONS):
            if end == NO_POSITION:
                break
            if tuple(tokens[end - size : end]) == newest:
                matched = _count_matching(tokens, end, size, longest)
                if matched > best:
                    best, follows = matched, end
                if best >= longest:
                    break
            end = self._previous[end - size]
        if follows == NO_POSITION:
            return []
        found = list(tokens[follows : follows + count])
        while len(found) < count:
            found.append(found[len(found) - (total - follows)])
        return found


def _count_matching(tokens: Sequence[int], end: int, known: int, longest: int) -> int:
    """Return how many tokens before index ``end`` equal the last tokens of ``tokens``.

    Count up to ``longest`` tokens. The first ``known`` of them are known to be equal.
    """
    total, matched = len(tokens), known
    while matched < min(longest, end):
        if tokens[end - 1 - matched] != tokens[total - 1 - matched]:
            break
        matched += 1
    return matched
