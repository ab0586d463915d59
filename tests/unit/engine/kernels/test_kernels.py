"""Each Triton kernel computes what its torch reference computes, on inputs drawn anew.

Tests ``kernels/fused.py``, ``kernels/decode_attention.py``, ``kernels/decode_partition.py``,
``kernels/few_rows.py``, ``kernels/gated_product.py``, ``kernels/prefill_attention.py``,
``kernels/rotary.py`` and ``kernels/whole_prompts.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from plimsoll_engine.kernels import (
    decode_attention,
    decode_partition,
    few_rows,
    fused,
    gated_product,
    whole_prompts,
)
from plimsoll_engine.kernels.fused import FusedOps
from plimsoll_engine.kernels.ops import Ops, decode_argmax_keys
from plimsoll_engine.kernels.quantized import Quantized
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.kernels.sizes import NUM_COUNTERS
from plimsoll_engine.kernels.step_plan import StepPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED: Ops = FusedOps()
REFERENCE: Ops = ReferenceOps()
PAGE = 16
PARTITIONS = decode_partition.PARTITIONS
TYPES = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 8e-3, id="bfloat16"),
]
# The interpreter's dot product takes bfloat16 for integers.
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16
ATTENTION_TYPES = [TYPES[0], pytest.param(NARROW, 8e-3, id="narrow")]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the expected tensor's norm; NaN where a value was not written."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def plan_of(
    sequences: list[tuple[int, int]], kv_heads: int, dim: int, dtype: torch.dtype, pad: int = 0
) -> StepPlan:
    """A pool and its plan for (context, new tokens) each, with ``pad`` padding rows at the end."""
    pages = [-(-context // PAGE) for context, _ in sequences]
    order = torch.randperm(sum(pages) + 3).tolist()
    tables = [[order.pop() for _ in range(count)] for count in pages]
    write = [
        table[token // PAGE] * PAGE + token % PAGE
        for table, (context, new) in zip(tables, sequences, strict=True)
        for token in range(context - new, context)
    ]
    width = max(pages) + 2
    starts = [0]
    for _, new in sequences:
        starts.append(starts[-1] + new)

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    contexts = [context for context, _ in sequences] + [0] * pad
    decodes = sum(1 for _, new in sequences if new == 1) + pad
    pool = (2, (sum(pages) + 3) * PAGE, kv_heads, dim)
    return StepPlan(
        keys=draw(*pool, dtype=dtype),
        values=draw(*pool, dtype=dtype),
        block_size=PAGE,
        write_slots=ints(write + [-1] * pad, torch.int64),
        tables=ints([table + [0] * (width - len(table)) for table in tables] + [[0] * width] * pad),
        contexts=ints(contexts),
        starts=ints(starts + [starts[-1]] * pad),
        decodes=decodes,
        longest=max((new for _, new in sequences if new > 1), default=0),
    )


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(17)
    if DEVICE.type == "cpu":  # the interpreter runs one program after the other
        monkeypatch.setattr(
            decode_partition, "PARTITIONS", ((1 << 30, decode_partition.Partition(64, 4, 64)),)
        )  # one runs after the other


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 96), (70, 16)])
def test_norms(rows: int, size: int, dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = (draw(*s, dtype=dtype) for s in ((rows, size), (rows, size), (size,)))
    assert error(FUSED.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6)) < tolerance
    ours, theirs = residual.clone(), residual.clone()
    found = FUSED.add_rms_norm(x, ours, weight, 1e-6)
    assert error(found, REFERENCE.add_rms_norm(x, theirs, weight, 1e-6)) < tolerance
    assert error(ours, theirs) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("size", [48, 2304])
def test_activation(size: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = draw(7, 2 * size, dtype=dtype)
    assert error(FUSED.silu_mul(gate_up), REFERENCE.silu_mul(gate_up)) < tolerance


@pytest.mark.parametrize(
    ("dtype", "tolerance"), ATTENTION_TYPES[1:] if DEVICE.type == "cuda" else ATTENTION_TYPES
)
@pytest.mark.parametrize(
    ("rows", "size", "columns"), [(1, 128, 64), (300, 136, 200), (520, 264, 72)]
)
def test_product_and_activation_in_one(
    rows: int, size: int, columns: int, dtype: torch.dtype, tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tiles that are whole and not, and programs that compute several."""
    x, weight = draw(rows, columns, dtype=dtype), draw(2 * size, columns, dtype=dtype)
    expected = REFERENCE.gated_linear(x.float(), weight.float(), None)
    for processors in (132, 4):
        monkeypatch.setattr(gated_product, "_count_multiprocessors", lambda device, n=processors: n)
        assert error(gated_product.gated_product(x, weight), expected) < tolerance


