"""The probe in processes of its own: what it answers, to whom, and that it stays out of the way.

Tests ``plimsoll_probe/install.py`` and ``plimsoll_probe/allocation_tracing.py``.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import plimsoll_probe
from plimsoll_api.supervisor_config import PROBE_DIR_ENV
from plimsoll_probe import diagnostics
from plimsoll_probe.install import install

PACKAGE = Path(plimsoll_probe.__file__).parent
WAIT = "print('up', flush=True); import sys; sys.stdin.readline()"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """What the init container leaves in the engine's container."""
    (tmp_path / "sockets").mkdir()
    install(tmp_path / "library")
    return tmp_path / "library"


def environment(library: Path, **more: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(library), PROBE_DIR_ENV: str(library.parent / "sockets")}
    return {"PATH": os.environ["PATH"]} | own | more


@contextmanager
def python(library: Path, program: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that has run ``program`` up to its first line, and waits for a line itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(library, **more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def send(path: Path, data: bytes) -> bytes:
    """The whole answer to ``data``."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(str(path))
        peer.sendall(data)
        answer = b""
        while piece := peer.recv(1 << 16):
            answer += piece
        return answer


def ask(path: Path, **request: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(send(path, json.dumps(request).encode() + b"\n"))
    return found


def test_a_process_accounts_for_its_memory(library: Path) -> None:
    program = "held = bytearray(64 << 20); many = [[i] for i in range(300_000)]; " + WAIT
    sockets = library.parent / "sockets"
    with python(library, WAIT) as empty, python(library, program) as full:
        assert first_line(empty) == first_line(full) == "up"
        before = ask(sockets / f"{empty.pid}.sock", do="report")
        after = ask(sockets / f"{full.pid}.sock", do="report")
    assert after["pid"] == full.pid
    assert after["malloc_in_use"] - before["malloc_in_use"] >= 64 << 20
    assert after["py_blocks"] - before["py_blocks"] >= 300_000
    assert after["python_objects"] > before["python_objects"]
    assert len(after["gc"]["collections"]) == 3
    assert after["devices"] == []
    assert after["engine"] == {}


def test_diagnostics_and_trim(library: Path) -> None:
    program = (
        "def stuck():\n    print('up', flush=True)\n    sys.stdin.readline()\nimport sys\nstuck()"
    )
    with python(library, program) as process:
        assert first_line(process) == "up"
        path = library.parent / "sockets" / f"{process.pid}.sock"
        stacks = ask(path, do="stacks")["text"]
        assert "in stuck" in stacks
        assert "[MainThread]" in stacks
        assert "tracked objects" in ask(path, do="gc")["text"]
        assert "not initialized" in ask(path, do="torch")["text"]
        trimmed = ask(path, do="trim", idle=True)
        assert trimmed["steps"][0] == "gc.collect"
        assert "empty_cache" not in trimmed["steps"], "torch is not loaded and must not be"
        assert trimmed["before"] > 0
        assert ask(path, do="tracemalloc", step="diff")["text"].startswith("no trace")
        assert ask(path, do="tracemalloc", step="start")["text"] == "started"
        assert "already" in ask(path, do="tracemalloc", step="start")["text"]
        assert "allocated" in ask(path, do="tracemalloc", step="diff")["text"]
        assert ask(path, do="tracemalloc", step="stop")["text"] == "stopped"


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"\n", "JSONDecodeError"),
        (b"\xff\xfe\n", "UnicodeDecodeError"),
        (b"[1]\n", "the request is not a JSON object"),
        (b'{"do": "reboot"}\n', "unknown request"),
        (b'{"do": ["report"]}\n', "unknown request"),
        (b"[" * 4000 + b"\n", "RecursionError"),
        (b"x" * 5000, None),
        (b'{"do": "report"}\n{"do": "report"}\n', "JSONDecodeError"),
    ],
)
def test_garbage_is_refused_and_the_next_one_is_answered(
    library: Path, data: bytes, answer: str | None
) -> None:
    with python(library, WAIT) as process:
        assert first_line(process) == "up"
        path = library.parent / "sockets" / f"{process.pid}.sock"
        try:
            told = send(path, data)
        except ConnectionError:  # it closes with what was sent unread
            told = b""
        assert (answer is None) == (told == b"")
        if answer is not None:
            assert answer in json.loads(told)["error"]
        assert ask(path, do="report")["pid"] == process.pid
        assert process.poll() is None


def test_a_silent_peer_does_not_keep_others_out_for_long(library: Path) -> None:
    with python(library, WAIT) as process, socket.socket(socket.AF_UNIX) as silent:
        assert first_line(process) == "up"
        path = library.parent / "sockets" / f"{process.pid}.sock"
        silent.connect(str(path))
        assert ask(path, do="report")["pid"] == process.pid


def test_a_fork_listens_too_and_a_killed_ones_socket_goes(library: Path) -> None:
    program = (
        "import os, sys\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.stdin.readline()\n"
        "    os._exit(0)\n"
        "print(child, flush=True)\n"
        "os.waitpid(child, 0)\n"
        "print('reaped', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    sockets = library.parent / "sockets"
    with python(library, program) as process:
        child = int(first_line(process))
        # The child opens its socket within fork(), before it goes on; the parent may be ahead.
        for pid in (process.pid, child):
            path = sockets / f"{pid}.sock"
            while True:
                try:
                    assert ask(path, do="report")["pid"] == pid
                    break
                except (ConnectionRefusedError, FileNotFoundError):
                    assert process.poll() is None
                    time.sleep(0.01)
        os.kill(child, 9)
        assert first_line(process) == "reaped"
        assert (sockets / f"{child}.sock").exists()
        with python(library, WAIT) as other:
            assert first_line(other) == "up"
            assert not (sockets / f"{child}.sock").exists()
            assert (sockets / f"{process.pid}.sock").exists()


def test_a_fork_during_a_trace_traces_nothing(library: Path) -> None:
    """The thread that ends the trace runs in the parent alone, and the tables would only grow."""
    program = (
        "import os, sys, tracemalloc\n"
        "print('up', flush=True)\n"
        "sys.stdin.readline()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print(tracemalloc.is_tracing(), flush=True)\n"
        "    sys.stdin.readline()\n"
        "os.waitpid(child, 0)\n"
    )
    with python(library, program) as process:
        assert first_line(process) == "up"
        path = library.parent / "sockets" / f"{process.pid}.sock"
        assert ask(path, do="tracemalloc", step="start")["text"] == "started"
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert first_line(process) == "False"
        assert "allocated" in ask(path, do="tracemalloc", step="diff")["text"], "of the parent"


def test_a_spawned_python_has_its_own(library: Path) -> None:
    program = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {WAIT!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with python(library, program) as process:
        child = int(first_line(process))
        path = library.parent / "sockets" / f"{child}.sock"
        assert ask(path, do="report")["pid"] == child


@pytest.mark.parametrize("off", ["off", "OFF", "0", "false"])
def test_off_by_one_variable(library: Path, off: str) -> None:
    program = "import threading; print(threading.active_count(), flush=True)"
    with python(library, program, PLIMSOLL_PROBE=off) as process:
        assert first_line(process) == "1"
    assert list((library.parent / "sockets").iterdir()) == []


def test_a_folder_that_cannot_be_used_is_no_trouble(library: Path) -> None:
    with python(library, "print('up', flush=True)", **{PROBE_DIR_ENV: "/proc/none"}) as process:
        assert first_line(process) == "up"
        assert process.wait(30) == 0


def test_another_sitecustomize_still_runs(library: Path) -> None:
    other = library.parent / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys; sys.other = 'ran'")
    paths = f"{library}:{other}"
    with python(library, "import sys; print(sys.other, flush=True)", PYTHONPATH=paths) as process:
        assert first_line(process) == "ran"


def test_the_entry_points_start_it_where_another_sitecustomize_comes_first(library: Path) -> None:
    other = library.parent / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("")
    program = (
        "from importlib.metadata import entry_points\n"
        "import threading\n"
        "groups = ['vllm.general_plugins', 'sglang.srt.plugins']\n"
        "found = [one for group in groups for one in entry_points(group=group)]\n"
        "print(threading.active_count(), len(found), flush=True)\n"
        "for one in found: one.load()()\n"
        "print(threading.active_count(), flush=True)\n"
    )
    with python(library, program, PYTHONPATH=f"{other}:{library}") as process:
        assert first_line(process) == "1 2"
        assert first_line(process) == "2", "both start one thread together"


def test_it_needs_python_3_10_and_the_standard_library_alone() -> None:
    for file in PACKAGE.glob("*.py"):
        tree = ast.parse(file.read_text(), feature_version=(3, 10))
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names | {"plimsoll_probe"}, (file, name)


def test_both_sides_name_the_same_folder() -> None:
    assert plimsoll_probe.DIRECTORY_VARIABLE == PROBE_DIR_ENV


MANY = """
import json, sys, threading, time
from plimsoll_probe import diagnostics
from plimsoll_probe.allocation_tracing import ALLOCATION_TRACER
heap = [[number] for number in range(2_000_000)]
stretches, held, begun = [], [], 0.0
def get_held_bytes():
    return diagnostics.get_object_list_bytes() + ALLOCATION_TRACER.get_trace_bytes()
def rest(seconds):
    global begun
    stretches.append(time.thread_time() - begun)
    held.append(get_held_bytes())
    sleep(min(seconds, .001))
    begun = time.thread_time()
sleep, diagnostics.time.sleep = time.sleep, rest
def measured(work):
    global begun
    begun = time.thread_time()
    text = work()
    stretches.append(time.thread_time() - begun)
    return text
many = measured(diagnostics.format_gc_objects)
del heap[50_000:]
few = measured(diagnostics.format_gc_objects)
for attempt in range(20):  # on a busy machine, the time to trace may pass without any of it
    diagnostics.time.sleep = sleep
    measured(lambda: ALLOCATION_TRACER.run_step("start"))
    leak = []
    while ALLOCATION_TRACER.is_running:
        leak.append({"leaked": str(len(leak))})
        if not len(leak) % 1000:
            held.append(get_held_bytes())
            sleep(.001)
    diagnostics.time.sleep = rest
    found = measured(lambda: ALLOCATION_TRACER.run_step("diff"))
    if "<string>:" in found:
        break
ALLOCATION_TRACER.run_step("stop")
print(json.dumps([many, few, found, max(stretches), max(held), get_held_bytes()]), flush=True)
"""


def test_diagnostics_of_a_large_heap_leave_the_interpreter_to_the_engine(library: Path) -> None:
    """The time that counts is the processor's: while it is spent, the engine's threads wait."""
    with python(library, MANY) as process:
        many, few, traced, stretch_s, most, left = json.loads(first_line(process))
    assert "created recently" in many
    assert int(few.partition(" tracked objects")[0].rpartition(" ")[2]) >= 50_000, few
    assert "builtins.list" in few
    assert "<string>:" in traced, traced
    assert stretch_s <= 0.02
    assert 1 << 18 <= most <= diagnostics.MAX_DIAGNOSTICS_BYTES, "it is in the ledger"
    assert left == 0


SERVES = """
import gc, json, sys, threading, time, tracemalloc
HEAP
def answer():
    begun, traced = time.thread_time(), tracemalloc.is_tracing()
    json.loads(json.dumps([{"id": n, "text": "x" * n} for n in range(100)]))
    return time.thread_time() - begun, traced or tracemalloc.is_tracing()
usual = sorted(answer()[0] for _ in range(500))[250]
def others():
    return time.process_time() - time.thread_time()
print("up", flush=True)
before, slower, ending = others(), 0.0, threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ending.set()), daemon=True).start()
while not ending.is_set():
    took, traced = answer()
    slower += max(0.0, took - usual) if traced else 0.0
    time.sleep(.001)
