"""``tests/leftovers.py``: an interrupted run leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import leftovers

ROOT = Path(__file__).parents[2]
SAMPLE = """
import os, subprocess, sys, time
from pathlib import Path

IGNORES = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"

def test_waits():
    one = subprocess.Popen([sys.executable, "-c", IGNORES], start_new_session=True)
    shell = f"{sys.executable} -c '{IGNORES}' & sleep 600"
    subprocess.Popen(["sh", "-c", shell], start_new_session=True)
    Path("run").write_text(os.environ["PLIMSOLL_TEST_RUN"])
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("flags", [(), ("-n", "1")], ids=["alone", "parallel"])
def test_an_interrupted_run_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, flags: tuple[str, ...]
) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    (tmp_path / "conftest.py").write_text(
        "import signal\n"
        "from tests import leftovers\n"
        # A job that a shell runs in the background ignores SIGINT, and so do its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        leftovers.watch_over_this_run()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags]
    run = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until((tmp_path / "run").exists, 60)
        token = (tmp_path / "run").read_text()
        until(lambda: len(list(leftovers.marked(token))) >= 4, 20)
        if number == signal.SIGINT:
            os.killpg(run.pid, number)  # as a terminal does
        else:
            run.kill()
        run.wait(60)
        until(lambda: not list(leftovers.marked(token)), 60)
    finally:
        run.kill()
        run.wait(10)


def until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
