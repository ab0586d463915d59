"""Where the ranks' parts of a sum lie in the buffer that each rank shares with the others.

Every rank has one such buffer, and all map all of them. Whatever a sum writes there lies in one of
two halves, which sums take in turn: a rank that begins a sum has heard from all others in the sum
before it, so no rank still reads the half that the sum is about to write. One exchange of signals
per sum is therefore enough.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 16
STATE = MAX_RANKS
"""Which int64 of the header counts the sums; those before it are the ranks' buffers' addresses."""
ALIGNMENT = 256
HALVES = 2
SIGNAL_BYTES = 4
WORD_BYTES = 8
"""A word carries :data:`PAYLOAD_BYTES` of a row, and which sum they are of."""
PAYLOAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """The buffer for sums of at most ``rows`` rows of ``columns`` elements of ``itemsize`` bytes.

    ``word_rows`` of them at most may be sent in words; at most ``whole_rows``, which are no fewer,
    are summed by every rank, and more are shared out. Sizes are in bytes, places are offsets in
    bytes.
    """

    ranks: int
    rows: int
    columns: int
    itemsize: int
    word_rows: int
    whole_rows: int

    @property
    def row_words(self) -> int:
        """Words in which one row is sent."""
        return self.columns * self.itemsize // PAYLOAD_BYTES

    @property
    def part_rows(self) -> int:
        """Rows that one rank may send another in one sum, each of which is a block at most."""
        return max(min(self.rows, self.whole_rows), -(-self.rows // self.ranks))

    @property
    def result_rows(self) -> int:
        """Rows of which another rank may leave the result here."""
        return self.rows if self.rows > self.whole_rows else 0

    @property
    def arrived(self) -> int:
        """int32 [half, source, block]: the sum whose part of ``source`` has arrived."""
        return _aligned((STATE + 1) * 8)

    @property
    def finished(self) -> int:
        """int32 [half, block]: the sum of which another rank has left the result here."""
        return _aligned(self.arrived + HALVES * self.ranks * self.rows * SIGNAL_BYTES)

    @property
    def words(self) -> int:
        """int64 [half, source, row, word]."""
        return _aligned(self.finished + HALVES * self.rows * SIGNAL_BYTES)

    @property
    def parts(self) -> int:
        """[half, source but this rank, row, column] of the dtype of the sum."""
        return _aligned(
            self.words + HALVES * self.ranks * self.word_rows * self.row_words * WORD_BYTES
        )

    @property
    def results(self) -> int:
        """[row, column] of the dtype of the sum, where rows are shared out."""
        sources = HALVES * (self.ranks - 1)
        return _aligned(self.parts + sources * self.part_rows * self.columns * self.itemsize)

    @property
    def nbytes(self) -> int:
        """The whole buffer."""
        return _aligned(self.results + self.result_rows * self.columns * self.itemsize)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
