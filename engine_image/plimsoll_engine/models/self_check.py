"""Check that a transformers model gives the same result with and without the paged KV pool.

An architecture may keep other state than keys and values, or attend in another way. Its code does
not show this, so the same tokens are computed twice when a model is loaded.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.models.transformers_model import ATTENTION_NAME, TransformersModel

BLOCK_SIZE = 4
# Two prompt chunks and a decode step. The chunks end inside blocks.
SEQUENCE_TOKENS, STEP_BOUNDARIES = 23, (0, 13, 22, 23)
# Number of computed tokens of the other sequence after each step.
OTHER_SEQUENCE_ENDS = (6, 12, 13)
# Rounding causes at most a tenth of it. An unsupported architecture differs by about 1.
MAX_RELATIVE_DIFFERENCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
SEED = 3


@torch.inference_mode()
def measure_difference(model: TransformersModel) -> float:
    """Return the relative difference between the last token's logits with and without the KV pool.

    This is the norm of the difference, divided by the norm of the logits.
    """
    vocabulary = model.module.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocabulary, (2, SEQUENCE_TOKENS), generator=generator).to(model.device)
    logits = model.compute_logits(_run_in_chunks(model, ids)[None])[0].float()
    try:
        model.module.set_attn_implementation("eager")
        expected = model.module(input_ids=ids[:1], use_cache=False).logits[0, -1].float()
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)
    return float((logits - expected).norm() / expected.norm())


def _run_in_chunks(model: TransformersModel, ids: torch.Tensor) -> torch.Tensor:
    # Returns the hidden state of the first sequence's last token.
    layers, heads, dim = model.kv
    blocks = -(-SEQUENCE_TOKENS // BLOCK_SIZE)
    size = (2, layers, 2 * blocks * BLOCK_SIZE, heads, dim)
    pool = torch.zeros(size, dtype=model.dtype, device=model.device)
    # Assign the blocks of both sequences out of order.
    tables = torch.arange(2 * blocks, dtype=torch.int32).flip(0).view(blocks, 2).t().contiguous()
    hidden = torch.empty(0)
    for step, (first, last) in enumerate(pairwise(STEP_BOUNDARIES)):
        before = OTHER_SEQUENCE_ENDS[step - 1] if step else 0
        spans = [(0, first, last), (1, before, OTHER_SEQUENCE_ENDS[step])]
        hidden = _run_step(model, ids, pool, tables, spans)
    return hidden


def _run_step(
    model: TransformersModel,
    ids: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    spans: list[tuple[int, int, int]],
) -> torch.Tensor:
    # ``spans`` are (sequence, first token, end) for each sequence of the step. Returns the hidden
    # state [hidden] of the first sequence's last row.
    spans = sorted(spans, key=lambda span: (span[2] - span[1] > 1, not span[1], span[2] - span[1]))
    counts = [last - first for _, first, last in spans]
    positions = torch.cat([torch.arange(first, last) for _, first, last in spans])
    rows = torch.cat([torch.full((n,), s) for (s, _, _), n in zip(spans, counts, strict=True)])
    slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    decodes = sum(count == 1 for count in counts)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    device = model.device
    plan = StepPlan(
        keys=pool[0],
        values=pool[1],
        block_size=BLOCK_SIZE,
        write_slots=slots.long().to(device),
        tables=tables[[sequence for sequence, _, _ in spans]].to(device),
        contexts=torch.tensor([last for _, _, last in spans], dtype=torch.int32).to(device),
        starts=starts.to(device),
        decodes=decodes,
        longest=max(counts[decodes:], default=0),
        fresh=tuple(n for n, (_, first, _) in zip(counts, spans, strict=True) if not first),
    )
    hidden = model.forward(ids[rows, positions], positions.to(device), plan)
    index = [sequence for sequence, _, _ in spans].index(0)
    return hidden[starts[index + 1] - 1]
