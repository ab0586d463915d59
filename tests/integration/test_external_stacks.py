"""Stacks of engines that are not ours: of each process, also of one that can answer nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plimsoll_api.admin import Diagnostic, EngineState, Load, ProcessMemory, Role, Status
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import PROBE_DIR_ENV
from plimsoll_probe.install import install
from plimsoll_sidecar.act.adapters.external_engine import collect_diagnostics
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.command import Command, Verb
from plimsoll_sidecar.record.diagnostics import DiagnosticsWriter
from plimsoll_sidecar.signals.probe_reports import query_probes
from plimsoll_sidecar.signals.probes import REPORT_REQUEST, Probes
from plimsoll_sidecar.signals.stacks import has_signal_handler
from tests.integration.test_external_adapters import Rig

# As a call into CUDA that never returns and keeps Python's lock: a mutex that is locked twice.
HANGS = """
import ctypes, os, sys
def hangs_with_the_lock():
    print("hangs", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
if "fork" in sys.argv and os.fork():
    os.wait()
    sys.exit()
print(os.getpid(), flush=True)
sys.stdin.readline()
hangs_with_the_lock()
"""
WAITS = """
import os, sys
def waits_for_work():
    sys.stdin.readline()
print(os.getpid(), flush=True)
waits_for_work()
"""
Start = Callable[..., "tuple[subprocess.Popen[str], int]"]


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    (tmp_path / "sockets").mkdir()
    install(tmp_path / "library")
    return tmp_path / "sockets"


@pytest.fixture
def start(sockets: Path) -> Iterator[Start]:
    """Starts a program; it and its PID, once it is up."""
    running: list[subprocess.Popen[str]] = []

    def run(program: str, *arguments: str, probe: bool = True) -> tuple[subprocess.Popen[str], int]:
        own = {"PYTHONPATH": str(sockets.parent / "library"), PROBE_DIR_ENV: str(sockets)}
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={"PATH": os.environ["PATH"]} | (own if probe else {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        running.append(process)
        return process, int(said(process))

    yield run
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def hang(process: subprocess.Popen[str], sockets: Path, pid: int) -> None:
    """Until its probe answers no more."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert said(process) == "hangs"
    deadline = time.monotonic() + 30
    while query_probes(sockets, [pid], REPORT_REQUEST, 1.0):
        assert time.monotonic() < deadline


def save(stalled: bool, suspected: str | None = "Worker") -> Command:
    return Command(
        verb=Verb.DIAGNOSE, operation_id="i-1", incident="i", epoch="e", stalled=stalled,
        process=suspected,
    )  # fmt: skip


def seen_by(probes: Probes, processes: list[ProcessMemory]) -> list[ProcessMemory]:
    status = Status(EngineState.SERVING, "e", "", "m", 1.0, Load(), processes=processes)
    return probes.add_reports(status).processes


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.fixture
def py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


@pytest.mark.usefixtures("no_py_spy")
@pytest.mark.parametrize("arguments", [(), ("fork",)])
def test_a_process_that_hangs_with_python_s_lock_has_stacks(
    start: Start, sockets: Path, arguments: tuple[str, ...]
) -> None:
    process, worker = start(HANGS, *arguments)
    _, core = start(WAITS)
    probes = Probes(sockets)
    processes = seen_by(
        probes,
        [ProcessMemory(Role.OTHER, core, name="EngineCore"),
         ProcessMemory(Role.WORKER, worker, name="Worker")],
    )  # fmt: skip
    hang(process, sockets, worker)
    text = (
        collect_diagnostics(Diagnostic.STACKS, save(stalled=True), processes, probes) or b""
    ).decode()
    first, _, second = text.partition(f"==== EngineCore, process {core}\n")
    assert first.startswith(f"==== Worker, process {worker}, suspected\n")
    assert "in hangs_with_the_lock" in first
    assert "in waits_for_work" in second
    again = (
        collect_diagnostics(Diagnostic.STACKS, save(stalled=True), processes, probes) or b""
    ).decode()
    assert again.count("in hangs_with_the_lock") == 1, "what was written before is not told again"


@pytest.mark.usefixtures("no_py_spy")
def test_the_signal_is_for_a_stall_and_for_whoever_handles_it(start: Start, sockets: Path) -> None:
    process, worker = start(HANGS)
    other, bare = start(WAITS, probe=False)
    (sockets / f"{bare}.stacks").write_text("a file is no handler")
    assert has_signal_handler(worker)
    assert not has_signal_handler(bare)
    probes = Probes(sockets)
    named = [ProcessMemory(Role.OTHER, pid, name="Worker") for pid in (worker, bare)]
    processes = seen_by(probes, named)
    hang(process, sockets, worker)
    assert collect_diagnostics(Diagnostic.STACKS, save(stalled=False), processes, probes) is None
    assert (sockets / f"{worker}.stacks").read_bytes() == b""
    text = collect_diagnostics(Diagnostic.STACKS, save(stalled=True), processes, probes) or b""
    assert text.count(b"==== Worker") == 1
    assert (process.poll(), other.poll()) == (None, None)


@pytest.mark.usefixtures("py_spy")
def test_without_a_probe_py_spy_reads_them_where_it_is_there(start: Start, sockets: Path) -> None:
    process, worker = start(HANGS, probe=False)
    hang(process, sockets, worker)
    processes = [ProcessMemory(Role.WORKER, worker, name="Worker")]
    text = (
        collect_diagnostics(Diagnostic.STACKS, save(stalled=False), processes, Probes(None)) or b""
    )
    assert text.startswith(f"==== Worker, process {worker}, suspected\n".encode())
    assert b"hangs_with_the_lock" in text
    assert collect_diagnostics(Diagnostic.GC, save(stalled=False), processes, Probes(None)) is None


@pytest.mark.usefixtures("py_spy")
def test_a_frontend_that_answers_nobody_leaves_its_stacks(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    try:
        pid = rig.start("vllm")
        adapter = rig.adapter(EngineType.VLLM)
        adapter.status()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineError):
            adapter.status()
        saved = DiagnosticsWriter(adapter, tmp_path / "state", tmp_path, lambda: None).save(
            save(stalled=True, suspected="APIServer")
        )
        assert saved == ("diagnostics/i/stacks.txt",)
        text = (tmp_path / "state" / saved[0]).read_text()
        assert text.startswith(f"==== APIServer, process {pid}, suspected\n")
        assert "serve_forever" in text
    finally:
        for process in rig.processes:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
