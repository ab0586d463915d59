"""The kernels of FP8 compute what their torch references compute, on inputs drawn anew.

Tests ``kernels/scaled_product.py`` and ``kernels/project.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from plimsoll_engine.kernels import quantized, scaled_product
from plimsoll_engine.kernels.fused import FusedOps
from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.quantized import FP8, Quantized
from plimsoll_engine.kernels.reference import ReferenceOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED: Ops = FusedOps()
REFERENCE: Ops = ReferenceOps()


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(23)
    if DEVICE.type == "cpu":
        rounds_as_the_device(monkeypatch)


def rounds_as_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter (3.6) loses the carry of a mantissa that is rounded up to the next power
    of two: 7.8 becomes 4. torch's conversion takes its place, for e4m3 alone."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converts(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.name != "fp8e4nv" or source.name != "fp32":
            return convert(data, source, target, mode)
        narrow = torch.from_numpy(data.copy()).to(FP8)
        return narrow.view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", converts)


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


def test_the_library_is_given_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its product in torch's own words: columns by columns, with scales of rows and of columns."""
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
