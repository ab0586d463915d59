"""Resident memory of real processes, their children and their ends."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_api.admin import ProcessMemory, Role
from plimsoll_sidecar.signals import process_table, resident_memory
from plimsoll_sidecar.signals.process_table import identify
from plimsoll_sidecar.signals.resident_memory import EngineProcessTable

MIB = 1 << 20
PROGRAM = """
import os, sys
child = os.fork()
held = bytearray(b"x" * ({mib} << 20))
print(child or "child", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    """A process of some 60 MiB with a child of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(mib=48)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()
    if process.stdin is not None:
        process.stdin.close()


def test_a_process_and_its_descendants_are_summed(engine: subprocess.Popen[bytes]) -> None:
    processes = EngineProcessTable()
    processes.set_processes([ProcessMemory(Role.FRONTEND, engine.pid)])
    host = processes.read()
    assert host.processes == 2
    assert host.rss_anon is not None
    assert 96 * MIB < host.rss_anon < 160 * MIB
    assert host.by_process is not None
    assert [p.role for p in host.by_process] == ["frontend", "other"]
    assert sum(p.rss_shmem or 0 for p in host.by_process) == host.rss_shmem
    assert processes.main_process == identify(engine.pid)


def test_a_child_that_is_reported_too_counts_once(
    engine: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An external engine reports all its processes: half as many as allowed were too many."""
    (child,) = process_table.read_children(engine.pid) or [0]
    monkeypatch.setattr(resident_memory, "MAX_PROCESSES", 2)
    processes = EngineProcessTable()
    processes.set_processes(
        [ProcessMemory(Role.FRONTEND, engine.pid), ProcessMemory(Role.OTHER, child)]
    )
    host = processes.read()
    assert host.processes == 2
    assert host.rss_anon is not None


def test_a_process_that_ended_is_not_read(engine: subprocess.Popen[bytes]) -> None:
    processes = EngineProcessTable()
    processes.set_processes([ProcessMemory(Role.WORKER, engine.pid)])
    engine.kill()
    engine.wait(10)
    assert processes.read().rss_anon is None
    assert processes.main_process is None


def test_processor_time_is_unknown_where_one_process_cannot_be_read(
    engine: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted as none, the engine would seem to rest."""
    processes = EngineProcessTable()
    processes.set_processes([ProcessMemory(Role.WORKER, engine.pid)])
    processes.read()
    (child,) = set(processes.get_labels()) - {engine.pid}
    readings = [process_table.read_process(pid) for pid in (engine.pid, child)]
    spent = [reading.cpu_s for reading in readings if reading is not None]
    assert processes.sum_helpers_cpu_s() == pytest.approx(sum(spent), abs=0.1)
    assert spent[0] > 0
    monkeypatch.setattr(
        resident_memory,
        "read_process",
        lambda pid: None if pid == child else process_table.read_process(pid),
    )
    host = processes.read()
    assert processes.sum_helpers_cpu_s() is None
    assert (host.processes, host.rss_anon) == (2, None)


def test_a_sample_reads_no_file_of_a_process_more_often_than_it_must(
    engine: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity before and after the memory; everything else follows from these readings."""
    read_proc_file, counts = process_table.read_proc_file, Counter[tuple[int, str]]()

    def read(pid: int, name: str, *limit: int) -> bytes:
        counts[pid, name] += 1
        return read_proc_file(pid, name, *limit)

    for module in (process_table, resident_memory):
        monkeypatch.setattr(module, "read_proc_file", read)
    processes = EngineProcessTable()
    processes.set_processes([ProcessMemory(Role.FRONTEND, engine.pid)])
    processes.read()
    assert processes.frontend_lives
    assert processes.main_process == identify(engine.pid)
    processes.sum_helpers_cpu_s()
    (child,) = processes.get_labels().keys() - {engine.pid}
    assert counts[engine.pid, "stat"] <= 4, "as reported, twice while read, and by this test"
    assert counts[child, "stat"] == 2
    assert counts[engine.pid, "status"] == counts[child, "status"] == 1
    assert counts[engine.pid, f"task/{engine.pid}/children"] == 1


def test_our_own_pid_named_by_an_engine_is_of_another_namespace() -> None:
    processes = EngineProcessTable()
    processes.set_processes(
        [ProcessMemory(Role.FRONTEND, os.getpid()), ProcessMemory(Role.WORKER, 1)]
    )
    assert processes.main_process is None


def test_a_zombie_has_no_memory() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 10
    while (
        resident_memory.read_resident_memory(process.pid) is not None
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert resident_memory.read_resident_memory(process.pid) is None
    process.wait(10)
    assert resident_memory.read_resident_memory(process.pid) is None


def test_huge_pages_of_a_pool_are_memory_of_the_process() -> None:
    """In no other figure, and no part of what is resident."""
    pool = Path("/proc/sys/vm/nr_hugepages")
    had = int(pool.read_text())
    try:
        pool.write_text(str(had + 4))
    except OSError:
        pytest.skip("huge pages need root")
    try:
        before = resident_memory.read_resident_memory(os.getpid())
        # MAP_HUGETLB, which Python does not name.
        with mmap.mmap(
            -1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000
        ) as memory:
            for at in range(0, 8 << 20, 2 << 20):
                memory[at] = 1
            after = resident_memory.read_resident_memory(os.getpid())
        assert resident_memory.has_huge_pages()
    except OSError as error:
        pytest.skip(f"this machine has no room for huge pages: {error}")
    finally:
        pool.write_text(str(had))
    assert before is not None
    assert after is not None
    assert (before.hugetlb, after.hugetlb) == (0, 8 << 20)
