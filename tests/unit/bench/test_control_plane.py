"""An interrupted benchmark ends its control plane, and leaves no file of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCHMARK = """
import signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from bench import control_plane
from tests.lab.processes import Processes, alive

home = Path(sys.argv[1])
home.mkdir()
processes = Processes(home)

class Lab(SimpleNamespace):
    def start(self):
        processes.start("etcd", ["sleep", "600"])

    def stop(self):
        processes.stop("etcd")
        (home / "etcd.log").unlink()
        home.rmdir()

control_plane.new_lab = lambda node: Lab(kube=lambda *words: "")
control_plane.operator_kubeconfig = lambda kube, target: target
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
with control_plane.control_plane():
    print(processes.running["etcd"], flush=True)
    while True:  # CPython runs the handler of a signal just before a sleep only after that sleep
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_with_its_control_plane(tmp_path: Path, number: signal.Signals) -> None:
    home = tmp_path / "lab"
    command = [sys.executable, "-c", BENCHMARK, str(home)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as benchmark:
        assert benchmark.stdout is not None
        daemon = benchmark.stdout.readline().strip()
        benchmark.send_signal(number)
        try:
            assert "KeyboardInterrupt" in benchmark.communicate(timeout=60)[1]
        finally:
            benchmark.kill()
    assert not home.exists()
    assert not Path(f"/proc/{daemon}").exists()
