"""A real process that the kernel swaps out, on a swap file of the test's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_api.admin import ProcessMemory, Role
from plimsoll_sidecar.signals.resident_memory import EngineProcessTable
from tests.swap import swap_file

MIB = 1 << 20
HELD = 24
PROGRAM = """
import mmap, sys
held = mmap.mmap(-1, {mib} << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(held), mmap.PAGESIZE):
    held[at] = 1 + at // mmap.PAGESIZE % 255
print("held", flush=True)
sys.stdin.readline()
held.madvise(21)  # MADV_PAGEOUT
print("out", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[None]:
    with swap_file(tmp_path):
        yield


def test_a_process_that_is_swapped_out_is_as_large_as_before(swap: None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(mib=HELD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            processes = EngineProcessTable()
            processes.set_processes([ProcessMemory(Role.WORKER, process.pid)])
            before = processes.read()
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            after = processes.read()
        finally:
            process.kill()
    assert before.rss_anon is not None
    assert after.rss_anon is not None
    assert after.by_process is not None
    assert before.swap is not None
    assert after.swap is not None
    moved = after.swap - before.swap
    assert moved > HELD * MIB // 2, "the kernel swapped nothing out"
    assert before.rss_anon - after.rss_anon > HELD * MIB // 2
    assert after.by_process[0].anonymous == after.rss_anon + after.swap
    whole = before.rss_anon + before.swap
    assert abs(after.rss_anon + after.swap - whole) < 2 * MIB
