"""The kernels of FP8 compute what their torch references compute, on inputs drawn anew.

Tests ``kernels/scaled_product.py``, ``kernels/project.py``, ``kernels/rotary.py``,
``kernels/decode_attention.py`` and ``kernels/prefill_attention.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

from plimsoll_engine.kernels import decode_partition, quantized, scaled_product, whole_prompts
from plimsoll_engine.kernels.fused import FusedOps
from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.quantized import FP8, Quantized
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.kernels.step_plan import StepPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED: Ops = FusedOps()
REFERENCE: Ops = ReferenceOps()
PAGE = 16
# The interpreter's dot product takes bfloat16 for integers.
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch, rounds_as_the_device: None) -> None:
    torch.manual_seed(23)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(
            decode_partition, "PARTITIONS", ((1 << 30, decode_partition.Partition(64, 4, 64)),)
        )  # one runs after the other


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 100), (3, 2500)])
def test_rows_are_quantized_to_the_bit(rows: int, size: int, dtype: torch.dtype) -> None:
    x = draw(rows, size, dtype=dtype)
    x[0] *= 1e-4
    x[-1, : size // 2] *= 1e-3  # some of them are below the smallest normal number
    values, scales = scaled_product.quantize(x)
    expected, wanted = quantized.quantize(x)
    assert torch.equal(scales, wanted)
    assert same_bits(values, expected)
    assert values.float().abs().amax(dim=1).eq(448).all()


def test_a_row_of_zeros_and_what_is_not_a_number() -> None:
    x = torch.zeros(3, 32, device=DEVICE)
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    for quantize in (scaled_product.quantize, quantized.quantize):
        meant = quantized.dequantize(*quantize(x))
        assert torch.equal(meant[0], x[0])
        assert bool(meant[1, 3].isnan())
        assert bool(meant[2, 3].isnan())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)], ids=str
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("norm", "silu", "add"), [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1)])
def test_projection_of_one_row(
    norm: int, silu: int, add: int, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """The kernel leaves the row as it is, so that the product of the meant weight is expected."""
    columns, rows = 1100, 26
    x, into = draw(1, columns, dtype=dtype), draw(1, rows, dtype=dtype)
    weight = Quantized(*quantized.quantize(draw(rows, columns)))
    shift = draw(rows, dtype=dtype) if bias else None
    scale = draw(columns, dtype=dtype) if norm else None
    found = FUSED.project(
        x, weight, shift, scale, 1e-6, bool(silu), into.clone() if add and not silu else None
    )
    wide = x.double() if scale is None else REFERENCE.rms_norm(x.double(), scale.double(), 1e-6)
    meant = weight.values.double() * weight.scales.double()
    expected = linear(wide, meant, None if shift is None else shift.double())
    if silu:
        expected = REFERENCE.silu_mul(expected)
    elif add:
        expected = expected + into.double()
    assert error(found, expected) < tolerance


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("rows", "columns", "out"), [(1, 64, 48), (7, 256, 96), (300, 512, 128), (7, 72, 30)]
)
def test_product_of_rows(rows: int, columns: int, out: int, bias: bool) -> None:
    """On a CPU there is no product of the library: there the meaning alone is compared."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    x = draw(rows, columns, dtype=dtype)
    weight = Quantized(*quantized.quantize(draw(out, columns)))
    shift = draw(out, dtype=dtype) if bias else None
    found = FUSED.linear(x, weight, shift)
    assert found.shape == (rows, out)
    assert found.dtype == dtype
    # Half a unit of bfloat16, and sums of eight bits that the device rounds to some 14.
    assert error(found, REFERENCE.linear(x, weight, shift)) < 8e-3


