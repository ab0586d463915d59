"""Sizes of what other processes map. The memory itself is tested on a GPU (tests/gpu)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import plimsoll_engine
from plimsoll_engine.device import buffer
from plimsoll_engine.weights.memory import allocate_buffer

PAGE_BYTES = 2 << 20


@given(nbytes=st.integers(1, 1 << 40))
def test_a_shared_allocation_has_whole_pages_of_the_largest_size(nbytes: int) -> None:
    """Else its mapping by IPC has pages of 4 KiB, which are read at half the speed."""
    asked = []

    def allocated(pointer: object, size: ctypes.c_size_t) -> int:
        asked.append(size.value)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer, "_load_driver", lambda: SimpleNamespace(cuMemAlloc_v2=allocated))
        patch.setattr(buffer, "_ensure_context", lambda: None)
        made = allocate_buffer(torch.device("cuda"), nbytes, "weights")
    assert made.nbytes == nbytes
    assert asked == [-(-nbytes // PAGE_BYTES) * PAGE_BYTES]


def test_all_shared_memory_comes_from_one_place() -> None:
    """What ``DeviceBuffer`` guarantees holds for weights, KV pools and the ranks' buffers."""
    package = Path(plimsoll_engine.__file__).parent
    calls = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        for line in file.read_text().splitlines()
        if "cuMemAlloc" in line.replace("``cuMemAlloc``", "") or "cuIpcGetMemHandle" in line
    }
    assert calls == {"device/buffer.py"}
