"""Layout of the buffer that each rank shares with the others for collectives.

Consecutive collectives alternate between two halves of the buffer. One exchange of signals per
collective is enough, because no rank still reads the half that is written next.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 16
# After the addresses of all ranks' buffers in the int64 header.
COUNTER_INDEX = MAX_RANKS
BUFFER_ALIGNMENT_BYTES = 256
NUM_HALVES = 2
SIGNAL_BYTES = 4
# PAYLOAD_BYTES of a row, and the number of the sum.
WORD_BYTES = 8
PAYLOAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Layout for sums of up to ``rows`` rows with ``columns`` elements of ``itemsize`` bytes.

    Up to ``word_rows`` rows are sent in words, and up to ``whole_rows`` rows are summed by every
    rank. Offsets are in bytes.
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
    def part_signals_offset(self) -> int:
        """Offset of the numbers of the latest parts received, int32 [half, source, block]."""
        return _align((COUNTER_INDEX + 1) * 8)

    @property
    def result_signals_offset(self) -> int:
        """Offset of the numbers of the latest results received, int32 [half, block]."""
        return _align(self.part_signals_offset + NUM_HALVES * self.ranks * self.rows * SIGNAL_BYTES)

    @property
    def words_offset(self) -> int:
        """Offset of the words, int64 [half, source, row, word]."""
        return _align(self.result_signals_offset + NUM_HALVES * self.rows * SIGNAL_BYTES)

    @property
    def parts_offset(self) -> int:
        """Offset of the parts, [half, other rank, row, column] in the sum's dtype."""
        return _align(
            self.words_offset
            + NUM_HALVES * self.ranks * self.word_rows * self.row_words * WORD_BYTES
        )

    @property
    def results_offset(self) -> int:
        """Offset of the results of shared sums, [row, column] in the sum's dtype."""
        sources = NUM_HALVES * (self.ranks - 1)
        return _align(self.parts_offset + sources * self.part_nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return _align(self.results_offset + self.max_result_rows * self.columns * self.itemsize)


def _align(nbytes: int) -> int:
    return -(-nbytes // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
