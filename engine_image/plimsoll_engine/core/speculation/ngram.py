"""Prompt lookup: what followed the newest tokens when they last stood in the same text.

The index is LZ77's: a table of hashed runs of ``shortest`` tokens, and for each place of the text
the one before it with the same hash. A look walks a bounded chain, a step takes in a bounded number
of tokens, and the memory is bounded: 4 bytes a token and the table. Nothing here knows a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TABLE_BITS = 15
"""Of the largest table: 128 KiB. A longer text has longer chains."""
CANDIDATES = 32
"""Places that one look compares at most, the newest first."""
NOWHERE = -1


class NgramIndex:
    """Where each run of ``shortest`` tokens stands in a text of at most ``length`` tokens."""

    __slots__ = ("_before", "_mask", "_newest", "_shortest")

    def __init__(self, shortest: int, length: int) -> None:
        self._shortest = shortest
        self._mask = (1 << min(TABLE_BITS, length.bit_length())) - 1
        self._newest = array("i", [NOWHERE]) * (self._mask + 1)
        self._before = array("i")
        """Item i is of the run whose last token is token ``shortest + i - 1``."""

    @property
    def nbytes(self) -> int:
        """Host memory of the index."""
        return (len(self._newest) + len(self._before)) * self._newest.itemsize

    def extend(self, tokens: Sequence[int], most: int) -> int:
        """Take in at most ``most`` more runs of ``tokens``, a text that only grew; how many.

        The run that the text ends with is left out: nothing has followed it yet.
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
        """Return ``count`` tokens that may follow ``tokens``, none where no run is known.

        They follow the longest match of at most ``longest`` tokens, of equal ones the newest. A
        match close to the end continues with its own proposals, so a loop is proposed as a loop.
        """
        size, total = self._shortest, len(tokens)
        if total <= size or count < 1:
            return []
        newest = tuple(tokens[total - size :])
        end = self._newest[hash(newest) & self._mask]
        best, follows = 0, NOWHERE
        for _ in range(CANDIDATES):
            if end == NOWHERE:
                break
            if tuple(tokens[end - size : end]) == newest:
                matched = _matched(tokens, end, size, longest)
                if matched > best:
                    best, follows = matched, end
                if best >= longest:
                    break
            end = self._before[end - size]
        if follows == NOWHERE:
            return []
        found = list(tokens[follows : follows + count])
        while len(found) < count:
            found.append(found[len(found) - (total - follows)])
        return found


def _matched(tokens: Sequence[int], end: int, known: int, longest: int) -> int:
    """Return how many tokens before ``end`` are those that the text ends with, at most so many."""
    total, matched = len(tokens), known
    while matched < min(longest, end):
        if tokens[end - 1 - matched] != tokens[total - 1 - matched]:
            break
        matched += 1
    return matched