@pytest.mark.parametrize(
    ("rows", "size", "columns", "dtype", "biased", "taken"),
    [
        (1024, 256, 64, NARROW, False, True),
        (512, 256, 64, NARROW, False, False),  # two tiles for each processor
        (1152, 256, 64, NARROW, False, False),  # two processors have nothing to do at the end
        (1024, 252, 64, NARROW, False, False),
        (1024, 256, 60, NARROW, False, False),
        (1024, 256, 64, torch.float32, False, False),
        (1024, 256, 64, NARROW, True, False),
    ],
)
def test_which_products_are_computed_with_their_activation(
    rows: int, size: int, columns: int, dtype: torch.dtype, biased: bool, taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gated_product, "_count_multiprocessors", lambda device: 4)
    monkeypatch.setattr(gated_product, "_loaded_kernels", set())
    x, weight = draw(rows, columns, dtype=dtype), draw(2 * size, columns, dtype=dtype)
    bias = draw(2 * size, dtype=dtype) if biased else None
    fits = gated_product.supports(x, weight, bias)
    assert (fits and gated_product.is_faster(x, weight)) is taken
    expected = REFERENCE.gated_linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    assert error(FUSED.gated_linear(x, weight, bias), expected) < 8e-3
    assert len(gated_product._loaded_kernels) == fits, "loaded before there are rows enough"
    assert not gated_product.supports(x[:, ::2], weight[:, ::2], None)


def test_rotary_table_far_out() -> None:
    positions = torch.tensor([0, 1, 511, 131_071], device=DEVICE)
    inverse = 1.0 / 1e4 ** (torch.arange(0, 24, 2, device=DEVICE).float() / 24)
    found = FUSED.compute_rotary_table(positions, inverse)
    angles = positions.double().unsqueeze(-1) * inverse.double()
    # The product is rounded to float32, as transformers does: half a unit at 131071 is .004.
    torch.testing.assert_close(
        found.double(), torch.cat([angles.cos(), angles.sin()], dim=-1), atol=8e-3, rtol=0
    )
    assert error(found, REFERENCE.compute_rotary_table(positions, inverse)) < 1e-6


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 3, 24)])
def test_rotate_and_store(
    heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype, tolerance: float
) -> None:
    plan = plan_of([(9, 1), (40, 1), (20, 7)], kv_heads, dim, dtype)
    tokens = len(plan.write_slots)
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    rotary = REFERENCE.compute_rotary_table(
        torch.randint(0, 5000, (tokens,), device=DEVICE), draw(dim // 2).abs()
    )
    norms = (draw(dim, dtype=dtype), draw(dim, dtype=dtype)) if normed else None
    pools = []
    found = []
    for ops in (FUSED, REFERENCE):
        keys, values = plan.keys.clone(), plan.values.clone()
        step = plan_with(plan, keys, values)
        found.append(ops.rotate_and_store(qkv, rotary, norms, 1e-6, step, 1))
        pools.append((keys, values))
    assert error(found[0], found[1]) < tolerance
    for ours, theirs in zip(*pools, strict=True):
        assert error(ours, theirs) < tolerance
    assert torch.equal(pools[0][0][0], plan.keys[0]), "another layer was written"


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 3, 24)])
def test_queries_apart_from_keys_and_values(
    heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """As the last layer computes them: the same as in one piece, to the bit."""
    plan = plan_of([(9, 1), (20, 7)], kv_heads, dim, dtype)
    tokens = len(plan.write_slots)
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    rotary = draw(tokens, dim)
    norms = (draw(dim, dtype=dtype), draw(dim, dtype=dtype)) if normed else None
    whole = plan_with(plan, plan.keys.clone(), plan.values.clone())
    expected = FUSED.rotate_and_store(qkv, rotary, norms, 1e-6, whole, 1)
    query, pairs = (
        part.contiguous() for part in torch.split(qkv, [heads * dim, 2 * kv_heads * dim], 1)
    )
    none = FUSED.rotate_and_store(pairs, rotary, norms, 1e-6, plan, 1)
    assert none.shape == (tokens, 0, dim)
    assert torch.equal(plan.keys, whole.keys)
    assert torch.equal(plan.values, whole.values)
    some = torch.tensor([7, 0, 3], device=DEVICE)
    norm = None if norms is None else norms[0]
    found = FUSED.normalize_and_rotate(query[some], rotary[some], norm, 1e-6, dim)
    assert torch.equal(found, expected[some])
    wanted = REFERENCE.normalize_and_rotate(query[some], rotary[some], norm, 1e-6, dim)
    assert error(found, wanted) < tolerance


def plan_with(plan: StepPlan, keys: torch.Tensor, values: torch.Tensor) -> StepPlan:
    return StepPlan(
        keys, values, plan.block_size, plan.write_slots, plan.tables, plan.contexts, plan.starts,
        plan.decodes, plan.longest,
    )  # fmt: skip


def test_padding_rows_write_nothing() -> None:
    plan = plan_of([(9, 1)], 2, 16, torch.float32, pad=3)
    before = plan.keys.clone(), plan.values.clone()
    FUSED.rotate_and_store(draw(4, 8 * 16), draw(4, 16), None, 1e-6, plan, 0)
    changed = (plan.keys[0] != before[0][0]).any(dim=(1, 2)).nonzero().flatten().tolist()
    assert changed == plan.write_slots[:1].tolist()
    out = FUSED.attend(draw(4, 4, 16), plan, 0, 0.2, None)
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
    assert bool(out[0].isfinite().all())


DECODES = [(1, 1), (16, 1), (64, 1), (65, 1), (130, 1)]
CHUNKS = [(5, 5), (17, 6), (150, 150), (90, 33)]
BATCHES = {
    "decodes": DECODES,
    "one-decode": [(77, 1)],
    "chunks": CHUNKS,
    "mixed": DECODES[:3] + CHUNKS[1:3],
}


@pytest.mark.parametrize(("dtype", "tolerance"), ATTENTION_TYPES)
@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (6, 2, 24)])
def test_attention(
    heads: int, kv_heads: int, dim: int, batch: list[tuple[int, int]], window: int | None,
    dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    plan = plan_of(batch, kv_heads, dim, dtype)
    query = draw(len(plan.write_slots), heads, dim, dtype=dtype)
    found = FUSED.attend(query, plan, 1, 0.3, window)
    expected = REFERENCE.attend(query.clone(), plan, 1, 0.3, window)
    assert error(found, expected) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("norm", "silu", "add"), [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1)])
