"""What the leak lab takes on a device, by the counters of torch's allocator.

Tests ``leaklab/device_growth.py`` and ``leaklab/device_reserves.py``.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from leaklab import device_growth, device_reserves
from leaklab.recording.run import Injection
from leaklab.recording.runs import RUNS
from plimsoll_api.assessment import Segment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CAUSES = {run.mechanism: run.cause for run in RUNS if isinstance(run.cause, Injection)}
LEAKS = device_growth.LEAKS | device_reserves.LEAKS
HEALTHY = device_growth.HEALTHY | device_reserves.HEALTHY
PIECES, SECONDS, LAST_S = 8, 480, 80


def held() -> dict[Segment, int]:
    """Bytes in use and unused, of what torch's allocator has of the device, without garbage."""
    gc.collect()
    torch.cuda.empty_cache()
    used = torch.cuda.memory_allocated()
    unused = torch.cuda.memory_reserved() - used
    return {Segment.TORCH_ALLOCATED: used, Segment.TORCH_RESERVED_UNUSED: unused}


@pytest.mark.parametrize(
    "name",
    [
        "adapter_copies", "private_pools", "hooked_outputs", "failed_batches", "unread_outputs",
        "stream_states",
    ],
)  # fmt: skip
def test_a_leak_grows_in_its_segment_by_what_it_was_told_to_take(name: str) -> None:
    cause = CAUSES[name]
    assert cause.segment is not None
    take = LEAKS[name]()
    before = held()[cause.segment]
    for _ in range(PIECES):
        take(cause.piece)
    assert held()[cause.segment] - before == pytest.approx(PIECES * cause.piece, rel=0.01)


def test_a_registered_region_is_shared_memory_of_the_host() -> None:
    torch.ones(1, device="cuda")
    cause = CAUSES["transfer_regions"]
    take = device_growth.LEAKS["transfer_regions"]()
    before = shared()
    for _ in range(PIECES):
        take(cause.piece)
    assert shared() - before == PIECES * cause.piece


def shared() -> int:
    """Bytes of shared memory that are resident in this process."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("RssShmem:")[1].split()[0])


@pytest.mark.parametrize(
    "name", ["device_stairs", "split_blocks", "batch_buffers", "regrown_workspace"]
)
def test_growth_ends_at_the_bound_that_its_run_states(name: str) -> None:
    torch.cuda.empty_cache()
    tick, before, found = HEALTHY[name](), torch.cuda.memory_reserved(), []
    for second in range(SECONDS):
        tick(float(second))
        found.append(torch.cuda.memory_reserved() - before)
    assert found[-1] == CAUSES[name].bound
    assert min(found[-LAST_S:]) == max(found)
