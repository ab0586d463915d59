"""What products on a CPU leave behind in their process."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from plimsoll_engine.kernels.quantized import product
from plimsoll_engine.process.host_memory import read_malloc_bytes

ROWS = range(1, 513)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_on_a_cpu_keeps_little_for_each_number_of_rows(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    x = torch.randn(ROWS[-1], 64).to(dtype)
    product(x[:1], weight, bias)
    before, _ = read_malloc_bytes()
    for rows in ROWS:
        product(x[:rows], weight, bias)
    after, _ = read_malloc_bytes()

    assert before is not None
    assert after is not None
    assert after - before < 40 << 20, "512 numbers of rows take 200 MB where each is compiled"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_zeros_change_no_product(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    for rows in (1, 2, 16, 17, 33, 100, 511):
        x = torch.randn(rows, 64).to(dtype)
        torch.testing.assert_close(product(x, weight, bias), linear(x, weight, bias))
