"""The launcher as a process: token, probes, restarts of its child, an orderly end."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from plimsoll_sidecar.act import readiness
from tests.ports import free_port


def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not within the limit"
        time.sleep(0.05)


class Running:
    """A launcher whose child cannot start: its configuration is not there."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        self.port = free_port()
        self.log = folder / "log"
        command = [sys.executable, "-m", "plimsoll_sidecar.launcher", "--host", "127.0.0.1"]
        command += ["--config", str(folder / "absent.json"), "--run-dir", str(self.run_dir)]
        command += ["--state-dir", str(self.state_dir), "--probe-port", str(self.port)]
        command += ["--metrics-port", str(free_port())]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)

    def probe(self, path: str = "/ready") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except ConnectionError:
            return 0
        finally:
            connection.close()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    try:
        eventually(lambda: running.probe() == 200)
        yield running
    finally:
        running.process.kill()
        running.process.wait(10)


def test_the_token_is_written_once_for_its_owner_only(launcher: Running, tmp_path: Path) -> None:
    token = launcher.run_dir / "admin-token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    before = token.read_text()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.wait(15) == 0
    again = Running(tmp_path)
    try:
        eventually(lambda: again.probe() == 200)
        assert token.read_text() == before
    finally:
        again.process.kill()
        again.process.wait(10)


def test_a_child_that_crashes_again_and_again_leaves_the_pod_ready(launcher: Running) -> None:
    eventually(lambda: launcher.log.read_text().count("supervisor exited with status") >= 2)
    assert launcher.probe() == 200
    log = launcher.log.read_text()
    assert "restarts it in 0.5 s" in log
    assert "restarts it in 1.0 s" in log
    assert "absent.json" in log


def test_a_drain_makes_it_unready_until_it_expires(launcher: Running) -> None:
    readiness.set_unready(str(launcher.state_dir), readiness.DRAIN, 1.0)
    assert launcher.probe() == 503
    assert launcher.probe("/healthz") == 200
    eventually(lambda: launcher.probe() == 200, 5.0)
    readiness.set_unready(str(launcher.state_dir), readiness.MANUAL, 60.0)
    assert launcher.probe() == 503
    readiness.clear_reasons(str(launcher.state_dir), readiness.MANUAL)
    assert launcher.probe() == 200


def test_garbage_on_the_probe_port_harms_nobody(launcher: Running) -> None:
    for data in (b"", b"\x00\xff\r\n\r\n", b"GET"):
        with socket.create_connection(("127.0.0.1", launcher.port), timeout=5) as connection:
            connection.sendall(data)
    silent = socket.create_connection(("127.0.0.1", launcher.port), timeout=5)
    try:
        eventually(lambda: launcher.probe() == 200, 5.0)
    finally:
        silent.close()


def test_it_is_small(launcher: Running) -> None:
    """Its memory is part of the cost of every replica."""
    assert psutil.Process(launcher.process.pid).memory_info().rss < 16 << 20


STEADY = """
import os, sys
from plimsoll_sidecar import launcher
spawn = os.posix_spawn
os.posix_spawn = lambda *_, **options: spawn("/bin/sleep", ["sleep", "600"], os.environ, **options)
sys.exit(launcher.main())
"""


def test_it_sleeps_while_its_child_runs_and_wakes_when_it_ends(tmp_path: Path) -> None:
    """Two turns a second were a twentieth of the supervisor's processor time."""
    command = [sys.executable, "-c", STEADY, "--host", "127.0.0.1", "--probe-port", "0"]
    command += ["--config", "x", "--run-dir", str(tmp_path), "--state-dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            launcher = psutil.Process(process.pid)
            eventually(lambda: bool(launcher.children()))
            time.sleep(0.5)
            before = launcher.num_ctx_switches().voluntary
            time.sleep(2.0)
            assert launcher.num_ctx_switches().voluntary - before <= 1
            (child,) = launcher.children()
            child.kill()
            eventually(lambda: launcher.children() not in ([], [child]), 5.0)
        finally:
            process.terminate()
    assert process.returncode == 0


def test_without_a_writable_folder_it_says_which(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    command = [sys.executable, "-m", "plimsoll_sidecar.launcher", "--config", "x"]
    command += ["--run-dir", str(blocked / "run"), "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert str(blocked) in done.stderr
    done = subprocess.run(command[:3], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "--state-dir is required" in done.stderr


def test_the_reset_is_left_for_the_supervisor(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "plimsoll_sidecar.launcher", "--reset-restart-budget"]
    subprocess.run([*command, "--state-dir", str(tmp_path)], check=True, timeout=20)
    assert (tmp_path / "reset-restart-budget").exists()
    assert os.listdir(tmp_path) == ["reset-restart-budget"]
