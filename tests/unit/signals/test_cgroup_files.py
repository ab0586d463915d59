"""Memory files of both versions of control groups, as kernels write them.

Tests ``signals/cgroup.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import tracemalloc
from pathlib import Path

import pytest

from plimsoll_sidecar.signals.cgroup import Cgroup, CgroupMemory
from plimsoll_sidecar.signals.process_table import find_memory_group


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_version_2(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        {
            "memory.current": "1000\n",
            "memory.max": "4294967296\n",
            "memory.stat": "anon 600\nfile 300\nkernel 50\nshmem 100\nslab 40\nswapcached 20\n"
            "sock 5\nactive_file 120\ninactive_file 70\nslab_reclaimable 30\n",
            "memory.swap.current": "70\n",
            "memory.events": "low 0\nhigh 7\nmax 3\noom 1\noom_kill 2\n",
            "memory.pressure": "some avg10=0.10 avg60=0.00 avg300=0.00 total=1500000\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=250000\n",
        },
    )
    assert Cgroup(folder, 2).read() == CgroupMemory(
        current=1000,
        anon=600,
        shmem=100,
        file=200,
        slab=40,
        kernel=20,
        sock=5,
        other=45,
        reclaimable=220,
        swap=50,
        limit=1 << 32,
        oom_kills=2,
        ooms=1,
        throttled=7,
        stalled_some_s=1.5,
        stalled_full_s=0.25,
    )


def test_a_page_that_is_compressed_in_swap_counts_once(tmp_path: Path) -> None:
    """The kernel charges zswap's memory as its own, and the page keeps its swap slot."""
    kept = "file 0\nshmem 0\nsock 0\nslab_reclaimable 10\n"
    write(
        tmp_path,
        {
            "memory.current": "700\n",
            "memory.swap.current": "0\n",
            "memory.stat": f"anon 600\nkernel 100\nzswap 0\n{kept}",
        },
    )
    before = Cgroup(tmp_path, 2).read()
    write(
        tmp_path,
        {
            "memory.current": "350\n",
            "memory.swap.current": "500\n",
            "memory.stat": f"anon 100\nkernel 250\nzswap 150\n{kept}",
        },
    )
    after = Cgroup(tmp_path, 2).read()
    assert (before.anon, before.swap, before.kernel) == (600, 0, 90)
    assert (after.anon, after.swap, after.kernel) == (100, 500, 90)
    assert after.other == before.other == 0


def test_version_1_counts_what_is_below_and_takes_shared_memory_out_of_the_cache(
    tmp_path: Path,
) -> None:
    folder = write(
        tmp_path,
        {
            "memory.usage_in_bytes": "1000\n",
            "memory.memsw.usage_in_bytes": "1250\n",
            "memory.limit_in_bytes": "9223372036854771712\n",
            "memory.stat": "cache 1\nrss 2\ntotal_cache 400\ntotal_rss 500\ntotal_shmem 100\n"
            "total_active_file 200\ntotal_inactive_file 90\nhierarchical_memory_limit 5000\n",
            "memory.kmem.usage_in_bytes": "60\n",
            "memory.kmem.tcp.usage_in_bytes": "7\n",
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        },
    )
    assert Cgroup(folder, 1).read() == CgroupMemory(
        current=1000,
        anon=500,
        shmem=100,
        file=300,
        sock=7,
        other=40,
        reclaimable=290,
        swap=250,
        limit=5000,
        oom_kills=1,
    )


def test_the_least_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    """A pod's own limit, or one of a slice above: the kernel kills at the first."""
    engine = tmp_path / "pod/engine"
    engine.mkdir(parents=True)
    write(tmp_path, {"memory.max": "max\n"})
    write(tmp_path / "pod", {"memory.max": "1000\n"})
    write(engine, {"memory.max": "5000\n"})
    assert Cgroup(engine, 2, tmp_path).read().limit == 1000
    assert Cgroup(engine, 2).read().limit == 5000


def test_the_share_of_the_limit_is_what_cannot_be_reclaimed() -> None:
    assert CgroupMemory(current=970, reclaimable=470, limit=1000).limit_ratio == 0.5
    for unknown in (CgroupMemory(current=970, limit=1000), CgroupMemory(current=1, reclaimable=0)):
        assert unknown.limit_ratio is None


def test_what_is_missing_or_no_number_is_unknown(tmp_path: Path) -> None:
    folder = write(tmp_path, {"memory.max": "max\n", "memory.stat": "anon lots\n\nfile\n"})
    assert Cgroup(folder, 2).read() == CgroupMemory()
    assert Cgroup(tmp_path / "gone", 1).read() == CgroupMemory()


def test_swap_is_never_negative_and_unknown_where_the_kernel_does_not_account_it(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, {"memory.usage_in_bytes": "1000\n"})
    assert Cgroup(folder, 1).read().swap is None
    # The two files of version 1 are not read at the same instant.
    write(tmp_path, {"memory.memsw.usage_in_bytes": "900\n"})
    assert Cgroup(folder, 1).read().swap == 0


def test_a_group_shared_with_the_supervisor_says_nothing_about_the_engine() -> None:
    assert find_memory_group(os.getpid()) is not None
    assert Cgroup.find_for_process(os.getpid()) is None


def test_a_group_counts_only_where_all_of_it_is_the_engines(tmp_path: Path) -> None:
    """The session of a terminal has an editor and a build beside the engine."""
    found = find_memory_group(os.getpid())
    assert found is not None
    version, _ = found
    folder = Path("/sys/fs/cgroup", *(("memory",) if version == 1 else ()), f"t{os.getpid()}")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs a control group of its own, as root")
    command = ["sh", "-c", "sleep 60 & wait"]
    sleepers = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
    try:
        (folder / "cgroup.procs").write_text(str(sleepers[0].pid))
        group = Cgroup.find_for_process(sleepers[0].pid)
        assert group is not None
        assert group.folder == folder
        (folder / "cgroup.procs").write_text(str(sleepers[1].pid))
        assert Cgroup.find_for_process(sleepers[0].pid) is None
    finally:
        for one in sleepers:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait(10)
        for _ in range(100):  # the kernel lets go of ended processes in its own time
            with contextlib.suppress(OSError):
                folder.rmdir()
            if not folder.exists():
                break
            time.sleep(0.05)


def test_a_process_that_is_gone_has_no_group() -> None:
    assert Cgroup.find_for_process(2**22 + 1) is None


def test_a_pipe_or_a_huge_file_in_place_of_one_is_unknown_and_holds_nobody(tmp_path: Path) -> None:
    """The folder is in the engine's mount namespace, where it may mount what it likes."""
    for name in ("memory.stat", "memory.events", "memory.swap.current"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "memory.max").mkdir()
    (tmp_path / "memory.pressure").write_bytes(b"\xff" * 100)
    (tmp_path / "memory.current").write_bytes(b"1" * (1 << 20))
    tracemalloc.start()
    try:
        assert Cgroup(tmp_path, 2).read() == CgroupMemory()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 19
