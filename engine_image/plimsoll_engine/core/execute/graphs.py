"""Capture decode steps as CUDA graphs. A step then needs one launch instead of hundreds.

A batch is padded to the next captured size. All graphs share one input buffer and one memory pool,
so they must never run at the same time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable

import numpy as np
import torch

from plimsoll_engine.distributed.group import SINGLE_RANK_GROUP
from plimsoll_engine.kernels.choose import choose_ops
from plimsoll_engine.kernels.decode_partition import choose_partition, compute_row_bytes
from plimsoll_engine.kernels.sizes import pad_few_rows
from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_engine.models.decoder import Decoder

log = logging.getLogger(__name__)

# Batch sizes, in rows, for which a decode step is captured.
CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MIN_SIZES_BEFORE_SERVING = 4
# Duration from which a capture is logged as slow.
SLOW_CAPTURE_S = 0.1
# ID, source, position, slot and context, without the table.
INPUTS_PER_ROW = 5


def list_capture_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture, in ascending order up to ``max_rows``."""
    return [size for size in CAPTURE_SIZES if size < max_rows] + [max_rows]


def split_capture_sizes(
    sizes: list[int], get_kind: Callable[[int], Hashable]
) -> tuple[list[int], list[int]]:
    """Return the sizes to capture before the engine serves, and those to capture later.

    ``get_kind`` returns the same value for sizes that use the same kernels. The first list has the
    largest size of each kind, so that no kernel is compiled while the engine serves.
    """
    step = max(1, len(sizes) // (MIN_SIZES_BEFORE_SERVING - 1))
    # The memory of the largest size suffices for all others.
    first = [sizes[-1], *sizes[:-1:step]][:MIN_SIZES_BEFORE_SERVING]
    known = {get_kind(size) for size in first}
    for size in reversed(sizes):
        if get_kind(size) not in known:
            known.add(get_kind(size))
            first.append(size)
    return first, [size for size in reversed(sizes) if size not in first]


class DecodeGraphs:
    """Captured decode steps of one model and its KV pool."""

    def __init__(
        self,
        model: Decoder,
        kv: torch.Tensor,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        scales: torch.Tensor | None = None,
    ) -> None:
        self._model: Decoder | None = model
        self._kv: torch.Tensor | None = kv
        self._scales = scales
        self._block_size = block_size
        self._width = max_blocks
        row_bytes = compute_row_bytes(model.kv.dim, kv.element_size())
        first, rest = split_capture_sizes(
            list_capture_sizes(max_rows),
            lambda size: (
                choose_partition(size, model.kv.heads, row_bytes, self.context_limit),
                size == 1 or pad_few_rows(size),
            ),
        )
        self._first, self._missing = len(first), first + rest
        rows, device = max_rows, kv.device
        self._inputs = torch.zeros(
            rows * (INPUTS_PER_ROW + max_blocks), dtype=torch.int32, device=device
        )
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._newest = torch.zeros(rows, dtype=torch.int64, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.nbytes = self._inputs.nbytes + self._starts.nbytes + self._newest.nbytes

    @property
    def context_limit(self) -> int:
        """Maximum context of a captured step, in tokens."""
        return self._width * self._block_size

    @property
    def has_uncaptured_sizes(self) -> bool:
        """Whether there are batch sizes that are not captured yet."""
        return bool(self._missing)

    def has_graph(self, num_rows: int) -> bool:
        """Report whether a batch of ``num_rows`` rows can be computed by a captured graph."""
        return any(size >= num_rows for size in self._graphs)

    def capture_first_sizes(self) -> None:
        """Capture the sizes that the engine needs before it serves, including the largest."""
        for _ in range(self._first):
            self.capture_next()

    def capture_next(self) -> bool:
        """Capture one more size. Return False if none is left."""
        if not self._missing:
            return False
        size = self._missing.pop(0)
        try:
            self._capture(size)
        except torch.OutOfMemoryError as error:
            # Batches of this size take the next larger graph, or none.
            log.warning("cannot capture a CUDA graph for batches of %d rows: %s", size, error)
        return True

    @torch.inference_mode()
    def _capture(self, num_rows: int) -> None:
        model, kv = self._model, self._kv
        assert model is not None
        assert kv is not None
        ops = choose_ops(kv.device)
        keys, values = kv[0], kv[1]
        ids, sources, positions, slots, contexts = self._inputs[: INPUTS_PER_ROW * num_rows].view(
            INPUTS_PER_ROW, num_rows
        )
        tables = self._inputs[INPUTS_PER_ROW * num_rows : (INPUTS_PER_ROW + self._width) * num_rows]
        step = StepPlan(
            keys, values, self._block_size, slots, tables.view(num_rows, self._width), contexts,
            self._starts[: num_rows + 1], decodes=num_rows, context_limit=self.context_limit,
            scales=self._scales,
        )  # fmt: skip

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            known = ops.take_token_ids(ids, sources, self._newest)
            return model.compute_best_tokens(model.forward(known, positions, step))

        # All rows are padding, so that the warm-up writes nothing to the pool.
        self._inputs.zero_()
        slots.fill_(-1)
        sources.fill_(-1)
        before = torch.cuda.memory_reserved(kv.device)
        begun = time.monotonic()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()  # compiles kernels and creates library handles, which a capture may not do
        torch.cuda.current_stream().wait_stream(stream)
        warm = time.monotonic()
        graph = torch.cuda.CUDAGraph()
        # If NCCL is used, its watchdog queries events in a thread, which a global capture forbids.
        mode = "global" if model.group is SINGLE_RANK_GROUP else "thread_local"
        with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode=mode):
            freed = time.monotonic()  # torch waits for the device, and frees its caches
            tokens, logits = compute()
        ended = time.monotonic()
        if ended - begun >= SLOW_CAPTURE_S:
            log.info(
                "the capture of a CUDA graph for %d rows was slow: compile %.3f s, wait %.3f s,"
                " capture %.3f s",
                num_rows, warm - begun, freed - warm, ended - freed,
            )  # fmt: skip
        self._graphs[num_rows] = graph, tokens, logits
        self.nbytes += max(0, torch.cuda.memory_reserved(kv.device) - before)

    def replay(
        self, inputs: Inputs, newest: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay the graph for ``inputs``. Return each row's greedy token and this rank's logits.

        The tokens are int64 [rows], and the logits [rows, vocabulary / ranks] in the model's dtype.
        The next replay overwrites both. ``newest`` int64 [rows] are the tokens that the previous
        step sampled.
        """
        rows = len(inputs.ids)
        size = min(size for size in self._graphs if size >= rows)
        packed = torch.empty(
            size * (INPUTS_PER_ROW + self._width), dtype=torch.int32, pin_memory=True
        )
        host = packed.numpy()
        fields = host[: INPUTS_PER_ROW * size].reshape(INPUTS_PER_ROW, size)
        fields[:, rows:] = np.array([[0], [-1], [0], [-1], [0]], np.int32)
        for field, values in zip(
            fields,
            (inputs.ids, inputs.sources, inputs.positions, inputs.slots, inputs.contexts),
            strict=True,
        ):
            field[:rows] = values
        tables = host[INPUTS_PER_ROW * size :].reshape(size, self._width)
        tables[:rows, : inputs.tables.shape[1]] = inputs.tables
        self._inputs[: len(packed)].copy_(packed, non_blocking=True)
        if newest is not None:
            self._newest[: len(newest)].copy_(newest, non_blocking=True)
        graph, tokens, logits = self._graphs[size]
        graph.replay()
        return tokens[:rows], logits[:rows]

    def close(self) -> None:
        """Free the graphs and their memory. Idempotent."""
        for graph, _, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._missing.clear()
        # A reference to this object must keep neither the KV pool nor the model alive.
        self._model = self._kv = self._scales = None
        self._inputs = self._starts = self._newest = torch.empty(0)
        self.nbytes = 0
