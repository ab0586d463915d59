"""The experts of a mixture by Triton equal those by torch, however the rows are spread over them.

Tests ``kernels/experts.py`` and ``kernels/routing.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plimsoll_engine.kernels import experts, quantized, routing
from plimsoll_engine.kernels.experts import (
    FEW_PAIRS_TILE,
    FLOAT32_FEW_PAIRS_TILE,
    MANY_PAIRS_TILE,
    MAX_FEW_PAIRS_PER_EXPERT,
    MAX_MEDIUM_PAIRS_PER_EXPERT,
    MEDIUM_PAIRS_TILE,
)
from plimsoll_engine.kernels.fused import FusedOps
from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.quantized import Quantized
from plimsoll_engine.kernels.reference import ReferenceOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED: Ops = FusedOps()
REFERENCE: Ops = ReferenceOps()
# The interpreter's dot product takes bfloat16 for integers.
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16
TYPES = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(NARROW, 8e-3, id="narrow"),
]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def mixture(
    count: int, hidden: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A router and the weights of ``count`` experts, whose results keep their size."""
    return (
        draw(count, hidden, dtype=dtype),
        (draw(count * 2 * width, hidden) / hidden**0.5).to(dtype),
        (draw(count * hidden, width) / width**0.5).to(dtype),
    )


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the expected tensor's norm; NaN where a value was not written."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


