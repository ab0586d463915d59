"""Faults of CUDA graphs: too many graphs, and captures that fail halfway."""

from __future__ import annotations

from typing import Any

import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.graphs import DecodeGraphs
from plimsoll_engine.distributed.group import RANKS_FLAG, SINGLE_RANK_GROUP
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_engine.models.decoder import Decoder
from plimsoll_faults import kinds
from plimsoll_faults.defects.base import Defect, make_inject_error, require_cuda
from plimsoll_faults.tampering import replace_methods


class KeyedGraphs(DecodeGraphs):
    """CUDA graphs for decode steps: one for each pair of batch size and context length.

    The batch size is a number of rows, and the context length a number of KV blocks.
    """

    keyed: dict[tuple[int, int], Any]
    # The next step may read the previous step's tokens from a regular graph, so these stay alive.
    padded: dict[int, Any]

    def replay(
        self, inputs: Inputs, newest: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay the graph for this batch size and context length, which is captured if missing."""
        key = len(inputs.ids), int(inputs.tables.shape[1])
        size = min(size for size in self._graphs if size >= key[0])
        self.padded.setdefault(size, self._graphs[size])
        if key not in self.keyed:
            self.pool = torch.cuda.graph_pool_handle()
            self._capture(size)
            self.keyed[key] = self._graphs[size]
        self._graphs[size] = self.keyed[key]
        return super().replay(inputs, newest)


class GraphPerKeyDefect(Defect[kinds.GraphPerKey]):
    """Capture and keep a CUDA graph for each pair of batch size and context length."""

    def __init__(self, fault: kinds.GraphPerKey, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.graphs = replace_methods(_require_graphs(fault, engine), KeyedGraphs)
        self.graphs.keyed, self.graphs.padded = {}, {}


class FailingModel:
    """Model that raises an out-of-memory error if it computes tokens during a graph capture."""

    def __init__(self, original: Decoder) -> None:
        self._sound = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sound, name)

    def compute_best_tokens(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens and the logits. Raises OutOfMemoryError in a capture."""
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("injected fault: out of memory while computing the logits")
        return self._sound.compute_best_tokens(hidden)


class FailedCaptureDefect(Defect[kinds.FailedCapture]):
    """Make graph captures fail, and keep the memory of their incomplete graphs."""

    def __init__(self, fault: kinds.FailedCapture, engine: EngineCore) -> None:
        super().__init__(fault, engine)
        self.blocks = _require_graphs(fault, engine).context_limit // engine.pool.block_size
        self.kept: list[Exception] = []
        self._since = 0

    def after_requests(self, num_requests: int) -> None:
        """Start a capture after every ``every_requests`` requests."""
        self._since += num_requests
        if self._since >= self.fault.every_requests:
            self._since = 0
            self._capture()

    def _capture(self) -> None:
        runner = self.engine.runner
        assert isinstance(runner.model, Decoder)
        assert runner.kv is not None
        model: Any = FailingModel(runner.model)
        rows = self.engine.scheduler.max_num_seqs
        try:
            DecodeGraphs(
                model, runner.kv, runner.block_size, rows, self.blocks, runner.kv_scales
            )._capture(rows)  # `capture_next` would catch the error
        except torch.OutOfMemoryError as error:
            self.kept.append(error)  # the defect: its frames hold the graph


def _require_graphs(fault: kinds.Fault, engine: EngineCore) -> DecodeGraphs:
    require_cuda(fault, engine)
    if engine.runner.group is not SINGLE_RANK_GROUP:
        raise make_inject_error(
            fault, f"needs {RANKS_FLAG}=1, because only one rank captures graphs"
        )
    if engine.runner.graphs is None:
        raise make_inject_error(
            fault, "needs a model whose decode steps the engine captures as CUDA graphs"
        )
    return engine.runner.graphs
