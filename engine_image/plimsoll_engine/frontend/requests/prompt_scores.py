"""Log probabilities of a prompt's tokens, as they come from workers. Pure."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.messages import worker_ipc

NUMBER_BYTES = 4


class Score(NamedTuple):
    """Of one token: its log probability and rank, and the likeliest ones in falling order."""

    logprob: float
    rank: int
    top_ids: list[int]
    top: list[float]


class PromptScores:
    """The scores of a prompt of ``length`` tokens, with ``most`` of the likeliest tokens each.

    The first token has none. A worker that computes the prompt again tells them again: what is
    known already stays. At most 8 bytes a token, and 8 for each of the likeliest ones.
    """

    def __init__(self, length: int, most: int) -> None:
        self.most = most
        self._wanted = max(0, length - 1)
        self._chosen, self._ranks = bytearray(), bytearray()
        self._top_ids, self._top = bytearray(), bytearray()

    def __len__(self) -> int:
        return len(self._chosen) // NUMBER_BYTES

    @property
    def complete(self) -> bool:
        """Whether all tokens but the first one have theirs."""
        return len(self) == self._wanted

    @property
    def nbytes(self) -> int:
        """Memory of the numbers."""
        return (2 + 2 * self.most) * NUMBER_BYTES * len(self)

    def add(self, message: worker_ipc.PromptScores) -> None:
        """Take in what is new of ``message``; what leaves a gap is not."""
        count = len(message.chosen) // NUMBER_BYTES
        known = len(self) - (message.first - 1)
        if known < 0 or message.first < 1:
            return
        end = min(count, self._wanted - message.first + 1)
        for mine, theirs, width in (
            (self._chosen, message.chosen, 1),
            (self._ranks, message.ranks, 1),
            (self._top_ids, message.top_ids, self.most),
            (self._top, message.top, self.most),
        ):
            size = width * NUMBER_BYTES
            mine.extend(theirs[known * size : max(known, end) * size])

    def of(self, place: int) -> Score:
        """Return the score of the token at ``place`` of the prompt, 1 or more."""
        row, most = place - 1, self.most
        chosen, ranks = memoryview(self._chosen).cast("f"), memoryview(self._ranks).cast("i")
        ids, top = memoryview(self._top_ids).cast("i"), memoryview(self._top).cast("f")
        columns = slice(row * most, (row + 1) * most)
        likeliest: list[float] = list(top[columns])
        return Score(chosen[row], ranks[row], ids[columns].tolist(), likeliest)
