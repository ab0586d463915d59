"""Run the model on one rank, from the inputs of a step to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from plimsoll_api.admin import MemoryKind, Role
from plimsoll_engine.core.execute.encoder_outputs import EncoderOutputs
from plimsoll_engine.core.execute.graphs import DecodeGraphs
from plimsoll_engine.core.execute.inputs import copy_array_to_device, copy_to_device
from plimsoll_engine.core.execute.layer_graphs import GraphCapturer, LayerGraphs
from plimsoll_engine.core.execute.loaded_adapters import LoadedAdapters, collect_step_adapters
from plimsoll_engine.core.execute.needed_rows import NeededRows, find_needed_rows
from plimsoll_engine.core.execute.prompt_scores import Scores, compute_scores
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.distributed.group import SINGLE_RANK_GROUP, Group
from plimsoll_engine.kernels.choose import choose_ops
from plimsoll_engine.kernels.step_plan import NeededPlan, StepPlan
from plimsoll_engine.kernels.whole_prompts import create_library_plan, list_padded_lengths
from plimsoll_engine.kvcache.pool_memory import PoolTensors, compute_pool_sums, make_pool_tensors
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.lora import StepAdapters
from plimsoll_engine.models.model import MediaModel, Model
from plimsoll_engine.process.owners import Owner


class Forward:
    """Model and its KV pool on one device."""

    name = "kv_pool"

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        memory: torch.Tensor | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Use ``memory``, uint8 [bytes], as the KV pool, or allocate one if None.

        ``kv_dtype`` is the pool's dtype; None means the model's dtype.
        """
        self.model: Model | None = model
        self.group: Group = model.group if isinstance(model, Decoder) else SINGLE_RANK_GROUP
        self.outputs = EncoderOutputs(model) if isinstance(model, MediaModel) else None
        self.block_size = block_size
        self.device: torch.device = model.device
        self.graphs: DecodeGraphs | None = None
        self.layers: LayerGraphs | None = None
        # Padded prompt lengths for which the library has no attention plan yet.
        self._unplanned: list[int] = []
        # None if the engine does not serve adapters.
        self.adapters: LoadedAdapters | None = None
        self._ops = choose_ops(self.device)
        slots = num_blocks * block_size
        # Whether the KV pool belongs to the weight server.
        self.pool_is_mapped = memory is not None
        made = make_pool_tensors(model.kv, slots, kv_dtype or model.dtype, self.device, memory)
        self.kv: torch.Tensor | None = made.pairs
        self.kv_scales: torch.Tensor | None = made.scales
        # Tokens that the last step sampled, int64 [rows] on the device. The next step reads them
        # there, because the host may not know them yet. A request's row is its InFlight.row.
        self.newest: torch.Tensor | None = None
        # Scores of prompt rows in the last step; None if no row was scored.
        self.scores: Scores | None = None

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool in bytes, over all ranks."""
        if self.kv is None:
            return 0
        return PoolTensors(self.kv, self.kv_scales).nbytes * self.group.shard.size

    def list_owners(self, name: str = name) -> list[Owner]:
        """Return the KV pool as a memory owner called ``name``."""
        on_device = self.device.type == "cuda"
        return [
            Owner(
                name=name,
                kind=MemoryKind.DEVICE if on_device else MemoryKind.HOST,
                nbytes=lambda: self.kv_bytes,
                bound=self.kv_bytes,
                process=Role.WEIGHT_SERVER if self.pool_is_mapped else Role.WORKER,
                close=self.close,
            )
        ]

    def compute_block_sums(self, blocks: Sequence[int]) -> list[int]:
        """Return the checksum of this rank's part of each block in ``blocks``."""
        assert self.kv is not None
        return compute_pool_sums(PoolTensors(self.kv, self.kv_scales), self.block_size, blocks)

    @property
    def graph_bytes(self) -> int:
        """Device memory of the CUDA graphs on this rank, in bytes."""
        return sum(graphs.nbytes for graphs in (self.graphs, self.layers) if graphs is not None)

    def capture_graphs(
        self, max_rows: int, max_blocks: int, deferred: bool = False, max_prompt_tokens: int = 0
    ) -> None:
        """Capture decode steps as CUDA graphs for a few batch sizes, unless ``deferred``.

        :meth:`capture_next_graph` captures the rest: all sizes up to ``max_rows`` rows, and steps
        with prompts of up to ``max_prompt_tokens`` tokens. Do nothing on a CPU.
        """
        if self.device.type != "cuda" or not isinstance(self.model, Decoder):
            return
        assert self.kv is not None
        self.graphs = DecodeGraphs(
            self.model, self.kv, self.block_size, max_rows, max_blocks, self.kv_scales
        )
        if (
            max_prompt_tokens
            and self.group is SINGLE_RANK_GROUP
            and self.model.spec.mixture is None
        ):
            self.layers = LayerGraphs(
                self.model, self.kv, self.block_size, self.kv_scales,
                GraphCapturer(self.graphs.pool), max_prompt_tokens,
            )  # fmt: skip
        if None in self.model.spec.windows:
            self._unplanned = list_padded_lengths(max_prompt_tokens)
        if not deferred:
            self.graphs.capture_first_sizes()

    @property
    def has_missing_graphs(self) -> bool:
        """Whether :meth:`capture_next_graph` has work left."""
        known = [graphs for graphs in (self.graphs, self.layers) if graphs is not None]
        return any(graphs.has_uncaptured_sizes for graphs in known) or bool(self._unplanned)

    def capture_next_graph(self) -> bool:
        """Capture one graph, or plan attention for one prompt length. Return False if all exist."""
        for graphs in (self.graphs, self.layers):
            if graphs is not None and graphs.capture_next():
                return True
        if not self.has_missing_graphs:
            return False
        assert isinstance(self.model, Decoder)
        spec = self.model.spec
        create_library_plan(
            self._unplanned.pop(0), spec.heads, spec.kv_heads, spec.dim, self.model.dtype,
            self.device,
        )  # fmt: skip
        return True

    @torch.inference_mode()
    def compute_as_follower(self, inputs: Inputs) -> None:
        """Compute a step on a rank other than 0."""
        tokens, logits = self.compute(inputs)
        if tokens is not None and inputs.greedy:
            self.newest = tokens
        elif logits is not None:
            rows = len(inputs.last)
            self.newest = self.group.broadcast(
                torch.empty(rows, dtype=torch.int64, device=self.device)
            )

    def compute(
        self, inputs: Inputs, chunks: Sequence[Chunk] = ()
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute a step, and return the greedy tokens and the logits of the rows ``inputs.last``.

        The tokens are int64 [rows]; None if no graph has computed them. The logits are [rows,
        vocabulary] in the model's dtype; None if no row needs them. ``chunks`` provide the step's
        media and adapters.
        """
        self.scores = adapters = None
        if self.adapters is not None:
            adapters = collect_step_adapters(chunks, self.device)
        if (
            adapters is None
            and self.graphs is not None
            and inputs.is_decode_only
            and self.graphs.has_graph(len(inputs.ids))
        ):
            tokens, own = self.graphs.replay(inputs, self.newest)
            if not len(inputs.last):
                return None, None
            if len(inputs.last) < len(tokens):
                last = copy_array_to_device(inputs.last, self.device)
                tokens, own = tokens[last.long()], self._ops.gather_rows(own, last)
            return tokens, None if inputs.greedy else self.group.all_gather(own)
        return None, self._compute(inputs, chunks, adapters)

    def _compute(
        self, inputs: Inputs, chunks: Sequence[Chunk], adapters: StepAdapters | None
    ) -> torch.Tensor | None:
        assert self.model is not None
        assert self.kv is not None
        needed = find_needed_rows(inputs)
        read = inputs if needed is None else needed
        fields = (
            inputs.ids, inputs.sources, inputs.positions, inputs.slots, inputs.contexts,
            inputs.starts, inputs.tables.reshape(-1), read.last, read.scored, inputs.targets,
        )  # fmt: skip
        ids, sources, positions, slots, contexts, starts, tables, last, scored, targets = (
            copy_to_device(fields, self.device)
        )
        if self.newest is not None and bool((inputs.sources >= 0).any()):
            ids = self._ops.take_token_ids(ids, sources, self.newest)
        step = StepPlan(
            keys=self.kv[0],
            values=self.kv[1],
            block_size=self.block_size,
            write_slots=slots.long(),
            tables=tables.view(inputs.tables.shape),
            contexts=contexts,
            starts=starts,
            decodes=inputs.decodes,
            longest=inputs.longest,
            fresh=inputs.fresh,
            adapters=adapters,
            context_limit=0 if self.graphs is None else self.graphs.context_limit,
            scales=self.kv_scales,
        )
        if needed is not None:
            step.needed = self._locate_needed_rows(step, needed, inputs, chunks)
        ids = ids.long()
        embeds = None if self.outputs is None else self.outputs.encode_and_embed(chunks, ids, step)
        layers = self.layers if adapters is None and embeds is None else None
        with self._ops.create_step_context(step):
            if layers is not None and layers.has_graph(len(ids)):
                hidden = layers.compute(ids, positions, step)
            else:
                hidden = self.model.forward(ids, positions.long(), step, embeds)
        if len(scored):
            self.scores = compute_scores(
                self.model.compute_logits,
                self._ops.gather_rows(hidden, scored),
                targets.long(),
                inputs.most,
            )
        return self.model.compute_logits(self._ops.gather_rows(hidden, last)) if len(last) else None

    def _locate_needed_rows(
        self, step: StepPlan, needed: NeededRows, inputs: Inputs, chunks: Sequence[Chunk]
    ) -> NeededPlan:
        tables = inputs.tables[needed.sequences]
        rows, starts, contexts, blocks = copy_to_device(
            [needed.rows, needed.starts, inputs.contexts[needed.sequences], tables.reshape(-1)],
            self.device,
        )
        adapters = None
        if step.adapters is not None:
            adapters = collect_step_adapters(chunks, self.device, needed.rows)
        own = replace(
            step, tables=blocks.view(tables.shape), contexts=contexts, starts=starts,
            decodes=needed.decodes, longest=needed.longest, fresh=(), adapters=adapters,
        )  # fmt: skip
        return NeededPlan(rows, own)

    def close(self) -> None:
        """Release the model, adapters, KV pool and graphs. Idempotent."""
        if self.adapters is not None:
            self.adapters.close()
            self.adapters = None
        for graphs in (self.layers, self.graphs):
            if graphs is not None:
                graphs.close()
        self.layers = self.graphs = None
        self.model = None
        self.kv = self.kv_scales = None
        self.newest = self.scores = None
        if self.outputs is not None:
            self.outputs.close()
