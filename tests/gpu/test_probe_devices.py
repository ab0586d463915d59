"""What the probe reads of PyTorch's allocators, against what they say themselves.

Tests ``plimsoll_probe/memory.py``.
"""

from __future__ import annotations

import pytest
import torch

from plimsoll_probe import memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIB = 1 << 20


def test_devices_say_what_torch_holds_on_them() -> None:
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    (device,) = [
        one for one in memory.read_devices() if one["index"] == torch.cuda.current_device()
    ]
    assert device["allocated"] == torch.cuda.memory_allocated()
    assert device["reserved"] == torch.cuda.memory_reserved()
    assert device["allocated"] >= held.nbytes
    assert device["uuid"].startswith(("GPU-", "MIG-"))


def test_pinned_memory_of_the_host_is_known() -> None:
    held = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
    pinned = memory.read_pinned_bytes()
    assert pinned is not None
    assert pinned >= held.nbytes
