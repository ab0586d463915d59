"""What NVIDIA's assembler says of kernels that are compiled for a Hopper GPU: no device is needed.

``python -m tests.ptxas_notes`` prints it as JSON, by kernel. Not under TRITON_INTERPRET, which
leaves nothing to compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plimsoll_engine.kernels import experts, gated_product, prefill_attention

HOPPER = GPUTarget("cuda", 90, 32)
NOTE = re.compile(r"\((C\d+)\) (.*)")


def notes(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> list[str]:
    """Compile ``kernel`` and return the notes on its performance; pointers are aligned.

    ``types`` are those of its arguments, without its ``constants``.
    """
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*")
    }
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    text = triton.compile(source, target=HOPPER, options=options).asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(text)
        done = subprocess.run(
            [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(path), "-o", f"{folder}/out"],
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
    return [": ".join(found.groups()) for found in NOTE.finditer(done.stderr)]


def attention(window: bool, scaled: bool, dim: int) -> list[str]:
    """Of the attention of prompts, of eight kv heads with four queries each."""
    pages, scales = ("*fp8e4nv", "*fp32") if scaled else ("*bf16", "*bf16")
    types = {
        "query": "*bf16", "keys": pages, "values": pages, "key_scales": scales,
        "value_scales": scales, "tables": "*i32", "contexts": "*i32", "starts": "*i32",
        "out": "*bf16", "scale": "fp32", "window": "i32", "first": "i32", "width": "i32",
    }  # fmt: skip
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "DIM": dim, "DIM_PAD": triton.next_power_of_2(dim), "PAGE": 16,
        "ROWS": prefill_attention.ROWS_PER_PROGRAM, "TILE": prefill_attention.KEYS_PER_TILE,
        "WINDOWED": window, "SCALED": scaled, "PRECISION": "tf32",
    }  # fmt: skip
    return notes(
        prefill_attention._prefill_attention, types, constants,
        num_warps=prefill_attention.NUM_WARPS, num_stages=prefill_attention.NUM_STAGES,
    )  # fmt: skip


def gate_up() -> list[str]:
    """Of the first product of many rows of experts, as large as those of Qwen3-30B-A3B."""
    tile = experts.MANY_PAIRS_TILE
    types = {
        "x": "*bf16", "row_scales": "*bf16", "weight": "*bf16", "scales": "*bf16",
        "order": "*i32", "owners": "*i32", "out": "*bf16", "pairs": "i32",
    }  # fmt: skip
    constants = {
        "CHOSEN": 8, "HIDDEN": 2048, "WIDTH": 768, "SCALED": False, "ROWS": tile.rows,
        "COLUMNS": tile.columns // 2, "DEPTH": tile.depth, "PRECISION": "tf32", "OVERLAP": True,
    }  # fmt: skip
    return notes(
        experts._compute_gate_up, types, constants, num_warps=tile.warps, num_stages=tile.stages
    )


def gated() -> list[str]:
    """Of the first product of an MLP with many rows."""
    rows, columns, depth = (
        gated_product.TILE_ROWS, gated_product.TILE_COLUMNS, gated_product.TILE_DEPTH
    )  # fmt: skip
    types = {
        "x": f"tensordesc<bf16[{rows},{depth}]>", "weight": f"tensordesc<bf16[{columns},{depth}]>",
        "out": f"tensordesc<bf16[{rows},{columns}]>", "rows": "i32", "size": "i32",
        "columns": "i32",
    }  # fmt: skip
    constants = {
        "PROGRAMS": 132, "ROWS": rows, "COLUMNS": columns, "DEPTH": depth,
        "GROUP": gated_product.TILE_ROWS_PER_GROUP,
    }  # fmt: skip
    return notes(
        gated_product._gated_product, types, constants,
        num_warps=gated_product.NUM_WARPS, num_stages=gated_product.NUM_STAGES,
    )  # fmt: skip


def main() -> None:
    found = {
        f"attention window={window} fp8={scaled} dim={dim}": attention(window, scaled, dim)
        for window, scaled, dim in (
            (False, False, 128), (True, False, 128), (False, True, 128), (False, False, 64),
        )
    }  # fmt: skip
    print(json.dumps(found | {"experts": gate_up(), "gated product": gated()}))


if __name__ == "__main__":
    main()
