"""Memory that is swapped out, and segments that no process holds, as the supervisor sees them.

Tests ``defects/host.py``.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.process import host_memory
from plimsoll_faults import inject
from plimsoll_faults.defects import WorkerFaults
from plimsoll_sidecar.signals import shared_memory
from tests.swap import swap_file

MIB = 1 << 20
AGE_S = 61.0
PROC = Path("/proc")

LEAVES = """
import sys
from plimsoll_faults.kinds import SharedOrphan
from plimsoll_faults.defects.mappings import SharedOrphanDefect as Defect
defect = Defect(SharedOrphan(bytes_per_request=1 << 20, family=sys.argv[1]), None)
defect.after_requests(2)
print(*defect.orphans, flush=True)
sys.stdin.readline()
"""


def fault_in(engine: EngineCore, text: str) -> Any:
    return WorkerFaults(text, 1, engine).defects[0]


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[None]:
    with swap_file(tmp_path):
        yield


def test_swapped_memory_grows_and_resident_memory_does_not(swap: None, make_engine: Any) -> None:
    defect = fault_in(make_engine(), "swapped_growth:bytes_per_request=1Mi")
    swapped, resident = host_memory.read_swapped_bytes(), host_memory.read_rss_anon_bytes()
    defect.after_requests(16)
    after, still = host_memory.read_swapped_bytes(), host_memory.read_rss_anon_bytes()
    assert swapped is not None
    assert resident is not None
    assert after is not None
    assert still is not None
    assert after - swapped > 12 * MIB
    assert still - resident < 4 * MIB
    for mapping in defect.mappings.kept:
        mapping.close()


def test_a_machine_without_swap_says_so(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = make_engine()
    monkeypatch.setattr(host_memory, "read_machine_swap_bytes", lambda: 0)
    with pytest.raises(inject.InjectError, match="needs swap, but this machine has none"):
        fault_in(engine, "swapped_growth")
    # A container that may not swap: the pages stay.
    monkeypatch.setattr(host_memory, "read_machine_swap_bytes", lambda: 1 << 30)
    monkeypatch.setattr(host_memory, "read_swapped_bytes", lambda: 0)
    with pytest.raises(inject.InjectError, match=r"cannot swap memory out, .*memory\.swap\.max"):
        fault_in(engine, "swapped_growth")


@pytest.fixture
def leaver() -> Iterator[Any]:
    """Starts a process that leaves two segments of 1 MiB; what they are called, and the process."""
    left: list[tuple[str, str]] = []
    started: list[subprocess.Popen[str]] = []

    def start(family: str) -> tuple[subprocess.Popen[str], list[str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", LEAVES, family],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        names = process.stdout.readline().split()
        left.extend((family, name) for name in names)
        return process, names

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)
    libc = ctypes.CDLL(None)
    for family, name in left:
        if family == "posix":
            Path(name).unlink()
        else:
            assert libc.shmctl(int(name), 0, None) == 0  # IPC_RMID


def test_files_in_dev_shm_outlive_the_process_that_left_them(leaver: Any, tmp_path: Path) -> None:
    process, names = leaver("posix")
    assert len(names) == 2
    (tmp_path / str(process.pid)).symlink_to(PROC / str(process.pid))
    for alive in (True, False):
        if not alive:
            process.kill()
            process.wait(30)
        files = [f for name in names if (f := shared_memory.read_file(name)) is not None]
        assert sum(file.bytes for file in files) == 2 * MIB
        holders = shared_memory.find_files_in_use(files, tmp_path)
        assert not any(map(holders.may_include, files)), "who wrote them has let go of them"


def test_sysv_segments_outlive_the_process_that_left_them(leaver: Any) -> None:
    def orphaned() -> int:
        header, *lines = Path("/proc/sysvipc/shm").read_text().splitlines()
        rows = [dict(zip(header.split(), map(int, line.split()), strict=False)) for line in lines]
        return sum(
            r["rss"] + r["swap"] for r in rows if str(r["shmid"]) in names and not r["nattch"]
        )

    process, names = leaver("sysv")
    assert orphaned() == 2 * MIB
    process.kill()
    process.wait(30)
    assert orphaned() == 2 * MIB
    try:
        seen = shared_memory.sum_unattached_segment_bytes(AGE_S, time.time() + AGE_S + 1)
    except shared_memory.UnknownUsersError as error:
        assert "namespace of its node" in str(error)  # noqa: PT017 - it depends on the machine
    else:
        assert seen >= 2 * MIB
