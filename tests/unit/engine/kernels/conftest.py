"""The kernels run on the GPU where there is one, else in Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET when it is imported, and engines that other tests start would inherit
it, so `make test` runs this folder in a process of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_GPU = Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()

if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = [
        "test_decoder_steps.py",
        "test_experts.py",
        "test_fp8_kernels.py",
        "test_kernels.py",
        "test_rank_sums.py",
    ]


@pytest.fixture
def rounds_as_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter (3.6) loses the carry of a mantissa that is rounded up to the next power
    of two: 7.8 becomes 4. torch's conversion takes its place, for e4m3 alone."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converts(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.name != "fp8e4nv" or source.name != "fp32":
            return convert(data, source, target, mode)
        narrow = torch.from_numpy(data.copy()).to(torch.float8_e4m3fn)
        return narrow.view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", converts)
