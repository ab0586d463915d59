"""Log probabilities of a prompt's tokens, which arrive in several messages."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll_engine.messages import worker_ipc

BYTES_PER_NUMBER = 4


class TokenScore(NamedTuple):
    """Log probability and rank of one token, and the likeliest tokens in descending order."""

    logprob: float
    rank: int
    top_ids: list[int]
    top: list[float]


class PromptScores:
    """Scores of a prompt's tokens, each with the ``top_count`` likeliest tokens.

    The first token has no score. If a worker sends scores again, the stored ones are kept.
    """

    def __init__(self, num_tokens: int, top_count: int) -> None:
        self.top_count = top_count
        self._wanted = max(0, num_tokens - 1)
        self._chosen, self._ranks = bytearray(), bytearray()
        self._top_ids, self._top = bytearray(), bytearray()

    def __len__(self) -> int:
        return len(self._chosen) // BYTES_PER_NUMBER

    @property
    def is_complete(self) -> bool:
        """Whether every token except the first has a score."""
        return len(self) == self._wanted

    @property
    def nbytes(self) -> int:
        """Size of the scores in bytes."""
        return (2 + 2 * self.top_count) * BYTES_PER_NUMBER * len(self)

    def add(self, message: worker_ipc.PromptScores) -> None:
        """Add the new scores in ``message``. Ignore a message that would leave a gap."""
        count = len(message.chosen) // BYTES_PER_NUMBER
        skipped = len(self) - (message.first - 1)
        if skipped < 0 or message.first < 1:
            return
        end = min(count, self._wanted - message.first + 1)
        for stored, received, width in (
            (self._chosen, message.chosen, 1),
            (self._ranks, message.ranks, 1),
            (self._top_ids, message.top_ids, self.top_count),
            (self._top, message.top, self.top_count),
        ):
            size = width * BYTES_PER_NUMBER
            stored.extend(received[skipped * size : max(skipped, end) * size])

    def get_score(self, position: int) -> TokenScore:
        """Return the score of the prompt token at index ``position``, which is at least 1."""
        row, top_count = position - 1, self.top_count
        chosen, ranks = memoryview(self._chosen).cast("f"), memoryview(self._ranks).cast("i")
        ids, top = memoryview(self._top_ids).cast("i"), memoryview(self._top).cast("f")
        columns = slice(row * top_count, (row + 1) * top_count)
        likeliest: list[float] = list(top[columns])
        return TokenScore(chosen[row], ranks[row], ids[columns].tolist(), likeliest)
