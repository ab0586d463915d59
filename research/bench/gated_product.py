"""The first product of an MLP with its activation in one kernel, beside the library's and another.

    python -m bench.gated_product --name gated-product-h100

The source of ``gated_product.MIN_TILES_PER_PROCESSOR`` and ``MIN_BUSY_SHARE``: products of several
models with 256 to 8,000 rows, in bfloat16. The two ways run in turns, behind a long product that
the host's launches hide behind, so that both meet the same heat. A figure is the time of the two
kernels over that of the one; the samples have the median seconds, and how many tiles each processor
has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from bench.result import arguments_of, publish
from plimsoll_engine.kernels import gated_product
from plimsoll_engine.kernels.activation import silu_mul

SIZES = {"8b": (14_336, 4096), "8b_tp2": (7168, 4096), "06b": (3072, 1024), "1b": (8192, 2048)}
"""Columns of a projection, and of the input."""
ROWS = (256, 512, 1024, 2048, 4096, 8000)
TURNS = 60
HIDDEN_BEHIND = 8192
"""Rows and columns of the product that hides launches."""

Call = Callable[[], torch.Tensor]


def seconds(ways: dict[str, Call]) -> dict[str, float]:
    """The median time of each way."""
    for way in ways.values():
        way()
        way()
    long = torch.randn(HIDDEN_BEHIND, HIDDEN_BEHIND, device="cuda").bfloat16()
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in ways}
    for turn in range(TURNS):
        if turn % 4 == 0:
            torch.mm(long, long)
        for name, way in ways.items():
            begin, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            begin.record()
            way()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in own) / 1e3
        for name, own in marks.items()
    }


def main() -> None:
    parser = arguments_of(__doc__, "gated-product")
    flags = parser.parse_args()
    torch.manual_seed(0)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    figures: dict[str, float | int | None] = {}
    samples: dict[str, Any] = {}
    for shape, (size, columns) in SIZES.items():
        weight = torch.randn(2 * size, columns, device="cuda").bfloat16() * 0.02
        for rows in ROWS:
            x = torch.randn(rows, columns, device="cuda").bfloat16()
            found = seconds(
                {
                    "parts": lambda x=x, w=weight: silu_mul(linear(x, w)),  # type: ignore[misc]
                    "one": lambda x=x, w=weight: gated_product.gated_product(x, w),  # type: ignore[misc]
                }
            )
            tiles = gated_product.count_tiles(rows, size)
            figures[f"{shape}_{rows}_ratio"] = found["parts"] / found["one"]
            samples[f"{shape}_{rows}"] = {**found, "tiles": round(tiles / processors, 2)}
            print(shape, rows, samples[f"{shape}_{rows}"], flush=True)
    publish(flags.name, figures, samples, folder=flags.out)


if __name__ == "__main__":
    main()
