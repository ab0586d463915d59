"""One rank's end of the sums over the ranks: its own buffer, the others', and which kernel is when.

See :mod:`plimsoll_engine.kernels.rank_sum_kernels` for what the kernels do.
"""

from __future__ import annotations

import torch
import triton

from plimsoll_engine.kernels.overlap import overlap
from plimsoll_engine.kernels.rank_sum_kernels import sum_shared, sum_whole, sum_words
from plimsoll_engine.kernels.rank_sum_layout import STATE, Layout

WAIT_NS = 60_000_000_000
"""A kernel that has waited so long for another rank ends with an error. As long as other
collectives may take."""


WORD_ROWS = 64
"""So many rows at most are sent in words (``bench/rank_sums.py``)."""
WHOLE_ROWS = 512
"""So many rows at most every rank sums by itself: each then receives a row of every other one,
instead of twice the share of a row. With two ranks that is as much, and takes one signal less."""


def layout(ranks: int, rows: int, columns: int, dtype: torch.dtype) -> Layout:
    """Return the buffer for sums of at most ``rows`` rows of ``columns`` elements over ``ranks``.

    More ranks sum fewer rows each by itself: what it receives grows with them.
    """
    words = WORD_ROWS if dtype.itemsize == 2 else 0
    whole = WHOLE_ROWS // (ranks - 1)
    return Layout(ranks, rows, columns, dtype.itemsize, min(words, rows), whole)


class RankSums:
    """Sums of [rows, columns] over all ranks, whose buffers have ``layout``.

    ``buffer`` uint8 [bytes] is this rank's, all zeros before any rank's first sum. ``addresses``
    are those of all ranks' buffers in this process, in the order of the ranks. Every rank computes
    the same sums in the same order.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        addresses: list[int],
        rank: int,
        layout: Layout,
        dtype: torch.dtype,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._dtype = dtype
        self._header = buffer[: (STATE + 1) * 8].view(torch.int64)
        self._header[: len(addresses)] = torch.tensor(addresses, dtype=torch.int64)
        results = buffer[layout.results :][: layout.rows * layout.columns * layout.itemsize]
        self._results = results.view(dtype).view(layout.rows, layout.columns)
        self._block = triton.next_power_of_2(layout.columns)
        self._wait_ns = WAIT_NS if buffer.is_cuda else 0

    def takes(self, x: torch.Tensor) -> bool:
        """Whether :meth:`add_norm` computes sums of this shape and dtype."""
        rows, columns = x.shape
        layout = self._layout
        return 0 < rows <= layout.rows and columns == layout.columns and x.dtype == self._dtype

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add all ranks' ``x`` to ``residual`` in place and return the norm of that.

        As :meth:`plimsoll_engine.kernels.ops.Ops.add_rms_norm`. With more rows than
        ``layout.whole_rows`` a rank keeps only its share of ``residual``, which the next sum takes
        as it is, and what is returned is good until then.
        """
        layout, rows = self._layout, len(x)
        pointers = x.contiguous(), residual, weight
        if rows <= layout.word_rows and layout.itemsize == 2:
            return self._words(*pointers, eps)
        # Few rows: one a program, so that there are many.
        at_once = max(1, min(4096 // self._block, triton.cdiv(rows, 528)))
        at_once = triton.next_power_of_2(at_once)
        grid = (triton.cdiv(rows, at_once),)
        common = {
            "ARRIVED": layout.arrived, "PARTS": layout.parts, "MAX_ROWS": layout.rows,
            "PART_ROWS": layout.part_rows, "RANKS": layout.ranks, "ROWS": at_once,
            "BLOCK": self._block, "WAIT_NS": self._wait_ns,
            "num_warps": _warps(self._block * at_once), **overlap(x.device),
        }  # fmt: skip
        sizes = self._header, self._rank, rows, layout.columns, eps
        if rows <= layout.whole_rows:
            out = torch.empty_like(x)
            sum_whole[grid](*pointers, out, *sizes, **common)
            return out
        out = self._results[:rows]
        sum_shared[grid](
            *pointers, out, *sizes, FINISHED=layout.finished, RESULTS=layout.results, **common
        )
        return out

    def _words(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        layout, out = self._layout, torch.empty_like(x)
        half = self._block // 2
        sum_words[(len(x),)](
            x, residual, weight, out, self._header, self._rank, layout.columns, eps,
            WORDS=layout.words, WORD_ROWS=layout.word_rows, RANKS=layout.ranks, BLOCK=half,
            WAIT_NS=self._wait_ns, num_warps=_warps(self._block), **overlap(x.device),
        )  # fmt: skip
        return out


def _warps(elements: int) -> int:
    """Of a program that sums so many elements."""
    return 8 if elements > 2048 else 4
