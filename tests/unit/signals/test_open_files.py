"""Open files of real processes against their limits.

Tests ``signals/process_table.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll_api.trace import OpenFiles
from plimsoll_sidecar.signals import process_table
from plimsoll_sidecar.signals.process_table import OpenFilesReader, find_nearest_to_limit

OPENS = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
count = len(os.listdir("/proc/self/fd")) - 1  # less the one that lists
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(int(sys.argv[1]) - count)]
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holders() -> Iterator[dict[int, int]]:
    """PIDs of processes, and how many files each of them has open, of 128."""
    counts = (20, 110)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", OPENS, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for count in counts
    ]
    for one in started:
        assert one.stdout is not None
        assert one.stdout.readline()
    yield {one.pid: count for one, count in zip(started, counts, strict=True)}
    for one in started:
        one.kill()
        one.communicate(timeout=10)


def test_the_process_that_is_nearest_to_its_limit(holders: dict[int, int]) -> None:
    names = {pid: f"p{count}" for pid, count in holders.items()}
    assert find_nearest_to_limit(names) == OpenFiles("p110", 110, 128)
    few = {pid: name for pid, name in names.items() if name == "p20"}
    assert find_nearest_to_limit(few | {2**22: "ended"}) == OpenFiles("p20", 20, 128)


def test_what_cannot_be_read_is_unknown() -> None:
    assert find_nearest_to_limit({}) is None
    assert find_nearest_to_limit({2**22: "ended"}) is None


def test_more_than_can_be_counted_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a kernel that tells no number: there the folder has no size."""
    listed = tmp_path / "fd"
    listed.mkdir()
    for name in range(4):
        (listed / str(name)).touch()
    sizeless = type(tmp_path.stat())
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda path: sizeless((0,) * 10))
        assert process_table._count_open_files(str(listed)) == 4
        patched.setattr(process_table, "MAX_COUNTED_FILES", 3)
        assert process_table._count_open_files(str(listed)) is None


def test_it_is_read_at_intervals() -> None:
    now, asked = 0.0, 0

    def names() -> dict[int, str]:
        nonlocal asked
        asked += 1
        return {}

    reader = OpenFilesReader(lambda: now)
    for second in range(31):
        now = float(second)
        assert reader.read(names) is None
    assert asked == 3
