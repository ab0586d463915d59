"""Whether a model of transformers computes on the paged pool what it computes by itself.

An architecture may keep a state that is no key and no value, add something to its scores, or mask
in a way of its own; nothing in its code says so. So each model is asked, when it is loaded: the
same tokens once by transformers' own attention, and once in chunks beside another sequence.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.models.transformers_model import NAME, TransformersModel

BLOCK = 4
LENGTH, CUTS = 23, (0, 13, 22, 23)
"""A prompt in two chunks that end inside blocks, and a decode step."""
OTHER = (6, 12, 13)
"""What the neighbour has computed after each step."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Relative. Rounding is a tenth of this at most; a wrong
architecture is off by about 1."""
SEED = 3


@torch.inference_mode()
def difference(model: TransformersModel) -> float:
    """Return the norm of the difference of the last token's logits, relative to their own.

    Raises what the model raises where it cannot compute on the pool at all.
    """
    vocabulary = model.module.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocabulary, (2, LENGTH), generator=generator).to(model.device)
    own = model.logits(_in_chunks(model, ids)[None])[0].float()
    try:
        model.module.set_attn_implementation("eager")
        wanted = model.module(input_ids=ids[:1], use_cache=False).logits[0, -1].float()
    finally:
        model.module.set_attn_implementation(NAME)
    return float((own - wanted).norm() / wanted.norm())


def _in_chunks(model: TransformersModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the hidden state [hidden] of the first sequence's last token."""
    layers, heads, dim = model.kv
    blocks = -(-LENGTH // BLOCK)
    size = (2, layers, 2 * blocks * BLOCK, heads, dim)
    pool = torch.zeros(size, dtype=model.dtype, device=model.device)
    # Neither sequence's blocks are in order.
    tables = torch.arange(2 * blocks, dtype=torch.int32).flip(0).view(blocks, 2).t().contiguous()
    hidden = torch.empty(0)
    for step, (first, last) in enumerate(pairwise(CUTS)):
        before = OTHER[step - 1] if step else 0
        spans = [(0, first, last), (1, before, OTHER[step])]
        hidden = _step(model, ids, pool, tables, spans)
    return hidden


def _step(
    model: TransformersModel,
    ids: torch.Tensor,
    pool: torch.Tensor,
    tables: torch.Tensor,
    spans: list[tuple[int, int, int]],
) -> torch.Tensor:
    """Return the hidden state [hidden] of the first sequence's last row.

    ``spans`` are sequence, first token and the one after the last; the plan has them in the order
    of a :class:`StepPlan`.
    """
    spans = sorted(spans, key=lambda span: (span[2] - span[1] > 1, not span[1], span[2] - span[1]))
    counts = [last - first for _, first, last in spans]
    positions = torch.cat([torch.arange(first, last) for _, first, last in spans])
    rows = torch.cat([torch.full((n,), s) for (s, _, _), n in zip(spans, counts, strict=True)])
    slots = tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK
    decodes = sum(count == 1 for count in counts)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    device = model.device
    plan = StepPlan(
        keys=pool[0],
        values=pool[1],
        block_size=BLOCK,
        write_slots=slots.long().to(device),
        tables=tables[[sequence for sequence, _, _ in spans]].to(device),
        contexts=torch.tensor([last for _, _, last in spans], dtype=torch.int32).to(device),
        starts=starts.to(device),
        decodes=decodes,
        longest=max(counts[decodes:], default=0),
        fresh=tuple(n for n, (_, first, _) in zip(counts, spans, strict=True) if not first),
    )
    hidden = model.forward(ids[rows, positions], positions.to(device), plan)
    its = [sequence for sequence, _, _ in spans].index(0)
    return hidden[starts[its + 1] - 1]
