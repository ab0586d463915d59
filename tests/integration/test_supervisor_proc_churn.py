"""/proc while processes come and go: entries that vanish, PIDs given anew, names in no encoding."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plimsoll_api.admin import EngineState, Load, ProcessMemory, Role, Status
from plimsoll_sidecar.record import diagnostics
from plimsoll_sidecar.record.diagnostics import DiagnosticsWriter
from plimsoll_sidecar.signals import cgroup, process_table, resident_memory, sampler
from plimsoll_sidecar.signals.process_table import ProcessId, identify
from plimsoll_sidecar.signals.resident_memory import EngineProcessTable
from tests.missing import lacks
from tests.quiet_engine import QuietEngine

MIB = 1 << 20
HELD_MIB = 32
READINGS = 1500
CHURN = """
import os, sys, threading
held = bytearray(b"x" * ({held} << 20))
print("ready", flush=True)
def forks():
    while True:
        child = os.fork()
        if child == 0:
            if os.getpid() % 2 and os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.waitpid(child, 0)
def threads():
    while True:
        one = threading.Thread(target=lambda: None)
        one.start()
        one.join()
threading.Thread(target=threads, daemon=True).start()
forks()
"""
ZOMBIE = """
import os, sys
child = os.fork()
if child == 0:
    os._exit(0)
held = bytearray(b"x" * ({held} << 20))
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print(child, flush=True)
sys.stdin.read()
"""
NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"\\xff\\xfe) Z 1", 0, 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""
USR1 = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(42))
print("ready", flush=True)
sys.stdin.read()
"""
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")