def test_torch_takes_the_call_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own checks of shapes, strides and scales, which need no device."""
    monkeypatch.setattr(scaled_product, "quantize", quantized.quantize)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    with FakeTensorMode():
        weight = Quantized(empty(48, 64, dtype=FP8), empty(48, 1, dtype=torch.float32))
        found = scaled_product.scaled_product(empty(9, 64), weight, empty(48))
        assert (found.shape, found.dtype) == ((9, 48), torch.bfloat16)
        wrong = Quantized(weight.values, empty(47, 1, dtype=torch.float32))
        with pytest.raises(RuntimeError, match="Invalid scaling configuration"):
            scaled_product.scaled_product(empty(9, 64), wrong, None)


def test_the_library_is_given_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of its product, which no CPU has, what it is documented to compute."""
    calls = []

    def scaled_mm(a: Any, b: Any, **options: Any) -> torch.Tensor:
        calls.append((a.dtype, b.dtype, b.stride(0), options["scale_a"].shape))
        wide = (a.float() * options["scale_a"]) @ (b.float() * options["scale_b"])
        found: torch.Tensor = (wide + options["bias"]).to(options["out_dtype"])
        return found

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x, shift = draw(9, 64, dtype=torch.bfloat16), draw(48, dtype=torch.bfloat16)
    weight = Quantized(*quantized.quantize(draw(48, 64)))
    found = FUSED.linear(x, weight, shift)
    assert calls == [(FP8, FP8, 1, (9, 1))]
    assert error(found, REFERENCE.linear(x, weight, shift)) < 4e-3