print(json.dumps([others() - before, slower, len(heap)]), flush=True)
"""
LISTS = "heap = [[number] for number in range(3_000_000)]\n"
SCATTERED = """
import random
heap = [{} for number in range(1_000_000)]
random.shuffle(heap)
for one in heap:
    one[0] = heap  # from now on it is tracked
"""
"""The garbage collector visits them in an order that memory does not have, as in real engines."""


@pytest.mark.parametrize(
    ("heap", "count", "collects_all"),
    [
        (LISTS, 3_000_000, False),
        (LISTS + "gc.freeze()", 3_000_000, True),
        (SCATTERED + "gc.freeze()", 1_000_000, True),
    ],
    ids=["lists", "frozen-lists", "frozen-scattered-dicts"],
)
def test_a_whole_diagnosis_costs_a_request_50_ms_at_most(
    library: Path, heap: str, count: int, collects_all: bool
) -> None:
    """The process has millions of objects, and serves one request from the beginning to the end.

    The request loses the processor time of all other threads, and what tracing slows it down by.
    """
    steps: list[str] = []
    with python(library, SERVES.replace("HEAP", heap)) as process:
        assert first_line(process) == "up"
        path = library.parent / "sockets" / f"{process.pid}.sock"
        steps += ask(path, do="trim", idle=False)["steps"]
        texts_ = [ask(path, do=kind)["text"] for kind in ("stacks", "gc", "torch")]
        ask(path, do="tracemalloc", step="start")
        time.sleep(0.5)
        texts_.append(ask(path, do="tracemalloc", step="diff")["text"])
        ask(path, do="tracemalloc", step="stop")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        threads_s, slower_s, objects = json.loads(first_line(process))
    assert objects == count
    if collects_all:
        assert steps[0] == "gc.collect"
        assert "created recently" not in texts_[1]
    else:
        assert steps[0].startswith("gc.collect(1)"), "all would take a quarter of a second"
        assert "created recently" in texts_[1]
    assert "-- allocated within" in texts_[3]
    assert threads_s + slower_s <= 0.05, (threads_s, slower_s)


def test_a_process_that_froze_its_objects_collects_all_others(library: Path) -> None:
    program = (
        "import gc; heap = [[n] for n in range(200_000)]; gc.freeze(); gc.disable()\n"
        "class Node: pass\n"
        "for _ in range(1000):\n    one = Node(); one.me = one\n"
        "del one\n" + WAIT
    )
    with python(library, program) as process:
        assert first_line(process) == "up"
        done = ask(library.parent / "sockets" / f"{process.pid}.sock", do="trim", idle=False)
    assert done["steps"][0] == "gc.collect"
    assert done["collected"] >= 1000