@pytest.fixture(autouse=True)
def seeded(rounds_as_the_device: None) -> None:
    torch.manual_seed(23)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "hidden", "width", "normalised"),
    [(1, 5, 3, 70, 42, True), (14, 3, 3, 48, 24, False), (30, 9, 2, 40, 17, True)],
)
def test_experts_equal_their_reference(
    tokens: int, count: int, chosen: int, hidden: int, width: int, normalised: bool,
    dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    weights = mixture(count, hidden, width, dtype)
    x = draw(tokens, hidden, dtype=dtype)
    before = x.clone()
    found = FUSED.compute_experts(x, *weights, chosen, normalised)
    assert (found.shape, found.dtype) == (x.shape, dtype)
    assert error(found, REFERENCE.compute_experts(x, *weights, chosen, normalised)) < tolerance
    assert torch.equal(x, before)


def narrow(weight: torch.Tensor) -> Quantized:
    return Quantized(*quantized.quantize(weight))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-3), (NARROW, 5e-2 if torch.bfloat16 == NARROW else 2e-2)],
    ids=str,
)
@pytest.mark.parametrize("which", ["both", "gate_up", "down"])
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "hidden", "width"), [(1, 5, 3, 70, 42), (30, 4, 2, 40, 17)]
)
def test_quantized_experts_equal_their_reference(
    tokens: int, count: int, chosen: int, hidden: int, width: int, which: str,
    dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    """The kernel rounds the inner columns once more or less before they are quantized, so that
    some fall to the other side of two values of e4m3. Wrong scales or rows are off by far more, and
    so is what the exact weights give."""
    router, *exact = mixture(count, hidden, width, dtype)
    weights: list[Any] = [
        narrow(weight) if which in ("both", name) else weight
        for name, weight in zip(("gate_up", "down"), exact, strict=True)
    ]
    for weight in weights:
        if isinstance(weight, Quantized):  # each row has its own size
            weight.scales.mul_(torch.rand_like(weight.scales) + 0.2)
    x = draw(tokens, hidden, dtype=dtype) * torch.logspace(-1, 1, tokens)[:, None].to(DEVICE, dtype)
    found = FUSED.compute_experts(x, router, weights[0], weights[1], chosen, True)
    assert (found.shape, found.dtype) == (x.shape, dtype)
    expected = REFERENCE.compute_experts(x, router, weights[0], weights[1], chosen, True)
    for row, wanted in zip(found, expected, strict=True):
        assert error(row, wanted) < tolerance


@pytest.mark.parametrize("tile", [*experts.list_tiles(torch.float32), *experts.list_tiles(NARROW)])
def test_every_tile_computes_the_same_of_quantized_weights(tile: Any) -> None:
    dtype = torch.float32 if tile in experts.list_tiles(torch.float32) else NARROW
    router, *exact = mixture(3, 80, 56, dtype)
    gate_up, down = (narrow(weight) for weight in exact)
    x = draw(19, 80, dtype=dtype)
    routes = routing.route(x @ router.T, 2, True, tile.rows, tile.sort)
    found = experts._compute_products(x, gate_up, down, routes, tile)
    expected = REFERENCE.compute_experts(x, router, gate_up, down, 2, True)
    assert error(found, expected) < (2e-3 if dtype == torch.float32 else 2e-2)


def test_a_row_of_zeros_leaves_the_others_as_they_are() -> None:
    """Its scale is the smallest there is, and its result is zero."""
    router, *exact = mixture(3, 64, 32, torch.float32)
    gate_up, down = (narrow(weight) for weight in exact)
    x = draw(4, 64)
    x[2] = 0.0
    found = FUSED.compute_experts(x, router, gate_up, down, 2, True)
    assert not bool(found[2].any())
    assert error(found, REFERENCE.compute_experts(x, router, gate_up, down, 2, True)) < 2e-3


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_all_rows_may_go_to_one_expert(dtype: torch.dtype, tolerance: float) -> None:
    router, gate_up, down = mixture(6, 64, 32, dtype)
    router[4] = 0.0
    router[4, 0] = 100.0
    x = draw(20, 64, dtype=dtype)
    x[:, 0] = 3.0
    found = FUSED.compute_experts(x, router, gate_up, down, 1, False)
    assert torch.equal(found, FUSED.compute_experts(x, router, gate_up, down, 1, False)), (
        "not the same twice"
    )
    alone = REFERENCE.compute_experts(
        x, router[4:5], gate_up[4 * 64 : 5 * 64], down[256:320], 1, False
    )
    assert error(found, alone) < tolerance


@pytest.mark.parametrize("tile", [*experts.list_tiles(torch.float32), *experts.list_tiles(NARROW)])
def test_every_tile_computes_the_same(tile: Any) -> None:
    dtype = torch.float32 if tile in experts.list_tiles(torch.float32) else NARROW
    router, gate_up, down = mixture(3, 80, 56, dtype)
    x = draw(19, 80, dtype=dtype)
    routes = routing.route(x @ router.T, 2, True, tile.rows, tile.sort)
    found = experts._compute_products(x, gate_up, down, routes, tile)
    expected = REFERENCE.compute_experts(x, router, gate_up, down, 2, True)
    assert error(found, expected) < (1e-5 if dtype == torch.float32 else 8e-3)


def test_the_tile_grows_with_the_rows_of_an_expert() -> None:
    kinds = [
        experts.choose_tile(pairs, 16, torch.bfloat16)
        for pairs in (1, 16 * MAX_FEW_PAIRS_PER_EXPERT)
    ]
    assert kinds == [FEW_PAIRS_TILE, FEW_PAIRS_TILE]
    assert (
        experts.choose_tile(16 * MAX_FEW_PAIRS_PER_EXPERT + 1, 16, torch.bfloat16)
        == MEDIUM_PAIRS_TILE
    )
    assert (
        experts.choose_tile(16 * MAX_MEDIUM_PAIRS_PER_EXPERT + 1, 16, torch.bfloat16)
        == MANY_PAIRS_TILE
    )
    assert experts.choose_tile(1, 16, torch.float32) == FLOAT32_FEW_PAIRS_TILE


@pytest.mark.parametrize(("rows", "tile"), [(16, 32), (64, 1024)])
@pytest.mark.parametrize(
    "chosen_by", ["random", "one", "few"]
)  # fmt: skip
def test_each_pair_lies_once_in_a_block_of_its_expert(chosen_by: str, tile: int, rows: int) -> None:
    tokens, count, chosen = 40, 12, 3
    logits = draw(tokens, count)
    if chosen_by == "one":
        logits[:, 7], chosen = 50.0, 1
    if chosen_by == "few":
        logits[:, [0, 5, 11]] += 100.0
    routes = routing.route(logits, chosen, False, rows, tile)
    best = logits.softmax(-1).topk(chosen)
    torch.testing.assert_close(routes.shares, best.values)
    owner_of = best.indices.flatten().tolist()
    pairs = tokens * chosen
    assert len(routes.owners) == routing.compute_max_blocks(pairs, count, rows)
    seen: list[int] = []
    owners = routes.owners.tolist()
    used = [owner for owner in owners if owner >= 0]
    assert owners == used + [-1] * (len(owners) - len(used))
    assert used == sorted(used)
    for owner, block in zip(used, routes.order.view(-1, rows).tolist(), strict=False):
        real = [pair for pair in block if pair < pairs]
        assert real, "a block of padding alone"
        assert block == real + [pairs] * (rows - len(real))
        assert {owner_of[pair] for pair in real} == {owner}
        seen += real
    assert sorted(seen) == list(range(pairs))
    # In their own order within an expert, so that nothing depends on who was first.
    assert seen == sorted(range(pairs), key=lambda pair: (owner_of[pair], pair))


def test_there_are_never_more_blocks_than_the_bound() -> None:
    assert routing.compute_max_blocks(1, 128, 16) == 1
    # One pair too many in each of five experts' last blocks.
    pairs = 5 * 17
    assert routing.compute_max_blocks(pairs, 5, 16) == 10
    logits = torch.full((pairs, 5), -9.0, device=DEVICE)
    logits[torch.arange(pairs), torch.arange(pairs) % 5] = 9.0
    owners = routing.route(logits, 1, False, 16, 1024).owners.tolist()
    assert owners == [expert for expert in range(5) for _ in range(2)]


def test_scores_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((3, 5), float("nan"), device=DEVICE)
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    routes = routing.route(logits, 2, True, 16, 1024)
    used = [owner for owner in routes.owners.tolist() if owner >= 0]
    assert max(used) < 5
    pairs = routes.order[: 16 * len(used)].tolist()
    assert sorted(pair for pair in pairs if pair < 6) == list(range(6))


@pytest.mark.parametrize("normalised", [False, True])
def test_shares_are_those_of_a_softmax_over_all_experts(normalised: bool) -> None:
    logits = draw(20, 7, dtype=NARROW)
    shares = routing.route(logits, 3, normalised, 16, 1024).shares
    expected = logits.float().softmax(-1).topk(3).values
    if normalised:
        expected /= expected.sum(-1, keepdim=True)
    assert shares.dtype == NARROW
    assert torch.equal(shares, expected.to(NARROW))