def plan_of(sequences: list[tuple[int, int]], kv_heads: int, dim: int, pad: int = 0) -> StepPlan:
    """An FP8 pool and its plan for (context, new tokens) each, decodes first."""
    pages = [-(-context // PAGE) for context, _ in sequences]
    order = torch.randperm(sum(pages) + 2).tolist()
    tables = [[order.pop() for _ in range(count)] for count in pages]
    write = [
        table[token // PAGE] * PAGE + token % PAGE
        for table, (context, new) in zip(tables, sequences, strict=True)
        for token in range(context - new, context)
    ]
    starts = [0]
    for _, new in sequences:
        starts.append(starts[-1] + new)

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    slots, width = (sum(pages) + 2) * PAGE, max(pages)
    pairs, scales = quantized.quantize(draw(2, 2, slots, kv_heads, dim))
    return StepPlan(
        keys=pairs[0],
        values=pairs[1],
        block_size=PAGE,
        write_slots=ints(write + [-1] * pad, torch.int64),
        tables=ints([table + [0] * (width - len(table)) for table in tables] + [[0] * width] * pad),
        contexts=ints([context for context, _ in sequences] + [0] * pad),
        starts=ints(starts + [starts[-1]] * pad),
        decodes=sum(new == 1 for _, new in sequences) + pad,
        longest=max((new for _, new in sequences if new > 1), default=0),
        scales=scales.squeeze(-1) * torch.rand(2, 2, slots, kv_heads, device=DEVICE),
    )


def pool_of(plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """What the pool means, and its scales by slot."""
    assert plan.scales is not None
    pairs = torch.stack([plan.keys.float(), plan.values.float()])
    two, layers, _, heads, _ = pairs.shape
    scales = plan.scales.view(two, layers, -1, heads, PAGE).transpose(-1, -2)
    scales = scales.reshape(two, layers, -1, heads)
    return pairs * scales.unsqueeze(-1), scales


def copied(plan: StepPlan) -> StepPlan:
    assert plan.scales is not None
    return replace(
        plan, keys=plan.keys.clone(), values=plan.values.clone(), scales=plan.scales.clone(),
        derived=None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 3, 24)])
def test_keys_and_values_are_stored_with_their_scales(
    heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """The kernel rounds the rotated key once and the reference twice in bfloat16, so that a value
    on the brink may be one step of e4m3 apart, an eighth; most are the same."""
    plan = plan_of([(9, 1), (40, 1), (20, 7)], kv_heads, dim)
    tokens = len(plan.write_slots)
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    rotary = REFERENCE.compute_rotary_table(
        torch.randint(0, 5000, (tokens,), device=DEVICE), draw(dim // 2).abs()
    )
    norms = (draw(dim, dtype=dtype), draw(dim, dtype=dtype)) if normed else None
    steps, queries = [], []
    for ops in (FUSED, REFERENCE):
        steps.append(copied(plan))
        queries.append(ops.rotate_and_store(qkv, rotary, norms, 1e-6, steps[-1], 1))
    assert error(queries[0], queries[1]) < 8e-3
    (ours, scales), (theirs, wanted) = (pool_of(step) for step in steps)
    assert error(scales, wanted) < 8e-3
    written = ours[:, 1, plan.write_slots], theirs[:, 1, plan.write_slots]
    assert bool(((written[0] - written[1]).abs() <= written[1].abs() / 7 + 1e-2).all())
    # Values are not rotated: theirs are the same to the bit.
    assert torch.equal(written[0][1], written[1][1])
    untouched = torch.ones(ours.shape[2], dtype=torch.bool, device=DEVICE)
    untouched[plan.write_slots] = False
    assert torch.equal(ours[:, 1, untouched], theirs[:, 1, untouched])
    assert torch.equal(ours[:, 0], theirs[:, 0]), "another layer was written"


def test_keys_of_other_models_are_stored_the_same() -> None:
    """Without a kernel of their own, as models of transformers and Whisper do it."""
    plan = plan_of([(9, 1), (20, 7)], 2, 16)
    key, value = draw(8, 2, 16), draw(8, 2, 16)
    steps = copied(plan), copied(plan)
    FUSED.store(key, value, steps[0], 1)
    REFERENCE.store(key, value, steps[1], 1)
    for found, expected in zip(pool_of(steps[0]), pool_of(steps[1]), strict=True):
        assert torch.equal(found, expected)


BATCHES = {
    "decodes": [(1, 1), (16, 1), (65, 1), (130, 1)],
    "chunks": [(5, 5), (17, 6), (90, 33)],
    "mixed": [(64, 1), (3, 1), (17, 6), (80, 80)],
}


@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"), [(4, 2, 32, NARROW), (6, 2, 24, torch.float32)]
)
def test_attention_to_an_fp8_pool(
    heads: int, kv_heads: int, dim: int, batch: list[tuple[int, int]], window: int | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    plan = plan_of(batch, kv_heads, dim, pad=2 if batch[-1][1] == 1 else 0)
    query = draw(int(plan.starts[-1]) + (2 if batch[-1][1] == 1 else 0), heads, dim, dtype=dtype)
    found = FUSED.attend(query, copied(plan), 1, 0.3, window)
    real = len(batch) if batch[-1][1] == 1 else len(query)
    shown = replace(
        plan, tables=plan.tables[: len(batch)], contexts=plan.contexts[: len(batch)],
        starts=plan.starts[: len(batch) + 1], decodes=sum(new == 1 for _, new in batch),
    )  # fmt: skip
    expected = REFERENCE.attend(query[:real].float(), shown, 1, 0.3, window)
    assert error(found[:real], expected) < (1e-5 if dtype == torch.float32 else 8e-3)
    assert not bool(found[real:].any())


def test_a_whole_prompt_attends_to_what_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's attention reads the step's own keys and values, which are not rounded; what a
    later step reads is. Both are stored from the same rows."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(whole_prompts, "MIN_LIBRARY_ROWS", 50)
        monkeypatch.setattr(whole_prompts, "PADDED_LENGTH_MULTIPLE", 32)
    rows = 60 if DEVICE.type == "cpu" else 1600
    plan = plan_of([(9, 1), (rows, rows)], 2, 32)
    plan.fresh = (rows,)
    qkv = draw(rows + 1, 8 * 32, dtype=NARROW)
    rotary = REFERENCE.compute_rotary_table(torch.arange(rows + 1, device=DEVICE), draw(16).abs())
    step = copied(plan)
    query = FUSED.rotate_and_store(qkv, rotary, None, 0.0, step, 0)
    assert step.derived.pairs.dtype == NARROW
    found = FUSED.attend(query, step, 0, 0.3, None)
    stored = copied(plan)
    theirs = REFERENCE.rotate_and_store(qkv, rotary, None, 0.0, stored, 0)
    expected = REFERENCE.attend(theirs.float(), stored, 0, 0.3, None)
    assert 1e-3 < error(found[1:], expected[1:]) < 0.05
    assert error(found[:1], expected[:1]) < 0.02
