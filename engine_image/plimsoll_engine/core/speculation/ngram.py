"""Prompt lookup: propose the tokens that followed the newest tokens earlier in the same text.

The index is that of LZ77: a table of hashed runs of ``shortest`` tokens and, for each position, the
previous position with the same hash. A lookup follows a bounded chain, and a step indexes a bounded
number of tokens. The memory is bounded too: 4 bytes per token, and the table.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TABLE_BITS = 15
"""Base-2 logarithm of the maximum table size (128 KiB). Longer texts have longer chains."""
MAX_CANDIDATES = 32
"""Maximum number of positions that a lookup compares, the newest first."""
NO_POSITION = -1


class NgramIndex:
    """Positions of each run of ``shortest`` tokens in a text of at most ``length`` tokens."""

    __slots__ = ("_before", "_mask", "_newest", "_shortest")

    def __init__(self, shortest: int, length: int) -> None:
        self._shortest = shortest
        self._mask = (1 << min(TABLE_BITS, length.bit_length())) - 1
        self._newest = array("i", [NO_POSITION]) * (self._mask + 1)
        self._before = array("i")
        """Previous position with the same hash, for each position.

        Item i belongs to the run that ends at token ``shortest + i - 1``.
        """

    @property
    def nbytes(self) -> int:
        """Host memory of the index in bytes."""
        return (len(self._newest) + len(self._before)) * self._newest.itemsize

    def extend(self, tokens: Sequence[int], most: int) -> int:
        """Index at most ``most`` further runs of ``tokens``, and return their number.

        The text may only grow. The last run is left out, because no token follows it yet.
        """
        size = self._shortest
        first = size + len(self._before)
        last = min(len(tokens) - 1, first + most - 1)
        for end in range(first, last + 1):
            place = hash(tuple(tokens[end - size : end])) & self._mask
            self._before.append(self._newest[place])
            self._newest[place] = end
        return max(0, last - first + 1)

    def propose(self, tokens: Sequence[int], longest: int, count: int) -> list[int]:
        """Return up to ``count`` tokens that may follow ``tokens``; an empty list without a match.

        These are the tokens after the longest match of at most ``longest`` tokens; of equally long
        matches, after the newest. If the text ends before ``count`` tokens, the proposal continues
        with its own tokens, so that a repetition goes on.
        """
        size, total = self._shortest, len(tokens)
        if total <= size or count < 1:
            return []
        newest = tuple(tokens[total - size :])
        end = self._newest[hash(newest) & self._mask]
        best, follows = 0, NO_POSITION
        for _ in range(MAX_CANDIDATES):
            if end == NO_POSITION:
                break
            if tuple(tokens[end - size : end]) == newest:
                matched = _count_matching(tokens, end, size, longest)
                if matched > best:
                    best, follows = matched, end
                if best >= longest:
                    break
            end = self._before[end - size]
        if follows == NO_POSITION:
            return []
        found = list(tokens[follows : follows + count])
        while len(found) < count:
            found.append(found[len(found) - (total - follows)])
        return found


def _count_matching(tokens: Sequence[int], end: int, known: int, longest: int) -> int:
    """Return how many tokens before ``end`` equal the end of the text, at most ``longest``."""
    total, matched = len(tokens), known
    while matched < min(longest, end):
        if tokens[end - 1 - matched] != tokens[total - 1 - matched]:
            break
        matched += 1
    return matched
