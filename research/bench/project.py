"""Which tile is the fastest for the products of one row? The source of ``project.TILES``.

    python -m bench.project --name project-h200

The four products of a decoder layer, each with the norm, the activation or the addition that the
engine computes with it, in bfloat16 and in FP8, for each tile. Weights rotate among more copies
than the L2 cache holds, and all tiles are compiled first, by several processes at once. A figure is
the share of their time that a layer's products would take with the tile that is best for them; the
samples have the seconds of each tile.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels import milliseconds
from bench.result import arguments_of, publish
from bench.shapes import SHAPES
from plimsoll_engine.kernels import project
from plimsoll_engine.kernels.project import Tile
from plimsoll_engine.kernels.quantized import Quantized, Weight, quantize

CACHE_BYTES = 50 << 20
"""Of an H200's L2; the copies of a matrix are at least three times as much."""
ELEMENTS_OF_A_THREAD = range(8, 129)
GRID = [
    Tile(columns, elements, warps)
    for columns, elements, warps in itertools.product(
        (1024, 2048, 4096), (4096, 8192, 16_384), (2, 4, 8)
    )
    if elements // (32 * warps) in ELEMENTS_OF_A_THREAD
]


@dataclass(frozen=True)
class Product:
    """A matrix [rows, columns], and what is computed with it."""

    name: str
    rows: int
    columns: int
    norm: bool = False
    silu: bool = False
    added: bool = False


def layer(config: Any) -> list[Product]:
    """The products of a layer of the model that ``config`` describes."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return [
        Product("qkv", (heads + 2 * kv_heads) * dim, hidden, norm=True),
        Product("o", hidden, heads * dim, added=True),
        Product("gate_up", 2 * inner, hidden, norm=True, silu=True),
        Product("down", hidden, inner, added=True),
    ]


LAYERS = {shape: layer(SHAPES[shape]()) for shape in ("8b", "06b")}


def calls(product: Product, fp8: bool, copies: int) -> list[Callable[[], torch.Tensor]]:
    """One call a copy of the product's matrix."""
    x = torch.randn(1, product.columns, device="cuda").bfloat16()
    norm = torch.ones(product.columns, device="cuda").bfloat16() if product.norm else None
    into = torch.zeros(1, product.rows, device="cuda").bfloat16() if product.added else None

    def of(weight: Weight) -> Callable[[], torch.Tensor]:
        return lambda: project.project(x, weight, None, norm, 1e-5, product.silu, into)

    found = []
    for _ in range(copies):
        matrix = torch.randn(product.rows, product.columns, device="cuda").bfloat16()
        found.append(of(Quantized(*quantize(matrix)) if fp8 else matrix))
    return found


def use(fp8: bool, tile: Tile) -> None:
    """Compute with ``tile``, whatever the matrix's size."""
    for large in (False, True):
        project.TILES[fp8, large] = tile


def seconds(product: Product, fp8: bool, tiles: list[Tile]) -> dict[Tile, float]:
    """Of one product with each tile, launched by a CUDA graph: no launch gap is in it."""
    size = product.rows * product.columns * (1 if fp8 else 2)
    made = calls(product, fp8, max(4, 3 * CACHE_BYTES // size))
    found = {}
    for tile in tiles:
        use(fp8, tile)
        found[tile] = milliseconds(lambda i: made[i](), len(made)) / 1000
    return found


def compile_tiles(job: tuple[Product, bool, list[Tile]]) -> None:
    """Put a product's kernels into the cache on disk."""
    product, fp8, tiles = job
    (call,) = calls(product, fp8, 1)
    for tile in tiles:
        use(fp8, tile)
        call()


def main() -> None:
    parser = arguments_of(__doc__, "project")
    flags = parser.parse_args()
    used = dict(project.TILES)
    work = [(p, fp8, GRID) for own in LAYERS.values() for p in own for fp8 in (False, True)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(work), mp_context=spawn) as pool:
        list(pool.map(compile_tiles, work))
    figures: dict[str, float | int | None] = {}
    samples: dict[str, Any] = {}
    for (shape, own), fp8 in itertools.product(LAYERS.items(), (False, True)):
        label = f"{shape}_{'fp8' if fp8 else 'bf16'}"
        found = {product.name: seconds(product, fp8, GRID) for product in own}
        whole = {tile: sum(one[tile] for one in found.values()) for tile in GRID}
        samples[label] = [
            {**tile._asdict(), **{name: round(one[tile], 9) for name, one in found.items()}}
            for tile in sorted(GRID, key=whole.__getitem__)
        ]
        chosen = sum(
            found[product.name][
                used[fp8, product.rows * product.columns > project.MIN_LARGE_ELEMENTS]
            ]
            for product in own
        )
        figures[f"layer_{label}_best_ratio"] = min(whole.values()) / chosen
        for line in samples[label][:5]:
            print(label, line, flush=True)
    publish(flags.name, figures, samples, folder=flags.out)


if __name__ == "__main__":
    main()
