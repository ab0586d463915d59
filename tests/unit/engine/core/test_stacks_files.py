"""Stacks files in the run directory: bounded, and a living process's is never touched.

Tests ``process/stacks.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

from plimsoll_engine.process import stacks
from plimsoll_engine.process.stacks import make_stacks_path


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    return process.pid


def test_only_the_newest_with_stacks_in_them_stay(tmp_path: Path) -> None:
    gone = ended_pid()
    folder = make_stacks_path(tmp_path, "worker", 1).parent
    folder.mkdir()
    living = make_stacks_path(tmp_path, "frontend", os.getpid())
    living.write_text("")
    for number in range(100):
        role = f"worker{number:03d}"
        file = make_stacks_path(tmp_path, role, gone)
        file.write_text("stack" if number % 2 else "")
        os.utime(file, (number, number))
    stacks.remove_stale_stacks(tmp_path)
    left = sorted(path.name for path in folder.iterdir())
    newest = [f"worker{number:03d}-{gone}.txt" for number in range(1, 100, 2)][
        -stacks.MAX_STALE_FILES :
    ]
    assert left == [living.name, *newest]
    stacks.remove_stale_stacks(tmp_path / "absent")


def test_a_long_file_is_begun_again(tmp_path: Path) -> None:
    file = tmp_path / "worker-1.txt"
    assert stacks.truncate_if_large(file) == 0
    file.write_bytes(b"x" * 10)
    assert stacks.truncate_if_large(file) == 10
    file.write_bytes(b"x" * (stacks.MAX_FILE_BYTES + 1))
    assert stacks.truncate_if_large(file) == 0
    assert file.stat().st_size == 0
