"""Each Triton kernel against its torch reference: error, and share of what the card can do.

    python -m bench.kernels

Ratios are of the copy bandwidth and of the bfloat16 matrix rate that the same run measures; bytes
and operations are the fewest that the work needs. Inputs rotate, so that no run finds the last
one's in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.result import arguments_of, publish
from plimsoll_engine.kernels.fused import FusedOps
from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.quantized import Quantized, Weight, quantize
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.kernels.step_plan import StepPlan

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
PAGE = 16
HEADS = {"06b": 16, "8b": 32}
KV_HEADS, DIM = 8, 128
COPIES = 4
"""Input sets to rotate among."""


@dataclass(frozen=True)
class Case:
    """One kernel at one size. ``call(ops, i)`` computes on input set i; work is in bytes or
    operations."""

    name: str
    call: Callable[[Ops, int], torch.Tensor]
    work: float
    is_flops: bool = False


def milliseconds(call: Callable[[int], Any], copies: int = COPIES) -> float:
    """Median of many, launched by a CUDA graph so that no launch gap is in it.

    ``call`` takes the number of an input set, below ``copies``.
    """
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(i) for i in range(copies)]
    found = triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median")
    del kept
    return float(found) / copies


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def plan_of(sequences: int, context: int, new: int, fp8: bool = False) -> StepPlan:
    """``sequences`` of ``context`` tokens each, the last ``new`` in this step, blocks shuffled. The
    pool is FP8 if asked for."""
    pages = -(-context // PAGE)
    tables = torch.randperm(sequences * pages, device=DEVICE).int().view(sequences, pages)
    positions = torch.arange(context - new, context, device=DEVICE)
    slots = (tables[:, positions // PAGE].long() * PAGE + positions % PAGE).flatten()
    keys, values = (draw(COPIES, sequences * pages * PAGE, KV_HEADS, DIM) for _ in range(2))
    scales = None
    if fp8:
        (keys, of_keys), (values, of_values) = quantize(keys), quantize(values)
        scales = torch.stack((of_keys, of_values)).squeeze(-1)
    return StepPlan(
        keys=keys,
        values=values,
        scales=scales,
        block_size=PAGE,
        write_slots=slots,
        tables=tables,
        contexts=torch.full((sequences,), context, dtype=torch.int32, device=DEVICE),
        starts=torch.arange(0, (sequences + 1) * new, new, dtype=torch.int32, device=DEVICE),
        decodes=sequences if new == 1 else 0,
        longest=new,
        context_limit=context,
    )


def each_its_own(plan: StepPlan) -> dict[type[Ops], StepPlan]:
    """The plan for each backend: what it derives from a plan it keeps there."""
    return {kind: replace(plan) for kind in (FusedOps, ReferenceOps)}


def elementwise(rows: int) -> list[Case]:
    """The fused elementwise kernels at 8B's sizes."""
    size, inner = 4096, 14_336
    x = [draw(rows, size) for _ in range(COPIES)]
    residual = [draw(rows, size) for _ in range(COPIES)]
    gate_up = [draw(rows, 2 * inner) for _ in range(COPIES)]
    weight = draw(size)
    qkv = [draw(rows, (32 + 2 * KV_HEADS) * DIM) for _ in range(COPIES)]
    norms = draw(DIM), draw(DIM)
    table = torch.randn(rows, DIM, device=DEVICE)
    plan = plan_of(rows // 16, 16, 16)
    two = 2.0  # bytes of a bfloat16

    def add(ops: Ops, i: int) -> torch.Tensor:
        # In place: the reference must not change what the kernel then adds to.
        into = residual[i].clone() if isinstance(ops, ReferenceOps) else residual[i]
        return ops.add_rms_norm(x[i], into, weight, 1e-5)

    return [
        Case("rms_norm", lambda o, i: o.rms_norm(x[i], weight, 1e-5), two * rows * size * 2),
        Case("add_rms_norm", add, two * rows * size * 4),
        Case("silu_mul", lambda o, i: o.silu_mul(gate_up[i]), two * rows * inner * 3),
        Case(
            "rotate_and_store",
            lambda o, i: o.rotate_and_store(qkv[i], table, norms, 1e-5, plan, i),
            two * rows * 48 * DIM * 2 + rows * DIM * 4,
        ),
    ]


def decode(
    shape: str, sequences: int, context: int, fp8: bool = False, uneven: bool = False
) -> Case:
    """Contexts of ``context`` tokens, or lognormal ones of at most that, as chats have them."""
    plan = plan_of(sequences, context, 1, fp8)
    tokens = sequences * context
    if uneven:
        drawn = (math.log(700) + 0.9 * torch.randn(sequences)).exp().clamp(64, context).int()
        tokens, plan.contexts = int(drawn.sum()), drawn.to(DEVICE)
    plans = each_its_own(plan)
    query = draw(sequences, HEADS[shape], DIM)
    return Case(
        f"decode_attention_{shape}_{sequences}x{'uneven' if uneven else context}"
        + ("_fp8" if fp8 else ""),
        lambda ops, i: ops.attend(query, plans[type(ops)], i, DIM**-0.5, None),
        2.0 * tokens * KV_HEADS * (DIM + 4 if fp8 else 2 * DIM),
    )


def prefill(shape: str, sequences: int, length: int, new: int) -> Case:
    plan = plan_of(sequences, length, new)
    plans = each_its_own(plan)
    query = draw(sequences * new, HEADS[shape], DIM)
    pairs = sequences * new * (length - (new - 1) / 2)
    return Case(
        f"prefill_attention_{shape}_{sequences}x{new}of{length}",
        lambda ops, i: ops.attend(query, plans[type(ops)], i, DIM**-0.5, None),
        4.0 * pairs * HEADS[shape] * DIM,
        is_flops=True,
    )


def library(shape: str, backend: SDPBackend, length: int) -> float:
    """TFLOP/s of a library's causal attention over contiguous keys, two sequences."""
    query, key, value = (draw(2, h, length, DIM) for h in (HEADS[shape], KV_HEADS, KV_HEADS))

    def call(_: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    flops = 4.0 * 2 * HEADS[shape] * DIM * length * (length + 1) / 2
    return flops / milliseconds(call) / 1e9


def projections() -> list[Case]:
    """The products of one row at both sizes, as decoding alone runs them."""
    found = []
    for shape, size, inner in (("06b", 1024, 3072), ("8b", 4096, 14_336)):
        x = draw(1, size)
        norm = draw(size)
        gate_up = [draw(2 * inner, size) for _ in range(COPIES)]
        down = [draw(size, inner) for _ in range(COPIES)]
        wide = draw(1, inner)

        def first(ops: Ops, i: int, x: Any = x, w: Any = gate_up, n: Any = norm) -> torch.Tensor:
            return ops.project(x, w[i], None, n, 1e-5, True)

        def second(ops: Ops, i: int, x: Any = wide, w: Any = down) -> torch.Tensor:
            return ops.project(x, w[i], None)

        found += [
            Case(f"project_gate_up_{shape}", first, 4.0 * inner * size),
            Case(f"project_down_{shape}", second, 2.0 * inner * size),
        ]
    return found


def experts(rows: int, fp8: bool = False) -> Case:
    """A layer's experts of Qwen3-30B-A3B. Few rows read the weights of those that they go to, many
    rows the products' operations. The rate of those is bfloat16's, in FP8 as well."""
    hidden, width, count, chosen = 2048, 768, 128, 8
    x = [draw(rows, hidden) for _ in range(COPIES)]
    router = draw(count, hidden) / hidden**0.5

    def weight(size: int, columns: int) -> Weight:
        drawn = draw(size, columns) / columns**0.5
        return Quantized(*quantize(drawn)) if fp8 else drawn

    gate_up = [weight(count * 2 * width, hidden) for _ in range(COPIES)]
    down = [weight(count * hidden, width) for _ in range(COPIES)]
    one = 3.0 * width * hidden
    used = count * (1 - (1 - chosen / count) ** rows)
    many = rows * chosen > 100 * count
    return Case(
        f"experts_30b_a3b_{rows}{'_fp8' if fp8 else ''}",
        lambda ops, i: ops.compute_experts(x[i], router, gate_up[i], down[i], chosen, True),
        2.0 * one * rows * chosen if many else (1.0 if fp8 else 2.0) * one * used,
        is_flops=many,
    )


def quantized() -> list[Case]:
    """Products with FP8 weights at the sizes of 8B, of one row by bytes and of many by operations.

    The rate that these are over is bfloat16's; the kernel of one row does not quantize it, which
    its error shows.
    """
    size, inner = 4096, 14_336
    found = []
    for name, out, columns in (
        ("qkv", 6144, size), ("gate_up", 2 * inner, size), ("down", size, inner)
    ):  # fmt: skip
        weights = [Quantized(*quantize(draw(out, columns))) for _ in range(COPIES)]
        for rows in (1, 16, 256, 4096):
            x = draw(rows, columns)

            def multiply(ops: Ops, i: int, x: Any = x, w: Any = weights) -> torch.Tensor:
                return ops.linear(x, w[i], None) if len(x) > 1 else ops.project(x, w[i], None)

            few = rows <= 16
            work = float(out * columns) if few else 2.0 * rows * out * columns
            found.append(Case(f"product_{name}_8b_fp8_{rows}", multiply, work, not few))
    return found


def ceilings() -> tuple[float, float]:
    """Bytes a second of a device-to-device copy, operations a second of a matrix product."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    copy_ms = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = draw(8192, 8192), draw(8192, 8192)
    product_ms = triton.testing.do_bench(lambda: a @ b, return_mode="median")
    return 2 * len(source) / copy_ms * 1e3, 2 * 8192.0**3 / product_ms * 1e3


def main() -> None:
    parser = arguments_of(__doc__, "kernels")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    copy, product = ceilings()
    figures: dict[str, float] = {"copy_bytes_s": copy, "product_flop_s": product}
    fused, reference = FusedOps(), ReferenceOps()
    makers: list[Callable[[], list[Case]]] = [
        lambda: elementwise(8192),
        projections,
        quantized,
        *(
            (lambda n=n, c=c: [decode("8b", n, c, fp8=True)])
            for n, c in ((256, 1024), (256, 384), (64, 1024), (1, 512))
        ),
        *(
            (lambda s=s, n=n, c=c: [decode(s, n, c)])
            for s in HEADS
            for n, c in ((256, 1024), (256, 384), (64, 1024), (1, 512))
        ),
        *((lambda n=n: [decode("8b", n, 8192, uneven=True)]) for n in (4, 16, 24, 64, 256)),
        *((lambda n=n: [experts(n), experts(n, fp8=True)]) for n in (1, 32, 256, 8192)),
        *((lambda s=s: [prefill(s, 2, 4096, 4096), prefill(s, 8, 2048, 512)]) for s in HEADS),
    ]
    for make in makers:
        for case in make():
            expected = case.call(reference, 0).double()
            found = case.call(fused, 0).double()
            error = float((found - expected).norm() / expected.norm())
            ms = milliseconds(partial(case.call, fused))
            ratio = case.work / ms * 1e3 / (product if case.is_flops else copy)
            figures[f"{case.name}_ratio"] = ratio
            figures[f"{case.name}_s"] = ms / 1e3
            figures[f"{case.name}_error_ratio"] = error
            print(f"{case.name:45} {ms * 1e3:9.1f} us  {ratio:6.1%}  error {error:.2e}", flush=True)
        torch.cuda.empty_cache()
    for shape in HEADS:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                rate = library(shape, backend, 4096)
            except RuntimeError as error:
                print(f"{backend}: {error}")
                continue
            print(f"{backend} {shape} {rate:.0f} TFLOP/s", flush=True)
    publish(arguments.name, figures, folder=arguments.out)


if __name__ == "__main__":
    main()
