"""What the leak lab takes on a device, by the counters of torch's allocator.

Tests ``leaklab/device_growth.py`` and ``leaklab/device_reserves.py``.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
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


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process for these tests alone. Some leaks leave memory registered with the device after it
    has been unmapped, so that later copies to the device fail or read what was there before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def held() -> dict[Segment, int]:
    """Bytes in use and unused, of what torch's allocator has of the device, without garbage."""
    gc.collect()
    torch.cuda.empty_cache()
    used = torch.cuda.memory_allocated()
    unused = torch.cuda.memory_reserved() - used
    return {Segment.TORCH_ALLOCATED: used, Segment.TORCH_RESERVED_UNUSED: unused}


def leak(name: str, segment: Segment, piece: int) -> int:
    """Bytes that a leak has taken in its segment."""
    take = LEAKS[name]()
    before = held()[segment]
    for _ in range(PIECES):
        take(piece)
    return held()[segment] - before


@pytest.mark.parametrize(
    "name",
    [
        "adapter_copies", "private_pools", "hooked_outputs", "failed_batches", "unread_outputs",
        "stream_states",
    ],
)  # fmt: skip
def test_a_leak_grows_in_its_segment_by_what_it_was_told_to_take(
    name: str, process: ProcessPoolExecutor
) -> None:
    cause = CAUSES[name]
    assert cause.segment is not None
    grown = process.submit(leak, name, cause.segment, cause.piece).result()
    assert grown == pytest.approx(PIECES * cause.piece, rel=0.01)


def register(piece: int) -> int:
    """Bytes of shared memory that regions which were registered with the device have taken."""
    torch.ones(1, device="cuda")
    take = device_growth.LEAKS["transfer_regions"]()
    before = shared()
    for _ in range(PIECES):
        take(piece)
    return shared() - before


def shared() -> int:
    """Bytes of shared memory that are resident in this process."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("RssShmem:")[1].split()[0])


def test_a_registered_region_is_shared_memory_of_the_host(process: ProcessPoolExecutor) -> None:
    piece = CAUSES["transfer_regions"].piece
    assert process.submit(register, piece).result() == PIECES * piece


def grow(name: str) -> list[int]:
    """Bytes that growth which ends has reserved after each second."""
    torch.cuda.empty_cache()
    tick, before, found = HEALTHY[name](), torch.cuda.memory_reserved(), []
    for second in range(SECONDS):
        tick(float(second))
        found.append(torch.cuda.memory_reserved() - before)
    return found


@pytest.mark.parametrize(
    "name", ["device_stairs", "split_blocks", "batch_buffers", "regrown_workspace"]
)
def test_growth_ends_at_the_bound_that_its_run_states(
    name: str, process: ProcessPoolExecutor
) -> None:
    found = process.submit(grow, name).result()
    assert found[-1] == CAUSES[name].bound
    assert min(found[-LAST_S:]) == max(found)
