"""Which tiles are the fastest for products of a few rows? The source of ``few_rows.choose_tile``.

    python -m bench.few_rows --name few-rows-h200

All products of a model run in one CUDA graph, with the norms between them, as in a decode step
without attention: a tile that is fast alone may delay the kernels beside it. The first step has the
tiles of ``choose_tile``. The next ones have another tile for one product, and a product's fastest
tile stays for those after it. A figure is the seconds of the first step, and the share of them that
the fastest tiles would take; the samples have the seconds of each tile. Tiles that need more memory
than a multiprocessor has are left out. ``gb_per_s`` counts each matrix once; ``copy_gb_per_s``
counts what a large copy on the same device reads and writes.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import triton

from bench.project import LAYERS, Product
from bench.result import arguments_of, publish
from bench.shapes import SHAPES
from plimsoll_engine.kernels import few_rows
from plimsoll_engine.kernels.few_rows import Tile
from plimsoll_engine.kernels.norm import rms_norm
from plimsoll_engine.kernels.sizes import NUM_COUNTERS, pad_few_rows

GRID = [
    Tile(size, depth, stages, parts, ahead)
    for size, depth, stages in (
        (16, 256, 6), (64, 128, 4), (64, 128, 5), (64, 256, 3), (64, 256, 4), (128, 64, 7),
    )
    for parts in (1, 2, 4)
    for ahead in (512, 1024)
]  # fmt: skip
REPLAYS = 20
ROWS = (4, 32)
COPY_BYTES = 4 << 30
WORKERS = 8


def products(shape: str) -> list[Product]:
    """Return the products of a layer, and of the head."""
    config = SHAPES[shape]()
    head = Product("head", config.vocab_size, config.hidden_size, norm=True)
    return [*LAYERS[shape], head]


class Chain:
    """The products of ``layers`` layers and the head, of ``rows`` rows."""

    def __init__(self, shape: str, layers: int, rows: int) -> None:
        self.products = products(shape)
        names = [one for one in self.products if one.name != "head"] * layers
        self._matrices = [
            (one, torch.empty(one.rows, one.columns, device="cuda").normal_(0, 0.02).bfloat16())
            for one in [*names, self.products[-1]]
        ]
        self._inputs = {
            one.name: torch.randn(rows, one.columns, device="cuda").bfloat16()
            for one in self.products
        }
        self._stream = torch.randn(rows, self.products[0].columns, device="cuda").bfloat16()
        self._norm = torch.ones(self.products[0].columns, device="cuda").bfloat16()
        self._arrivals = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(matrix.nbytes for _, matrix in self._matrices)

    def run(self) -> None:
        """Compute all products once. The input of a product that is not normed is constant."""
        for one, matrix in self._matrices:
            x = self._inputs[one.name]
            if one.norm:
                x = rms_norm(self._stream, None, self._norm, 1e-5)
            into = self._stream if one.added else None
            few_rows.multiply_few_rows(x, matrix, self._arrivals, silu=one.silu, into=into)

    def seconds(self, tiles: dict[str, Tile]) -> float:
        """Return the median of the steps with ``tiles`` by product; others have the engine's."""
        by_size = {
            (one.rows // 2 if one.silu else one.rows, one.columns): tiles[one.name]
            for one in self.products
            if one.name in tiles
        }
        chosen = few_rows.choose_tile
        few_rows.choose_tile = lambda size, columns, *rest: by_size.get(
            (size, columns), chosen(size, columns, *rest)
        )
        try:
            self.run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run()
        finally:
            few_rows.choose_tile = chosen
        milliseconds = statistics.median(timed(graph.replay) for _ in range(REPLAYS))
        return milliseconds / 1000


def timed(call: Callable[[], Any]) -> float:
    """Return the milliseconds that the device takes for ``call``."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def fits(one: Product, tile: Tile) -> bool:
    """Report whether ``one`` can be computed with ``tile``."""
    shared = tile.parts == 1 or (not one.silu and one.rows <= tile.size * NUM_COUNTERS)
    return shared and tile.parts * tile.depth <= one.columns


def compile_tiles(job: tuple[str, int, int]) -> None:
    """Put every ``WORKERS``-th tile's kernels of a shape into the cache on disk."""
    shape, rows, first = job
    chain = Chain(shape, 1, rows)
    for tile in GRID[first::WORKERS]:
        for one in chain.products:
            if fits(one, tile):
                try_tile(chain, {one.name: tile})


def try_tile(chain: Chain, tiles: dict[str, Tile]) -> float | None:
    """Return the seconds of a step; None if a tile does not fit into a multiprocessor."""
    try:
        return chain.seconds(tiles)
    except triton.runtime.errors.OutOfResources:
        return None


def copy_rate() -> float:
    """Return the gigabytes a second that a large copy reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = statistics.median(timed(lambda: target.copy_(source)) for _ in range(5))
    return 2 * COPY_BYTES / milliseconds / 1e6


def main() -> None:
    parser = arguments_of(__doc__, "few-rows")
    flags = parser.parse_args()
    jobs = [(shape, rows, i) for shape in LAYERS for rows in ROWS for i in range(WORKERS)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        list(pool.map(compile_tiles, jobs))
    figures: dict[str, float | int | None] = {"copy_gb_per_s": copy_rate()}
    samples: dict[str, Any] = {}
    for shape in LAYERS:
        for rows in ROWS:
            chain = Chain(shape, SHAPES[shape]().num_hidden_layers, rows)
            label, best = f"step_{shape}_{rows}_rows", dict[str, Tile]()
            first = fastest = chain.seconds({})
            lines = samples[label] = []
            for one in sorted(chain.products, key=lambda one: -one.rows * one.columns):
                for tile in (tile for tile in GRID if fits(one, tile)):
                    found = try_tile(chain, best | {one.name: tile})
                    if found is not None:
                        lines.append({"product": one.name, **tile._asdict(), "seconds": found})
                    if found is not None and found < fastest:
                        fastest, best = found, best | {one.name: tile}
            figures[f"{label}_s"] = first
            figures[f"{label}_gb_per_s"] = chain.nbytes / first / 1e9
            figures[f"{label}_best_ratio"] = fastest / chain.seconds({})
            print(label, pad_few_rows(rows), figures[f"{label}_s"], fastest, best, flush=True)
            del chain
    publish(flags.name, figures, samples, folder=flags.out)


if __name__ == "__main__":
    main()
