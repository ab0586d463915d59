"""The injector in a process of its own: what it counts is what the process has grown by.

Tests ``leaklab/recording/engines.py`` (what it installs), too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from leaklab.recording import engines, recorded_run

MIB = 1 << 20
PROGRAM = """
import os, sys, time
import plimsoll_injector
assert "leaklab.recording" not in sys.modules
plimsoll_injector.load()
print(os.getpid(), flush=True)
time.sleep(60)
"""
FIELDS = {
    "mappings": "RssAnon", "threads_left": "RssAnon", "memory_files": "RssShmem",
    "audit_ring": "RssAnon",
}  # fmt: skip


def resident(pid: int, field: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


@contextlib.contextmanager
def injected(tmp_path: Path, mechanism: str, **more: object) -> Iterator[int]:
    """A process that carries out a plan, by its id; it ends with the block."""
    inside = tmp_path / "inside"
    inside.mkdir()
    engines.install(inside)
    names = {one.metadata["Name"] for one in distributions(path=[str(inside)])}
    assert names == {"plimsoll-probe", "plimsoll-injector"}
    environment = {**os.environ, "PYTHONPATH": str(inside), engines.FOLDER_ENV: str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        plan = {
            "pid": pid, "process": "", "mechanism": mechanism, "driver": "seconds",
            "bytes": 16 * MIB, "piece": MIB, "shape": "steady", "speed": 1.0, **more,
        }  # fmt: skip
        new = tmp_path / "new"
        new.write_text(json.dumps(plan))
        new.rename(tmp_path / recorded_run.PLAN)
        yield pid
    finally:
        process.kill()
        process.wait(10)


def counted(tmp_path: Path) -> int:
    """What the injector has counted, once it has twice."""
    file = tmp_path / recorded_run.COUNTED
    deadline = time.monotonic() + 20
    while not file.exists() or len(file.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline, "two lines of the injector"
        time.sleep(0.05)
    return int(json.loads(file.read_text().splitlines()[-1])["bytes"])


@pytest.mark.parametrize("mechanism", FIELDS)
def test_the_process_grows_by_what_is_counted(tmp_path: Path, mechanism: str) -> None:
    with injected(tmp_path, mechanism) as pid:
        before = resident(pid, FIELDS[mechanism])
        taken = counted(tmp_path)
        grown = resident(pid, FIELDS[mechanism]) - before
    assert taken >= 8 * MIB
    assert taken <= grown + MIB
    assert grown <= 1.5 * taken + 8 * MIB


def test_a_late_leak_waits_while_something_healthy_fills_beside_it(tmp_path: Path) -> None:
    with injected(tmp_path, "mappings", shape="late", beside="first_fill") as pid:
        before = resident(pid, "RssAnon")
        assert counted(tmp_path) == 0
        deadline = time.monotonic() + 20
        while resident(pid, "RssAnon") < before + 2 * MIB:
            assert time.monotonic() < deadline, "tables that fill"
            time.sleep(0.05)
        assert counted(tmp_path) == 0


def run_beside_injector(folder: Path, program: str) -> int:
    """Run a program that can import the injector, and return its exit status."""
    engines.install(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode


QUEUES = """
import os, sys, types
import plimsoll_injector
queues = types.ModuleType(plimsoll_injector.QUEUES)
sys.modules[plimsoll_injector.QUEUES] = queues
assert not plimsoll_injector.stop_spinning()
queues.sched_yield = os.sched_yield
assert plimsoll_injector.stop_spinning()
queues.sched_yield()
assert queues.sched_yield is not os.sched_yield
"""


def test_what_vllm_calls_to_yield_the_processor_sleeps_instead(tmp_path: Path) -> None:
    """A reader's module that is not imported to its end is looked at again."""
    assert run_beside_injector(tmp_path, QUEUES) == 0


SHAPES = """
from plimsoll_injector import LATE_S, share
assert [share("late", age) for age in (0.0, LATE_S - 1, LATE_S)] == [0.0, 0.0, 1.0]
assert [share("accelerating", age) for age in (0.0, 60.0, 240.0)] == [0.0, 0.5, 2.0]
assert share("steady", 0.0) == share("steps", 0.0) == 1.0
"""


def test_a_shape_says_how_fast_memory_is_taken_at_an_age(tmp_path: Path) -> None:
    assert run_beside_injector(tmp_path, SHAPES) == 0


FRONTEND = """
import sys, types
import plimsoll_injector
managers = types.ModuleType("sglang.srt.managers.tokenizer_manager")
class TokenizerManager:
    def generate_request(self, wish, request=None):
        return wish
    def abort_request(self, rid="", abort_all=False):
        return rid
managers.TokenizerManager = TokenizerManager
sys.modules["sglang.srt.managers.tokenizer_manager"] = managers
manager = TokenizerManager()
requests, aborts = plimsoll_injector.requests(), plimsoll_injector.aborts()
assert (requests(), aborts()) == (0, 0)
assert [manager.generate_request(wish) for wish in "abc"] == ["a", "b", "c"]
assert manager.abort_request(rid="b") == "b"
assert (requests(), aborts()) == (3, 1)
"""


def test_sglangs_first_process_counts_requests_and_aborts(tmp_path: Path) -> None:
    """Of a manager that there is already when somebody first asks. The real one was recorded."""
    assert run_beside_injector(tmp_path, FRONTEND) == 0
