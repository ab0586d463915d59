"""Layout of the buffer that each rank shares with the others for collectives.

All ranks map the buffers of all ranks. Consecutive collectives alternate between two halves of the
buffer. When a rank starts a collective, it has received the signals of all others in the previous
one. No rank then still reads the half that is written next, so one exchange of signals per
collective is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 16
COUNTER_INDEX = MAX_RANKS
"""Index of the counter in the int64 header, after the addresses of all ranks' buffers."""
BUFFER_ALIGNMENT_BYTES = 256
NUM_HALVES = 2
SIGNAL_BYTES = 4
WORD_BYTES = 8
"""Size of a word: :data:`PAYLOAD_BYTES` bytes of a row, and the number of the sum."""
PAYLOAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout for sums of up to ``rows`` rows with ``columns`` elements of ``itemsize`` bytes.

    Up to ``word_rows`` rows are sent in words. Up to ``whole_rows`` rows, at least ``word_rows``,
    every rank sums all rows. With more rows, each rank sums a share of them. Offsets are in bytes.
    """

    ranks: int
    rows: int
    columns: int
    itemsize: int
    word_rows: int
    whole_rows: int

    @property
    def row_words(self) -> int:
        """Number of words per row."""
        return self.columns * self.itemsize // PAYLOAD_BYTES

    @property
    def max_part_rows(self) -> int:
        """Maximum number of rows that a rank sends to another rank in one sum."""
        return max(min(self.rows, self.whole_rows), -(-self.rows // self.ranks))

    @property
    def part_nbytes(self) -> int:
        """Maximum number of bytes that a rank sends to another rank in one collective."""
        return self.max_part_rows * self.columns * self.itemsize

    @property
    def max_result_rows(self) -> int:
        """Maximum number of result rows that other ranks write to this buffer."""
        return self.rows if self.rows > self.whole_rows else 0

    @property
    def arrived(self) -> int:
        """Offset of the signals for parts, int32 [half, source, block].

        A signal is the number of the latest sum whose part has arrived.
        """
        return _align((COUNTER_INDEX + 1) * 8)

    @property
    def finished(self) -> int:
        """Offset of the signals for results, int32 [half, block].

        A signal is the number of the latest sum whose result has arrived.
        """
        return _align(self.arrived + NUM_HALVES * self.ranks * self.rows * SIGNAL_BYTES)

    @property
    def words(self) -> int:
        """Offset of the words, int64 [half, source, row, word]."""
        return _align(self.finished + NUM_HALVES * self.rows * SIGNAL_BYTES)

    @property
    def parts(self) -> int:
        """Offset of the parts, [half, other rank, row, column] in the sum's dtype."""
        return _align(
            self.words + NUM_HALVES * self.ranks * self.word_rows * self.row_words * WORD_BYTES
        )

    @property
    def results(self) -> int:
        """Offset of the results of shared sums, [row, column] in the sum's dtype."""
        sources = NUM_HALVES * (self.ranks - 1)
        return _align(self.parts + sources * self.part_nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return _align(self.results + self.max_result_rows * self.columns * self.itemsize)


def _align(nbytes: int) -> int:
    return -(-nbytes // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
