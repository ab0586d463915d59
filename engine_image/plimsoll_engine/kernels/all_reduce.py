"""All-reduce on one rank: select the kernel, and launch it with the buffers of all ranks."""

from __future__ import annotations

import torch

from plimsoll_engine.kernels.all_reduce_kernels import (
    copy_own_rows,
    sum_shared,
    sum_whole,
    sum_words,
)
from plimsoll_engine.kernels.collective_buffer import COUNTER_INDEX, BufferLayout
from plimsoll_engine.kernels.overlap import get_launch_options
from plimsoll_engine.kernels.sizes import (
    cdiv,
    choose_rows_per_program,
    choose_warps,
    next_power_of_2,
)

# A kernel that has waited this long for another rank traps.
TIMEOUT_NS = 60_000_000_000
# By number of ranks. Words need no signals, but double the bytes that a rank sends. With more rows,
# the bytes take longer than the signals. Measured with bench/rank_sums.py on two and four H100s.
MAX_WORD_ROWS = {2: 64, 4: 8}
# By number of ranks. With more rows, each rank sums a share of the rows. It then waits twice, but
# sends and receives only about twice its part. Two ranks always sum all rows, because sharing would
# save no bytes.
MAX_ONE_SHOT_ROWS = {4: 40}
# Its limits apply to numbers of ranks that were not measured.
FALLBACK_RANKS = 4
# Number of blocks whose results a program waits for.
BLOCKS_PER_WAIT = 1024


def choose_layout(
    num_ranks: int, max_rows: int, num_columns: int, dtype: torch.dtype
) -> BufferLayout:
    """Return the buffer layout for sums of up to ``max_rows`` rows of ``num_columns`` elements."""
    words = (
        MAX_WORD_ROWS.get(num_ranks, MAX_WORD_ROWS[FALLBACK_RANKS]) if dtype.itemsize == 2 else 0
    )
    whole = (
        max_rows
        if num_ranks == 2
        else MAX_ONE_SHOT_ROWS.get(num_ranks, MAX_ONE_SHOT_ROWS[FALLBACK_RANKS])
    )
    return BufferLayout(
        num_ranks, max_rows, num_columns, dtype.itemsize, min(words, max_rows), whole
    )


class AllReduce:
    """All-reduce of tensors [rows, columns] over all ranks, through buffers of one ``layout``.

    ``buffer`` uint8 [bytes] is this rank's buffer, initially zeros. ``addresses`` are those of all
    ranks' buffers in this process. All ranks must compute the same sums in the same order.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        addresses: list[int],
        rank: int,
        layout: BufferLayout,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self._dtype = dtype
        self.header = buffer[: (COUNTER_INDEX + 1) * 8].view(torch.int64)
        self.header[: len(addresses)] = torch.tensor(addresses, dtype=torch.int64)
        nbytes = layout.max_result_rows * layout.columns * layout.itemsize
        results = buffer[layout.results_offset : layout.results_offset + nbytes]
        self._results = results.view(dtype).view(layout.max_result_rows, layout.columns)
        self._block = next_power_of_2(layout.columns)
        self.wait_ns = TIMEOUT_NS if buffer.is_cuda else 0

    def supports(self, x: torch.Tensor) -> bool:
        """Report whether :meth:`add_norm` supports the shape and dtype of ``x``."""
        rows, columns = x.shape
        layout = self.layout
        return 0 < rows <= layout.rows and columns == layout.columns and x.dtype == self._dtype

    def is_split_by_rank(self, x: torch.Tensor) -> bool:
        """Report whether :meth:`add_norm` of ``x`` updates only a share of the rows."""
        return self.supports(x) and len(x) > self.layout.whole_rows

    def get_own_rows(self, residual: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the rows at ``index`` int [rows] of ``residual``; zeros for other ranks' rows."""
        rows, columns = residual.shape
        out = residual.new_empty(len(index), columns)
        copy_own_rows[(len(index),)](
            residual, index, out, columns, self.rank, RANKS=self.layout.ranks,
            ROWS=choose_rows_per_program(rows, self._block), BLOCK=self._block,
            num_warps=choose_warps(self._block), **get_launch_options(residual.device),
        )  # fmt: skip
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum of all ranks' ``x`` to ``residual`` in place, and return the RMSNorm.

        If :meth:`is_split_by_rank`, only this rank's share of ``residual`` is updated, and the
        result is valid until the next sum.
        """
        layout, rows = self.layout, len(x)
        x = x.contiguous()
        shared = rows > layout.whole_rows
        out = self._results[:rows] if shared else torch.empty_like(x)
        pointers = x, residual, weight, out, self.header
        common = {"RANKS": layout.ranks, "TIMEOUT_NS": self.wait_ns, **get_launch_options(x.device)}
        if rows <= layout.word_rows and layout.itemsize == 2:
            sum_words[(rows,)](
                *pointers, self.rank, layout.columns, eps, WORDS=layout.words_offset,
                WORD_ROWS=layout.word_rows, BLOCK=self._block // 2,
                num_warps=choose_warps(self._block), **common,
            )  # fmt: skip
            return out
        at_once = choose_rows_per_program(rows, self._block)
        blocks = cdiv(rows, at_once)
        sizes = self.rank, rows, layout.columns, eps
        common |= {
            "ARRIVED": layout.part_signals_offset, "PARTS": layout.parts_offset,
            "MAX_ROWS": layout.rows, "PART_ROWS": layout.max_part_rows,
            "PAD": next_power_of_2(layout.ranks), "ROWS": at_once,
            "BLOCK": self._block, "num_warps": choose_warps(self._block * at_once),
        }  # fmt: skip
        if not shared:
            sum_whole[(blocks,)](*pointers, *sizes, **common)
        else:
            sum_shared[(blocks + cdiv(blocks, BLOCKS_PER_WAIT),)](
                *pointers, *sizes, blocks, FINISHED=layout.result_signals_offset,
                RESULTS=layout.results_offset, BLOCKS_PER_WAIT=BLOCKS_PER_WAIT, **common,
            )  # fmt: skip
        return out
