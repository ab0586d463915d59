"""Capture the layers of prefill steps as CUDA graphs, with two launches per layer instead of nine.

Attention depends on the sequence lengths, so it is launched between the graphs. A step is padded to
the next captured number of rows. Padding rows write nothing to the KV pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

from plimsoll_engine.kernels.sizes import cdiv
from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.models.decoder import Decoder

log = logging.getLogger(__name__)

# Matrix products compute tiles of this many rows anyway, so padding costs little.
CAPTURED_ROWS_STEP = 128
# Longer steps need no graphs, because the host does not delay them.
MAX_CAPTURED_ROWS = 1408
# Each piece delays a step by milliseconds.
MAX_PIECES_PER_CALL = 4


class GraphPiece(Protocol):
    """Captured piece of a step, with a part of the interface of :class:`torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Run the captured kernels on the captured tensors."""

    def reset(self) -> None:
        """Free the captured piece."""


class GraphCapturer:
    """Function that captures graphs in one memory ``pool``.

    The graphs share the pool's memory, so they must never run at the same time.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], None]) -> GraphPiece:
        """Return a graph of the kernels that ``compute`` launches."""
        # torch.cuda.graph would empty torch's memory cache before each capture.
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            compute()  # compiles kernels and creates library handles, which a capture may not do
            graph.capture_begin(self._pool)
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError):  # the capture may have ended with the error
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph


class LayerGraphs:
    """CUDA graphs of the pieces of a model. Each piece ends at the attention of a layer.

    The last layer is not captured, because it computes only the rows whose output is used.
    """

    def __init__(
        self,
        model: Decoder,
        kv: torch.Tensor,
        block_size: int,
        scales: torch.Tensor | None,
        capture_graph: Callable[[Callable[[], None]], GraphPiece],
        max_rows: int,
    ) -> None:
        """Prepare steps of up to ``max_rows`` rows, but at most :data:`MAX_CAPTURED_ROWS`."""
        sizes = range(
            CAPTURED_ROWS_STEP,
            CAPTURED_ROWS_STEP * cdiv(min(max_rows, MAX_CAPTURED_ROWS), CAPTURED_ROWS_STEP) + 1,
            CAPTURED_ROWS_STEP,
        )
        self._model: Decoder | None = model
        self._capture = capture_graph
        # The largest comes first, because its memory suffices for the others.
        self._missing = list(reversed(sizes))
        self._pieces: dict[int, list[GraphPiece]] = {}
        # Pieces of the first missing size that are already captured.
        self._captured_pieces: list[GraphPiece] = []
        rows, device, dtype, spec = sizes[-1], kv.device, model.dtype, model.spec
        self._ids, self._positions = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._slots = torch.full_like(self._ids, -1)
        self._stream, self._x = torch.zeros(2, rows, spec.hidden, dtype=dtype, device=device)
        heads = spec.heads, spec.dim
        self._query, self._attended = torch.zeros(2, rows, *heads, dtype=dtype, device=device)
        self._rotary = torch.zeros(rows, spec.dim, device=device)
        self._kv: torch.Tensor | None = kv
        self._scales, self._block_size = scales, block_size
        own = self._ids, self._positions, self._slots, self._rotary
        both = self._stream, self._x, self._query, self._attended
        self.nbytes = sum(tensor.nbytes for tensor in (*own, *both))

    @property
    def has_uncaptured_sizes(self) -> bool:
        """Whether there are step sizes that are not captured yet."""
        return bool(self._missing)

    def has_graph(self, num_rows: int) -> bool:
        """Report whether all pieces for a step of ``num_rows`` rows are captured."""
        return any(size >= num_rows for size in self._pieces)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture up to :data:`MAX_PIECES_PER_CALL` more pieces. Return False if none is left."""
        if not self._missing:
            return False
        assert self._model is not None
        size, layers = self._missing[0], self._model.spec.layers
        before = torch.cuda.memory_reserved() if self._ids.is_cuda else 0
        try:
            for index in range(
                len(self._captured_pieces),
                min(layers, len(self._captured_pieces) + MAX_PIECES_PER_CALL),
            ):
                self._captured_pieces.append(self._capture(self._create_piece(size, index)))
        except torch.OutOfMemoryError as error:
            # Steps of this size use the next larger graphs, or none.
            log.warning("cannot capture CUDA graphs for steps of %d rows: %s", size, error)
            self._reset_pieces(self._captured_pieces)
            self._captured_pieces = []
            self._missing.pop(0)
        if len(self._captured_pieces) == layers:
            self._pieces[self._missing.pop(0)] = self._captured_pieces
            self._captured_pieces = []
        if self._ids.is_cuda:
            self.nbytes += max(0, torch.cuda.memory_reserved() - before)
        return True

    def _create_piece(self, num_rows: int, index: int) -> Callable[[], None]:
        # The function starts after the attention of layer ``index`` - 1, and ends before that of
        # layer ``index``.
        model, kv, slots = self._model, self._kv, self._slots[:num_rows]
        assert model is not None
        assert kv is not None
        nothing = torch.zeros(1, dtype=torch.int32, device=kv.device)
        # Created for each piece: a stored view would count as another reference to the pool.
        plan = StepPlan(
            kv[0], kv[1], self._block_size, slots, nothing.view(1, 1), nothing, nothing, decodes=0,
            scales=self._scales,
        )  # fmt: skip
        stream, rotary, last = (
            self._stream[:num_rows],
            self._rotary[:num_rows],
            model.spec.layers - 1,
        )

        def compute() -> None:
            if index:
                x = model.finish_layer(stream, self._attended[:num_rows], index - 1)
            else:
                begun, x, angles = model.begin_forward(
                    self._ids[:num_rows], self._positions[:num_rows]
                )
                stream.copy_(begun)
                rotary.copy_(angles)
            if index < last:
                model.compute_query(x, rotary, index, plan, self._query[:num_rows])
            else:
                self._x[:num_rows].copy_(x)

        self._slots.fill_(-1)  # so that the capture writes nothing to the pool
        return compute

    def compute(self, ids: torch.Tensor, positions: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Return the hidden states of a step without adapters, as :meth:`Decoder.forward` does.

        Call this only if :meth:`has_graph` returns True for the number of rows.
        """
        model, rows = self._model, len(ids)
        assert model is not None
        size = min(size for size in self._pieces if size >= rows)
        self._ids[:rows].copy_(ids)
        self._positions[:rows].copy_(positions)
        self._slots[:rows].copy_(plan.write_slots)
        self._slots[rows:size].fill_(-1)
        *pieces, last = self._pieces[size]
        query, attended = self._query[:rows], self._attended[:rows]
        for index, piece in enumerate(pieces):
            piece.replay()
            model.attend(query, index, plan, attended)
        last.replay()
        return model.run_last_layer(self._x[:rows], self._stream[:rows], self._rotary[:rows], plan)

    @staticmethod
    def _reset_pieces(pieces: list[GraphPiece]) -> None:
        for piece in pieces:
            piece.reset()

    def close(self) -> None:
        """Free the graphs and their memory. Idempotent."""
        for pieces in (*self._pieces.values(), self._captured_pieces):
            self._reset_pieces(pieces)
        self._pieces, self._captured_pieces, self._missing = {}, [], []
        # A reference to this object must keep neither the KV pool nor the model alive.
        self._model = self._kv = self._scales = None
        self._ids = self._positions = self._slots = self._rotary = torch.empty(0)
        self._stream = self._x = self._query = self._attended = torch.empty(0)
        self.nbytes = 0
