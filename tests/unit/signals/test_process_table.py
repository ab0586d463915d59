"""What is read of the processes of this machine.

Tests ``signals/process_table.py``.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from plimsoll_sidecar.signals import process_table
from plimsoll_sidecar.signals.process_table import (
    MAX_COMMAND_WORDS,
    ProcessId,
    compute_age_s,
    find_nearest_to_limit,
    identify,
    is_running,
    list_entry_names,
    read_children,
    read_command_line,
    read_command_name,
    read_environment_variable,
    read_parent_pids,
    read_proc_file,
    read_process,
)
from plimsoll_sidecar.signals.resident_memory import read_resident_memory

WORDS = 300_000


@pytest.fixture
def talkative() -> Iterator[int]:
    """A process with more words in its arguments, and more in its environment, than are read."""
    program = "import sys; print('ready', flush=True); sys.stdin.read()"
    large = {f"A{number}": "x" * 100_000 for number in range(5)}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *["ab"] * (WORDS // 4)],
        env={**large, "WANTED": "yes", "UNWANTED": "no"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    yield process.pid
    process.communicate(timeout=10)


def test_arguments_and_environment_of_any_size_take_little_memory(talkative: int) -> None:
    tracemalloc.start()
    try:
        line = read_command_line(talkative)
        _, peak = tracemalloc.get_traced_memory()
        found = (
            read_environment_variable(talkative, "WANTED"),
            read_environment_variable(talkative, "WANT"),
        )
    finally:
        tracemalloc.stop()
    assert line[:2] == [sys.executable, "-c"]
    assert len(line) == MAX_COMMAND_WORDS
    assert peak < 1 << 20
    assert found == ("yes", None)


def test_parents_ages_and_time_are_those_of_the_process() -> None:
    own = identify(os.getpid())
    assert own is not None
    assert is_running(own)
    assert not is_running(ProcessId(own.pid, own.started + 1))
    assert read_parent_pids()[own.pid] == os.getppid()
    assert 0 < compute_age_s(own) < 86_400
    times = os.times()
    reading = read_process(own.pid)
    assert reading is not None
    assert reading.process == own
    assert abs(reading.cpu_s - sum(times[:4])) < 0.5
    assert read_process(2**22) is None


def test_an_ended_process_that_nobody_waited_for_has_no_parent() -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert ended.pid not in read_parent_pids()
        assert identify(ended.pid) is None


def test_a_file_is_read_whole_and_one_that_is_not_there_is_an_error() -> None:
    assert read_proc_file(os.getpid(), "comm").strip().decode() == read_command_name(os.getpid())
    assert len(read_proc_file(os.getpid(), "maps")) > 4096
    with pytest.raises(OSError, match="No such file"):
        read_proc_file(os.getpid(), "nothing")


def test_what_is_read_with_each_sample_interns_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    interned: list[str] = []
    intern = sys.intern

    class Noting:
        """The module ``sys``, as pathlib sees it."""

        def __getattr__(self, name: str) -> object:
            return getattr(sys, name)

        @staticmethod
        def intern(text: str) -> str:
            interned.append(text)
            return intern(text)

    pid = os.getpid()
    monkeypatch.setattr(sys.modules[pathlib.PurePath.__module__], "sys", Noting())
    str(pathlib.Path("/proc/12345"))
    assert "12345" in interned, (
        "pathlib interns no more: process_table.read_proc_file has lost its reason"
    )
    interned.clear()
    assert identify(pid) is not None
    assert read_parent_pids()[pid] == os.getppid()
    assert read_children(pid) is not None
    assert read_process(pid) is not None
    assert read_resident_memory(pid) is not None
    assert find_nearest_to_limit({pid: "this"}) is not None
    assert not any(text.isdigit() for text in interned), interned


def test_only_so_many_names_of_a_folder_are_read(tmp_path: pathlib.Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).touch()
    assert len(list_entry_names(tmp_path, 7)) == 7
    assert len(list_entry_names(str(tmp_path), 100)) == 20


def test_a_process_of_very_many_threads_makes_its_children_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are read in every sample: what an engine starts must not slow its supervisor down."""
    monkeypatch.setattr(process_table, "MAX_THREADS", 4)
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, args=(20.0,)) for _ in range(4)]
    for one in threads:
        one.start()
    try:
        assert read_children(os.getpid()) is None
    finally:
        end.set()
        for one in threads:
            one.join()
