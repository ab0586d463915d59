"""Attention over the paged pool equals plain attention, for mixed batches, GQA and both types.

Tests ``models/transformers_model.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from plimsoll_engine.kernels.step_plan import StepPlan

HEADS, KV_HEADS, DIM, SLOTS, LAYER, BLOCK = 6, 2, 8, 64, 1, 4


def paged_attention(*tensors: Any, **settings: Any) -> Any:
    # Imported here: it takes seconds, in every worker that collects tests.
    from plimsoll_engine.models import transformers_model

    return transformers_model.compute_paged_attention(*tensors, **settings)


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Causal attention of the last rows of one sequence; [rows, heads, dim] each."""
    rows, context = query.shape[0], key.shape[0]
    newest = torch.arange(context - rows, context).unsqueeze(-1)
    mask = torch.arange(context) <= newest
    if window is not None:
        mask &= torch.arange(context) > newest - window
    expand = HEADS // KV_HEADS
    out = scaled_dot_product_attention(
        query.transpose(0, 1).float(),
        key.transpose(0, 1).repeat_interleave(expand, 0).float(),
        value.transpose(0, 1).repeat_interleave(expand, 0).float(),
        attn_mask=mask,
        scale=0.3,
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("window", [None, 4], ids=["whole", "window"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_mixed_batch_equals_plain_attention(
    dtype: torch.dtype, tolerance: float, window: int | None
) -> None:
    torch.manual_seed(3)
    # (context, new tokens): two decodes of unequal length, a first chunk, a later chunk.
    sequences = [(9, 1), (14, 1), (5, 5), (17, 6)]
    order = torch.randperm(SLOTS // BLOCK).tolist()
    tables = [[order.pop() for _ in range(-(-context // BLOCK))] for context, _ in sequences]
    slots = [
        [table[token // BLOCK] * BLOCK + token % BLOCK for token in range(context)]
        for table, (context, _) in zip(tables, sequences, strict=True)
    ]
    keys = torch.randn(2, SLOTS, KV_HEADS, DIM).to(dtype)
    values = torch.randn(2, SLOTS, KV_HEADS, DIM).to(dtype)
    rows = sum(new for _, new in sequences)
    query = torch.randn(1, HEADS, rows, DIM).to(dtype)
    key, value = (torch.randn(1, KV_HEADS, rows, DIM).to(dtype) for _ in range(2))
    untouched = keys[0].clone()

    write = [
        slot
        for (_, new), own in zip(sequences, slots, strict=True)
        for slot in own[len(own) - new :]
    ]
    width = max(map(len, tables))
    plan = StepPlan(
        keys,
        values,
        BLOCK,
        torch.tensor(write),
        torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        torch.tensor([context for context, _ in sequences], dtype=torch.int32),
        torch.tensor([0, 1, 2, 7, 13], dtype=torch.int32),
        decodes=2,
        longest=6,
    )
    module = cast(Any, SimpleNamespace(layer_idx=LAYER, sliding_window=window))
    out, _ = paged_attention(module, query, key, value, None, scaling=0.3, plan=plan)

    assert out.shape == (1, rows, HEADS, DIM)
    assert torch.equal(keys[0], untouched), "another layer's keys were written"
    row = 0
    for (_, new), own in zip(sequences, slots, strict=True):
        expected = plain(
            query[0, :, row : row + new].transpose(0, 1),
            keys[LAYER][own],
            values[LAYER][own],
            window,
        )
        torch.testing.assert_close(
            out[0, row : row + new].float(), expected, atol=tolerance, rtol=tolerance
        )
        assert torch.equal(
            keys[LAYER][own[len(own) - new :]], key[0, :, row : row + new].transpose(0, 1)
        )
        row += new


def test_what_the_pool_has_not_is_refused_by_name() -> None:
    module = cast(Any, SimpleNamespace(layer_idx=0))
    none = cast(Any, None)
    with pytest.raises(NotImplementedError, match="softcap"):
        paged_attention(module, none, none, none, None, scaling=1.0, plan=none, softcap=30.0)