def test_projection_of_one_row(
    norm: int, silu: int, add: int, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    columns, rows = 1100, 26
    x, weight, into = (draw(*s, dtype=dtype) for s in ((1, columns), (rows, columns), (1, rows)))
    shift = draw(rows, dtype=dtype) if bias else None
    scale = draw(columns, dtype=dtype) if norm else None

    def project(ops: Ops, cast: torch.dtype) -> torch.Tensor:
        y, w, b, n, r = (t if t is None else t.to(cast) for t in (x, weight, shift, scale, into))
        assert y is not None
        assert w is not None
        return ops.project(
            y, w, b, n, 1e-6, bool(silu), r.clone() if add and r is not None else None
        )

    # Few columns of a product of roundings: the reference's own distance is the measure.
    exact = project(REFERENCE, torch.float64)
    rounding = error(project(REFERENCE, dtype), exact)
    assert error(project(FUSED, dtype), exact) < max(tolerance, 2 * rounding)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("norm", "silu", "add"), [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize(
    ("rows", "size", "columns"), [(2, 72, 200), (16, 128, 256), (27, 200, 136)]
)
def test_projection_of_few_rows(
    rows: int, size: int, columns: int, norm: int, silu: int, add: int, bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tiles of each kind, whole and not, of one program and of several."""
    x, weight = draw(rows, columns, dtype=NARROW), draw(size, columns, dtype=NARROW)
    shift = draw(size, dtype=NARROW) if bias else None
    scale = draw(columns, dtype=NARROW) if norm else None
    into = draw(rows, size // 2 if silu else size, dtype=NARROW) if add else None

    def project(ops: Ops, cast: torch.dtype) -> torch.Tensor:
        y, w, b, n, r = (t if t is None else t.to(cast) for t in (x, weight, shift, scale, into))
        assert y is not None
        assert w is not None
        return ops.project(y, w, b, n, 1e-6, bool(silu), None if r is None else r.clone())

    exact = project(REFERENCE, torch.float64)
    rounding = error(project(REFERENCE, NARROW), exact)
    tiles = [few_rows.Tile(32, 64, 3), few_rows.Tile(64, 128, 2)]
    if not silu:
        tiles += [few_rows.Tile(16, 64, 3, parts=2), few_rows.Tile(64, 64, 2, parts=3)]
    for tile in tiles:
        monkeypatch.setattr(few_rows, "choose_tile", lambda *_, tile=tile: tile)
        for _ in range(2):  # a product leaves its arrival counters at 0
            assert error(project(FUSED, NARROW), exact) < max(1e-3, 2 * rounding)


@pytest.mark.parametrize("columns", [64, 1024, 2048, 14_336, 28_672])
def test_programs_of_a_product_of_few_rows(columns: int) -> None:
    """Each has inputs, and a counter if it shares a tile."""
    for size in (64, 512, 1024, 2047, 2048, 2560, 4096, 4160, 128_256):
        for padded in (16, 32):
            tile = few_rows.choose_tile(size, columns, False, padded)
            if tile.parts > 1:
                assert -(-size // tile.size) <= NUM_COUNTERS
                assert size <= 4096
            assert few_rows.choose_tile(size, columns, True, padded).parts == 1


def test_which_products_have_kernels_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "get_launch_options", lambda device: {"OVERLAP": True})
    whole = draw(8, 64, dtype=NARROW)
    assert FUSED.get_max_projection_rows(whole) == 32
    for weight in (whole.float(), whole[:, :60].contiguous(), whole.t(), Quantized(whole, whole)):
        assert FUSED.get_max_projection_rows(weight) == 1
    assert REFERENCE.get_max_projection_rows(whole) == 0
    monkeypatch.setattr(few_rows, "get_launch_options", lambda device: {})
    assert FUSED.get_max_projection_rows(whole) == 1, "without the tensor memory accelerator"


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Of prompts that are the library's."""
    if DEVICE.type == "cuda":
        return 1540, 1800, 1800
    # A tenth of it: the interpreter runs a program for each token.
    monkeypatch.setattr(whole_prompts, "MIN_LIBRARY_ROWS", 100)
    monkeypatch.setattr(whole_prompts, "PADDED_LENGTH_MULTIPLE", 32)
    return 103, 130, 130


@pytest.mark.parametrize("rotates", [True, False])
def test_whole_prompts_of_the_library(rotates: bool, lengths: tuple[int, ...]) -> None:
    heads, kv_heads, dim = 4, 2, 32
    plan = plan_of([(9, 1), (40, 20), *((n, n) for n in lengths)], kv_heads, dim, NARROW)
    plan.fresh = lengths
    tokens = len(plan.write_slots)
    qkv = draw(tokens, heads + 2 * kv_heads, dim, dtype=NARROW)
    if rotates:
        rotary = REFERENCE.compute_rotary_table(
            torch.arange(tokens, device=DEVICE), draw(dim // 2).abs()
        )
        query = FUSED.rotate_and_store(qkv.flatten(1), rotary, None, 0.0, plan, 0)
    else:
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        query = query.contiguous()
        FUSED.store(key, value, plan, 0)
    assert query.shape == (tokens, heads, dim)
    found = FUSED.attend(query, plan, 0, 0.3, None)
    plan.derived = None
    assert error(found, REFERENCE.attend(query, plan, 0, 0.3, None)) < 8e-3


def test_prompts_of_one_padded_length_share_a_plan(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library makes one, 45 ms on the host, for each set of shapes and strides."""
    plans = set()

    def attention(*tensors: Any, **options: Any) -> torch.Tensor:
        plans.add(tuple((x.shape, x.stride()) for x in tensors))
        return scaled_dot_product_attention(*tensors, **options)

    monkeypatch.setattr(whole_prompts, "scaled_dot_product_attention", attention)
    for shift in (0, 3):
        fresh = tuple(length + shift for length in lengths)
        plan = plan_of([(9, 1), *((n, n) for n in fresh)], 2, 32, NARROW)
        plan.fresh = fresh
        query, key, value = (draw(len(plan.write_slots), h, 32, dtype=NARROW) for h in (4, 2, 2))
        FUSED.store(key, value, plan, 0)
        FUSED.attend(query, plan, 0, 0.3, None)
    assert len(plans) == 2, "for two padded lengths, one of them twice in a step"
    whole_prompts.create_library_plan(plans_of(plans)[0], 4, 2, 32, NARROW, DEVICE)
    assert len(plans) == 2, "made before the first prompt"


def test_equal_prompts_are_joined_once_they_have_come_often(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, a plan for their true length would cost more than it saves."""
    monkeypatch.setattr(whole_prompts, "STEPS_UNTIL_JOINED", 3)
    plan = plan_of([(n, n) for n in lengths], 2, 32, NARROW)
    plan.fresh = lengths
    query, key, value = (draw(len(plan.write_slots), h, 32, dtype=NARROW) for h in (4, 2, 2))
    ops = FusedOps()
    found = []
    for _ in range(5):
        with ops.create_step_context(plan):
            ops.store(key, value, plan, 0)
            calls = [x for _, x in whole_prompts.attend_whole_prompts(query, plan, 0.3, None)]
            found.append(torch.cat([x.flatten(0, 1) for x in calls]))
        assert [len(x) for x in calls] == ([1, 2] if len(found) > 3 else [1, 1, 1])
    assert error(found[-1], found[0]) < 8e-3
    never_twice = [(n, n) for n in range(2000, 2400)]
    equal = whole_prompts.PromptJoinPolicy()
    assert not any(equal.count_step(whole) for whole in never_twice)
    assert len(equal._steps) <= whole_prompts.MAX_COUNTED_PROMPT_GROUPS + 1, "bounded"


def plans_of(plans: set[Any]) -> list[int]:
    """Return the padded lengths."""
    return [query[0][2] for query, _, _ in plans]


@pytest.mark.parametrize("apart", [1, 1 << 20], ids=["apart", "together"])
@pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
@pytest.mark.parametrize("others", [[(9, 1), (40, 20)], []], ids=["mixed", "alone"])
def test_attention_is_added_through_its_product(
    others: list[tuple[int, int]], window: int | None, apart: int, lengths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Long prompts where the library left them, or all in one piece."""
    monkeypatch.setattr(fused, "MIN_SEPARATE_OUTPUTS", apart)
    heads, kv_heads, dim, size = 4, 2, 32, 48
    plan = plan_of([*others, *((n, n) for n in lengths)], kv_heads, dim, NARROW)
    plan.fresh = lengths
    tokens = len(plan.write_slots)
    query, key, value = (draw(tokens, h, dim, dtype=NARROW) for h in (heads, kv_heads, kv_heads))
    weight = draw(size, heads * dim, dtype=NARROW) / (heads * dim) ** 0.5
    found = draw(tokens, size, dtype=NARROW)
    expected = found.clone()
    FUSED.store(key, value, plan, 0)
    FUSED.add_attention(query, plan, 0, 0.3, window, weight, found)
    plan.derived = None
    REFERENCE.add_attention(query, plan, 0, 0.3, window, weight, expected)
    assert error(found, expected) < 8e-3


@pytest.mark.parametrize(
    "cut",
    [(64, 1), (64, 2), (64, 8), (64, 32), (128, 1), (128, 2), (64, 16, 128), (128, 4, 512)],
)
@pytest.mark.parametrize("window", [None, 200])
def test_parts_of_a_context_are_joined(cut: tuple[int, ...], window: int | None) -> None:
    """Contexts of one part, of some and of all parts, and padding, with one set of counters."""
    plan = plan_of([(1, 1), (700, 1), (64, 1), (390, 1)], 2, 16, torch.float32, pad=1)
    query = draw(5, 6, 16)
    arrivals = torch.zeros(10, dtype=torch.int32, device=DEVICE)
    expected = REFERENCE.attend(query, plan, 0, 0.3, window)
    for _ in range(2):
        found = torch.full_like(query, float("nan"))
        decode_attention.decode_attention(
            query, *plan.get_pages(0), plan.tables, plan.contexts, PAGE, 0.3, window, found,
            arrivals,
            partition=decode_partition.Partition(*cut),
        )  # fmt: skip
        assert error(found[:4], expected[:4]) < 1e-5
        assert not found[4].any()
        assert not arrivals.any()


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "row_bytes", "limit", "cut"),
    [
        (1, 8, 256, 4096, (128, 32, 128)),
        (1, 8, 256, 512, (128, 4, 128)),
        (4, 8, 256, 4096, (128, 32, 128)),
        (8, 8, 256, 4096, (128, 16, 256)),
        (16, 8, 256, 4096, (128, 8, 512)),
        (16, 8, 256, 131_072, (128, 32, 512)),
        (16, 8, 512, 4096, (64, 8, 512)),
        (63, 8, 256, 8192, (128, 16, 512)),
        (64, 8, 256, 8192, (128, 8, 1024)),
        (64, 8, 256, 0, (128, 16, 1024)),
        (128, 8, 256, 8192, (64, 4, 1024)),
        (256, 8, 256, 131_072, (64, 4, 1024)),
        (512, 8, 256, 8192, (64, 1, 0)),
    ],
)
def test_how_the_work_is_cut(
    sequences: int, kv_heads: int, row_bytes: int, limit: int, cut: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(decode_partition, "PARTITIONS", PARTITIONS)
    assert decode_partition.choose_partition(sequences, kv_heads, row_bytes, limit) == cut


@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (3, 4096), (2, 20_011)])
def test_the_best_column(rows: int, columns: int) -> None:
    x = draw(rows, columns, dtype=NARROW)
    x[-1] = x[-1].round()  # many are equal: the first of them counts
    assert torch.equal(FUSED.argmax(x), REFERENCE.argmax(x))


@pytest.mark.parametrize("ops", [FUSED, REFERENCE], ids=["fused", "reference"])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_best_column_of_several_parts(ops: Ops, parts: int) -> None:
    x = draw(9, 420 * parts, dtype=NARROW)
    x[1] = x[1].round()  # many are equal: the first of them counts, on whichever rank
    x[2] = -x[2].abs()
    x[3] = float("-inf")
    x[4] = 0.0
    x[4, ::2] = -0.0
    x[5, 17] = float("inf")
    x[6, : x.shape[1] // 2] = float("nan")
    x[7] *= 1e-3
    x[8] = float("nan")
    width = x.shape[1] // parts
    own = [part.contiguous() for part in x.chunk(parts, dim=1)]
    keys = [ops.compute_argmax_keys(part, number * width) for number, part in enumerate(own)]
    found = decode_argmax_keys(torch.stack([key.cpu() for key in keys]).amax(0))
    clean = torch.nan_to_num(x.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = clean.argmax(dim=-1).cpu()
    best[[3, 8]] = -1  # they have no best column
    assert torch.equal(found, best)


def test_a_row_of_no_numbers_has_no_best_column() -> None:
    x = torch.full((3, 9000), float("nan"), device=DEVICE)
    x[1] = float("-inf")
    x[2, 5000:] = 1.0
    assert FUSED.argmax(x).tolist() == [-1, -1, 5000]
    ids = torch.tensor([7, 8, 9], dtype=torch.int32, device=DEVICE)
    sources = torch.tensor([-1, 0, 2], dtype=torch.int32, device=DEVICE)
    for ops in (FUSED, REFERENCE):
        assert ops.take_token_ids(ids, sources, FUSED.argmax(x)).tolist() == [7, 0, 5000]


@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (5, 4096), (3, 20_011)])
def test_a_draw_is_the_same_in_one_kernel(rows: int, columns: int) -> None:
    x = draw(rows, columns, dtype=torch.float32)
    keys = torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32, device=DEVICE)
    scales = torch.linspace(0.3, 3, rows, device=DEVICE)
    found = FUSED.draw(x, scales, keys)
    assert torch.equal(found, REFERENCE.draw(x, scales, keys))
    if rows == 5:  # noise of its own for each row
        assert len(set(FUSED.draw(x[:1].expand(5, -1), scales * 0 + 0.01, keys).tolist())) == 5


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(("count", "size"), [(1, 5), (7, 64), (3, 3000)])
def test_rows_are_those_of_their_numbers(kind: torch.dtype, count: int, size: int) -> None:
    x = draw(40, size)
    index = torch.randint(0, 40, (count + 1,), device=DEVICE).to(kind)[1:]  # not aligned
    assert torch.equal(FUSED.gather_rows(x, index), REFERENCE.gather_rows(x, index))


@pytest.mark.parametrize("count", [1, 9, 600])
def test_a_token_is_given_or_a_sampled_one(count: int) -> None:
    newest = torch.randint(100, 200, (8,), device=DEVICE)
    ids = torch.arange(count, dtype=torch.int32, device=DEVICE)
    sources = torch.randint(-1, 8, (count,), device=DEVICE).to(torch.int32)
    expected = [
        number if source < 0 else int(newest[source])
        for number, source in enumerate(sources.tolist())
    ]
    for ops in (FUSED, REFERENCE):
        assert ops.take_token_ids(ids, sources, newest).tolist() == expected