Start = Callable[[str], tuple["subprocess.Popen[bytes]", bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program in a session of its own and returns it with its first line."""
    running: list[subprocess.Popen[bytes]] = []

    def run(program: str) -> tuple[subprocess.Popen[bytes], bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", program.format(held=HELD_MIB)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        running.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline()

    yield run
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def frontend(pid: int) -> list[ProcessMemory]:
    return [ProcessMemory(Role.FRONTEND, pid)]


def test_a_sum_is_whole_or_unknown_while_processes_come_and_go(start: Start) -> None:
    churning, _ = start(CHURN)
    processes = EngineProcessTable()
    processes.set_processes(frontend(churning.pid))
    known = 0
    for _ in range(READINGS):
        host = processes.read()
        if host.rss_anon is not None:
            known += 1
            assert host.rss_anon >= HELD_MIB * MIB
    assert known > READINGS / 10, "unknown is the exception"


def test_no_reader_fails_on_a_process_that_vanishes(start: Start) -> None:
    churning, _ = start(CHURN)
    readers: list[Callable[[int], object]] = [
        resident_memory.read_resident_memory, process_table.read_children, identify,
        process_table.find_memory_group, cgroup.Cgroup.find_for_process,
    ]  # fmt: skip
    met = 0
    deadline = time.monotonic() + 60
    while met < 300:
        assert time.monotonic() < deadline, "processes do not come and go"
        for pid in process_table.read_children(churning.pid) or ():
            met += 1
            for read in readers:
                read(pid)


def test_a_zombie_that_nobody_reaps_does_not_hide_its_engine(start: Start) -> None:
    engine, child = start(ZOMBIE)
    assert identify(int(child)) is None
    processes = EngineProcessTable()
    processes.set_processes(frontend(engine.pid))
    host = processes.read()
    assert host.rss_anon is not None
    assert host.rss_anon >= HELD_MIB * MIB
    assert host.processes == 1


def test_a_name_in_no_encoding_is_no_obstacle(start: Start) -> None:
    odd, _ = start(NAMED)
    assert b"\xff\xfe" in Path(f"/proc/{odd.pid}/comm").read_bytes()
    known = identify(odd.pid)
    assert known is not None
    processes = EngineProcessTable()
    processes.set_processes(frontend(odd.pid))
    assert (processes.read().rss_anon or 0) > MIB
    assert process_table.find_memory_group(odd.pid) is not None


def test_more_processes_than_can_be_read_are_unknown(
    monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    engine, _ = start(ZOMBIE)
    monkeypatch.setattr(resident_memory, "MAX_PROCESSES", 1)
    processes = EngineProcessTable()
    processes.set_processes(frontend(engine.pid))
    host = processes.read()
    assert host.rss_anon is None
    assert host.processes is None


def given_anew(pid: int, start: Start, program: str) -> subprocess.Popen[bytes]:
    """A process with a PID that another had before."""
    if not os.access(LAST_PID, os.W_OK) or os.geteuid() != 0:
        lacks(f"{LAST_PID} cannot be written: run as root")
    for _ in range(200):  # others on this machine may take the number first
        LAST_PID.write_text(str(pid - 1))
        process, _ = start(program)
        if process.pid == pid:
            return process
        process.kill()
        process.wait(10)
    raise AssertionError(f"PID {pid} was not given again")


def test_a_pid_given_anew_is_another_process(start: Start, tmp_path: Path) -> None:
    engine, _ = start(USR1)
    known = identify(engine.pid)
    assert known is not None
    processes = EngineProcessTable()
    processes.set_processes(frontend(engine.pid))
    assert processes.read().rss_anon
    engine.kill()
    engine.wait(10)
    stranger = given_anew(engine.pid, start, USR1)
    assert identify(stranger.pid) != known
    host = processes.read()
    assert (host.rss_anon, host.processes) == (None, 0)
    assert processes.main_process is None
    stacks = tmp_path / "stacks"
    stacks.mkdir()
    (stacks / f"frontend-{known.pid}.txt").write_text("")
    asks(tmp_path, known)
    with pytest.raises(subprocess.TimeoutExpired):
        stranger.wait(0.5)
    present = identify(stranger.pid)
    assert present is not None
    asks(tmp_path, present)
    assert stranger.wait(10) == 42


def asks(run_dir: Path, target: ProcessId) -> None:
    saving = DiagnosticsWriter(None, run_dir, run_dir, lambda: target)  # type: ignore[arg-type]
    saving._signal_frontend()


def test_a_process_that_is_gone_gets_no_signal(start: Start, tmp_path: Path) -> None:
    engine, _ = start(USR1)
    known = identify(engine.pid)
    assert known is not None
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / f"frontend-{known.pid}.txt").write_text("")
    engine.kill()
    engine.wait(10)
    asks(tmp_path, known)


def test_what_the_engine_leaves_in_its_folder_is_copied_within_bounds(tmp_path: Path) -> None:
    stacks, target = tmp_path / "stacks", tmp_path / "kept"
    stacks.mkdir()
    target.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (stacks / "a-link.txt").symlink_to(secret)
    os.mkfifo(stacks / "b-pipe.txt")
    (stacks / "c-folder.txt").mkdir()
    (stacks / "d-empty.txt").touch()
    with (stacks / "e-huge.txt").open("wb") as huge:
        huge.truncate(1 << 30)
    (stacks / "f-stacks.txt").write_text("Thread 1")
    saving = DiagnosticsWriter(None, tmp_path, tmp_path, lambda: None)  # type: ignore[arg-type]
    saved = saving._copy_stacks(target)
    assert [path.name for path in saved] == ["stacks-e-huge.txt", "stacks-f-stacks.txt"]
    assert saved[0].stat().st_size <= diagnostics.MAX_FILE_BYTES + diagnostics.CHUNK_BYTES
    assert saved[1].read_text() == "Thread 1"


def test_a_pid_given_anew_has_its_group_read_anew(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cgroup.Cgroup, "find_for_process", asked.append)
    engine, _ = start(USR1)
    named = Named(engine.pid)
    samples = sampler.Sampler(named)
    samples.sample()
    samples.sample()
    engine.kill()
    engine.wait(10)
    successor = given_anew(engine.pid, start, USR1)
    assert successor.pid == engine.pid
    samples.sample()
    assert asked == [engine.pid, engine.pid]


class Named(QuietEngine):
    """An engine that names one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def status(self) -> Status:
        named = [ProcessMemory(Role.FRONTEND, self.pid)]
        return Status(
            EngineState.SERVING,
            "aa:1",
            version="",
            model="",
            uptime_s=1.0,
            load=Load(),
            processes=named,
        )

    def is_serving(self) -> bool:
        return True
