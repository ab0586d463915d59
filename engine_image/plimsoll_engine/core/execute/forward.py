"""The model over the KV pool: a step's inputs in, logits out. What every rank of a group does.

The newest token of a sequence may be one that only the device knows: :attr:`Forward.newest` holds
those of the last step, and the next one takes them from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from plimsoll_engine.core.execute.encoder_outputs import EncoderOutputs
from plimsoll_engine.core.execute.graphs import DecodeGraphs
from plimsoll_engine.core.execute.inputs import pieces, to_device
from plimsoll_engine.core.execute.layer_graphs import Capture, LayerGraphs
from plimsoll_engine.core.execute.loaded_adapters import LoadedAdapters, in_step
from plimsoll_engine.core.execute.needed_rows import NeededRows, needed_rows
from plimsoll_engine.core.execute.prompt_scores import Scores, score
from plimsoll_engine.core.schedule.scheduler import Chunk
from plimsoll_engine.distributed.group import ALONE, Group
from plimsoll_engine.kernels.choose import ops_for
from plimsoll_engine.kernels.step_plan import Needed, StepPlan
from plimsoll_engine.kernels.whole_prompts import make_plan, padded_lengths
from plimsoll_engine.kvcache.pool_memory import PoolTensors, pool_sums, pool_tensors
from plimsoll_engine.messages.rank_ipc import Inputs
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.lora import StepAdapters
from plimsoll_engine.models.model import MediaModel, Model


class Forward:
    """The model, the KV pool's tensors and the device they are on."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        memory: torch.Tensor | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """``memory`` uint8 [bytes] is the KV pool's where that is mapped; else it is made here.

        ``kv_dtype`` is the pool's dtype, None for the model's.
        """
        self.model: Model | None = model
        self.group: Group = model.group if isinstance(model, Decoder) else ALONE
        self.outputs = EncoderOutputs(model) if isinstance(model, MediaModel) else None
        self.block_size = block_size
        self.device: torch.device = model.device
        self.graphs: DecodeGraphs | None = None
        self.layers: LayerGraphs | None = None
        self._unplanned: list[int] = []
        """Padded lengths of prompts that the attention has no plan for yet."""
        self.adapters: LoadedAdapters | None = None
        """None where the engine takes no LoRA adapters."""
        self._ops = ops_for(self.device)
        slots = num_blocks * block_size
        made = pool_tensors(model.kv, slots, kv_dtype or model.dtype, self.device, memory)
        self.kv: torch.Tensor | None = made.pairs
        self.kv_scales: torch.Tensor | None = made.scales
        """Of an FP8 pool."""
        self.newest: torch.Tensor | None = None
        """The tokens that the last step sampled, on the device; a request knows its row."""
        self.scores: Scores | None = None
        """Of the last step's prompts, where it scored any."""

    @property
    def kv_bytes(self) -> int:
        """The KV pool's, of all ranks together: each has as much."""
        if self.kv is None:
            return 0
        return PoolTensors(self.kv, self.kv_scales).nbytes * self.group.shard.size

    def block_sums(self, blocks: Sequence[int]) -> list[int]:
        """Return a sum of what each of ``blocks`` holds on this rank."""
        assert self.kv is not None
        return pool_sums(PoolTensors(self.kv, self.kv_scales), self.block_size, blocks)

    @property
    def graph_bytes(self) -> int:
        """Device memory of the captured steps, of this rank."""
        return sum(graphs.nbytes for graphs in (self.graphs, self.layers) if graphs is not None)

    def capture_graphs(
        self, max_num_seqs: int, max_blocks: int, later: bool = False, longest: int = 0
    ) -> None:
        """Capture decode steps of the first few batch sizes (CUDA only), or none with ``later``.

        :meth:`capture_more` captures the others, the layers of steps with prompts, and makes the
        plans for whole prompts of up to ``longest`` tokens. ``max_blocks`` is the most blocks of
        one request.
        """
        if self.device.type != "cuda" or not isinstance(self.model, Decoder):
            return
        assert self.kv is not None
        self.graphs = DecodeGraphs(
            self.model, self.kv, self.block_size, max_num_seqs, max_blocks, self.kv_scales
        )
        if longest and self.group is ALONE and self.model.spec.mixture is None:
            self.layers = LayerGraphs(
                self.model, self.kv, self.block_size, self.kv_scales, Capture(self.graphs.pool),
                longest,
            )  # fmt: skip
        if None in self.model.spec.windows:
            self._unplanned = padded_lengths(longest)
        if not later:
            self.graphs.capture_first()

    @property
    def incomplete(self) -> bool:
        """Whether :meth:`capture_more` has something left to do."""
        known = [graphs for graphs in (self.graphs, self.layers) if graphs is not None]
        return any(graphs.missing for graphs in known) or bool(self._unplanned)

    def capture_more(self) -> bool:
        """Capture one more batch size or piece, or plan one more length; False if none is left."""
        for graphs in (self.graphs, self.layers):
            if graphs is not None and graphs.capture_next():
                return True
        if not self.incomplete:
            return False
        assert isinstance(self.model, Decoder)
        spec = self.model.spec
        make_plan(
            self._unplanned.pop(0), spec.heads, spec.kv_heads, spec.dim, self.model.dtype,
            self.device,
        )  # fmt: skip
        return True

    @torch.inference_mode()
    def follow(self, inputs: Inputs) -> None:
        """Compute a step, and take the tokens that rank 0 samples, or that all ranks know."""
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
        """Return the best tokens, where they are known, and the logits of a step's rows.

        The rows are those in ``inputs.last``: tokens int64 [rows], logits [rows, vocabulary] in the
        model's dtype; None where there is no row, and in a ``greedy`` step whose tokens are known.
        ``chunks`` bring media and adapters; a step with an adapter is no captured one.
        """
        self.scores = adapters = None
        if self.adapters is not None:
            adapters = in_step(chunks, self.device)
        if (
            adapters is None
            and self.graphs is not None
            and inputs.decoding
            and self.graphs.fits(len(inputs.ids))
        ):
            tokens, own = self.graphs.replay(inputs, self.newest)
            if not len(inputs.last):
                return None, None
            if len(inputs.last) < len(tokens):
                last = to_device(inputs.last, self.device)
                tokens, own = tokens[last.long()], self._ops.rows(own, last)
            return tokens, None if inputs.greedy else self.group.all_gather(own)
        return None, self._compute(inputs, chunks, adapters)

    def _compute(
        self, inputs: Inputs, chunks: Sequence[Chunk], adapters: StepAdapters | None
    ) -> torch.Tensor | None:
        assert self.model is not None
        assert self.kv is not None
        needed = needed_rows(inputs)
        read = inputs if needed is None else needed
        ids, sources, positions, slots, contexts, starts, tables, last, scored, targets = pieces(
            [
                inputs.ids, inputs.sources, inputs.positions, inputs.slots, inputs.contexts,
                inputs.starts, inputs.tables.reshape(-1), read.last, read.scored, inputs.targets,
            ],
            self.device,
        )  # fmt: skip
        if self.newest is not None and bool((inputs.sources >= 0).any()):
            ids = self._ops.take(ids, sources, self.newest)
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
            step.needed = self._needed(step, needed, inputs, chunks)
        ids = ids.long()
        embeds = None if self.outputs is None else self.outputs.prepare(chunks, ids, step)
        layers = self.layers if adapters is None and embeds is None else None
        with self._ops.computing(step):
            if layers is not None and layers.fits(len(ids)):
                hidden = layers.compute(ids, positions, step)
            else:
                hidden = self.model.forward(ids, positions.long(), step, embeds)
        if len(scored):
            self.scores = score(
                self.model.logits, self._ops.rows(hidden, scored), targets.long(), inputs.most
            )
        return self.model.logits(self._ops.rows(hidden, last)) if len(last) else None

    def _needed(
        self, step: StepPlan, needed: NeededRows, inputs: Inputs, chunks: Sequence[Chunk]
    ) -> Needed:
        """Return the needed rows on the device, with the plan ``step`` of these rows alone."""
        tables = inputs.tables[needed.sequences]
        rows, starts, contexts, blocks = pieces(
            [needed.rows, needed.starts, inputs.contexts[needed.sequences], tables.reshape(-1)],
            self.device,
        )
        adapters = None
        if step.adapters is not None:
            adapters = in_step(chunks, self.device, needed.rows)
        own = replace(
            step, tables=blocks.view(tables.shape), contexts=contexts, starts=starts,
            decodes=needed.decodes, longest=needed.longest, fresh=(), adapters=adapters,
        )  # fmt: skip
        return Needed(rows, own)

    def close(self) -> None:
        """Let go of model, adapters, KV pool and graphs. Again does nothing more."""
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
