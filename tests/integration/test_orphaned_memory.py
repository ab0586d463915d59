"""Files of a real tmpfs whose process was killed, and files that somebody still holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plimsoll_sidecar.act.sweep import HELPER_EXIT_TIMEOUT_S, SharedMemorySweep
from plimsoll_sidecar.signals import shared_memory
from plimsoll_sidecar.signals.process_table import identify
from plimsoll_sidecar.signals.shared_memory import (
    MIN_EARLIER_FILE_AGE_S,
    MIN_FILE_AGE_S,
    SCAN_PERIOD_S,
    OrphanedBytes,
    OrphanedMemory,
)

MIB = 1 << 20
MAPS = """
import mmap, os, sys
with open(sys.argv[1], "w+b") as file:
    os.fchmod(file.fileno(), 0o600)
    file.truncate({mib} << 20)
    area = mmap.mmap(file.fileno(), {mib} << 20)
area.write(b"x" * ({mib} << 20))
print("mapped", flush=True)
sys.stdin.read()
"""
OPENS = """
import sys
file = open(sys.argv[1], "r+b")
print("open", flush=True)
sys.stdin.read()
"""
Start = Callable[..., subprocess.Popen[bytes]]


class Time:
    """Both clocks, an hour of which passes at once."""

    def __init__(self) -> None:
        self.later = 0.0

    def clock(self) -> float:
        return time.monotonic() + self.later

    def now(self) -> float:
        return time.time() + self.later


@pytest.fixture
def shm() -> Iterator[Path]:
    """A tmpfs of the test's own."""
    folder = Path("/dev/shm") / f"plimsoll-test-{os.getpid()}"
    if os.statvfs("/dev/shm").f_bsize == 0 or not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm")
    folder.mkdir()
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """``/proc`` of a pod: this machine has processes that nobody may read."""
    folder = tmp_path / "proc"
    folder.mkdir()
    return folder


@pytest.fixture
def start(pod: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def run(program: str, *arguments: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        (pod / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)


def test_what_a_killed_process_had_mapped_is_nobodys(shm: Path, start: Start, pod: Path) -> None:
    at = Time()
    main = start(OPENS, __file__)
    time.sleep(0.05)  # start times and file times have the resolution of the kernel's tick
    engine = start(MAPS.format(mib=8), shm / "segment")
    memory = OrphanedMemory(shm, at.clock, at.now, pod)
    assert memory.read(None) == OrphanedBytes(), "nothing is known before an engine was seen"
    assert memory.read(main.pid) == OrphanedBytes(0, 0)
    at.later += MIN_FILE_AGE_S + 1
    assert memory.read(main.pid) == OrphanedBytes(0, 0)
    kill(engine)
    assert memory.read(main.pid) == OrphanedBytes(0, 0), "the next scan is due in a minute"
    at.later += SCAN_PERIOD_S
    found = memory.read(main.pid)
    assert found.bytes is not None
    assert 8 * MIB <= found.bytes < 9 * MIB
    assert found.earlier == 0
    # A new main process is a new container, whose own group does not count what was there before:
    # it is looked at at once.
    kill(main)
    found = memory.read(start(OPENS, __file__).pid)
    assert found.bytes is not None
    assert found.bytes >= 8 * MIB
    assert found.earlier == found.bytes


@pytest.mark.parametrize("program", [MAPS.format(mib=4), OPENS], ids=["maps", "opens"])
def test_a_file_is_held_by_a_mapping_and_by_a_descriptor(
    shm: Path, start: Start, pod: Path, program: str
) -> None:
    path = shm / "held"
    path.write_bytes(bytes(4 * MIB))
    holder = start(program, path)
    listed = shared_memory.list_files(shm)
    found = shared_memory.find_files_in_use(listed, pod)
    assert {file.id for file in listed} == found.files
    kill(holder)
    assert not shared_memory.find_files_in_use(listed, pod).files


def test_a_young_file_is_not_counted(shm: Path, start: Start, pod: Path) -> None:
    at = Time()
    main = start(OPENS, __file__)
    (shm / "young").write_bytes(bytes(MIB))
    memory = OrphanedMemory(shm, at.clock, at.now, pod)
    assert memory.read(main.pid) == OrphanedBytes(0, 0)
    at.later += max(SCAN_PERIOD_S, MIN_FILE_AGE_S) + 1
    found = memory.read(main.pid)
    assert found.bytes is not None
    assert found.bytes >= MIB


def test_what_an_engine_wrote_until_it_was_killed_is_seen_with_its_successor(
    shm: Path, start: Start, pod: Path
) -> None:
    """The restart did not return what the engine leaked just before it was killed."""
    at = Time()
    first = start(MAPS.format(mib=8), shm / "segment")
    memory = OrphanedMemory(shm, at.clock, at.now, pod)
    assert memory.read(first.pid) == OrphanedBytes(0, 0)
    kill(first)
    at.later += MIN_EARLIER_FILE_AGE_S + 1
    found = memory.read(start(OPENS, __file__).pid)
    assert found.bytes is not None
    assert found.bytes >= 8 * MIB


def test_too_many_files_are_unknown_and_it_says_so(
    shm: Path,
    start: Start,
    pod: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shared_memory, "MAX_SHARED_FILES", 3)
    for number in range(4):
        (shm / f"f{number}").touch()
    main, at = start(OPENS, __file__), Time()
    memory = OrphanedMemory(shm, at.clock, at.now, pod)
    assert memory.error == "no engine has been found yet"
    for _ in range(2):
        assert memory.read(main.pid) == OrphanedBytes()
        assert memory.error == f"{shm} has more than 3 files"
        at.later += SCAN_PERIOD_S
    assert caplog.text.count("has more than 3 files") == 1, "once, not with every scan"
    (shm / "f3").unlink()
    assert memory.read(main.pid).bytes is not None
    assert memory.error is None


def test_each_bound_of_a_scan_says_which_it_was(
    shm: Path, start: Start, pod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shm / "file").write_bytes(b"x")
    main = start(OPENS, __file__)
    listed = shared_memory.list_files(shm)
    for name, said in (
        ("MAX_PROCESSES", "the pod has more than 0 processes"),
        ("MAX_DESCRIPTORS", f"process {main.pid} has more than 0 open files"),
        ("MAX_MAPS_BYTES", "is larger than the maximum of 0 MiB"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(shared_memory, name, 0)
            with pytest.raises(shared_memory.UnknownUsersError, match=said):
                shared_memory.find_files_in_use(listed, pod)
    shared_memory.find_files_in_use(listed, pod)
    with pytest.raises(shared_memory.UnknownUsersError, match="No such file"):
        shared_memory.list_files(shm / "absent")


def test_a_sweep_takes_only_what_the_dead_engine_left(shm: Path, start: Start, pod: Path) -> None:
    at = Time()
    before = shm / "of-an-init-container"
    before.write_bytes(bytes(MIB))
    os.utime(before, (time.time() - 900, time.time() - 900))
    time.sleep(0.05)  # a file's time has the resolution of the kernel's tick
    engine = start(MAPS.format(mib=8), shm / "segment")
    other = start(MAPS.format(mib=2), shm / "of-another")
    main = identify(engine.pid)
    sweep = SharedMemorySweep(shm, at.now, pod)
    assert sweep.remove_leftovers_after_end(main, True) == 0
    time.sleep(0.05)
    assert sweep.remove_leftovers_after_end(main, True) == 0, "nothing is swept while it lives"
    kill(engine)
    (shm / "of-the-next").write_bytes(bytes(MIB))
    assert sweep.remove_leftovers_after_end(main, False) == 0, "nobody asked"
    # The next engine may answer within the same second.
    removed = sweep.remove_leftovers_after_end(identify(start(OPENS, __file__).pid), True)
    assert 8 * MIB <= removed < 9 * MIB
    assert {one.name for one in shm.iterdir()} == {
        "of-an-init-container",
        "of-another",
        "of-the-next",
    }
    kill(other)
    assert sweep.remove_leftovers_after_end(main, True) >= 2 * MIB, (
        "a helper that ended a little later"
    )
    assert sweep.remove_leftovers_after_end(main, True) == 0
    at.later += HELPER_EXIT_TIMEOUT_S + 1
    assert sweep.remove_leftovers_after_end(main, True) == 0


def test_a_sweep_follows_no_link(shm: Path, start: Start, pod: Path, tmp_path: Path) -> None:
    engine = start(MAPS.format(mib=1), shm / "segment")
    (tmp_path / "kept").write_bytes(b"x")
    (shm / "link").symlink_to(tmp_path / "kept")
    (shm / "folder").symlink_to(tmp_path)
    sweep, main = SharedMemorySweep(shm, proc=pod), identify(engine.pid)
    time.sleep(0.05)
    sweep.remove_leftovers_after_end(main, True)
    kill(engine)
    assert sweep.remove_leftovers_after_end(main, True) >= MIB
    assert (tmp_path / "kept").read_bytes() == b"x"
    assert {one.name for one in shm.iterdir()} == {"link", "folder"}


def test_who_cannot_be_read_may_hold_what_he_may_open(shm: Path) -> None:
    for name, mode in (("private", 0o600), ("open", 0o666)):
        (shm / name).touch()
        (shm / name).chmod(mode)
    listed = {Path(file.path).name: file for file in shared_memory.list_files(shm)}
    strangers = shared_memory.FilesInUse(frozenset(), has_unreadable=True)
    assert strangers.may_include(listed["open"])
    assert not strangers.may_include(listed["private"])
    assert not shared_memory.FilesInUse(frozenset(), has_unreadable=False).may_include(
        listed["open"]
    )


SYSV = """key shmid perms size cpid lpid nattch uid gid cuid cgid atime dtime ctime rss swap
0 1 600 8388608 10 10 0 1000 1000 1000 1000 0 100 90 4194304 4096
0 2 600 8388608 10 10 1 1000 1000 1000 1000 0 100 90 8388608 0
0 3 600 8388608 10 10 0 1000 1000 1000 1000 0 990 90 8388608 0
"""


def test_segments_that_nobody_has_attached_for_a_minute(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/ipc").touch()
    assert shared_memory.sum_unattached_segment_bytes(60, 1000, tmp_path) == 0, (
        "a kernel without such segments"
    )
    (tmp_path / "sysvipc").mkdir()
    (tmp_path / "sysvipc/shm").write_text(SYSV)
    assert shared_memory.sum_unattached_segment_bytes(60, 1000, tmp_path) == (4 << 20) + 4096
    (tmp_path / "sysvipc/shm").write_text("key shmid\n1 nonsense\n")
    with pytest.raises(shared_memory.UnknownUsersError, match="sysvipc/shm"):
        shared_memory.sum_unattached_segment_bytes(60, 1000, tmp_path)


def test_too_many_segments_are_unknown_not_a_part_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/ipc").touch()
    (tmp_path / "sysvipc").mkdir()
    (tmp_path / "sysvipc/shm").write_text(SYSV)
    monkeypatch.setattr(shared_memory, "MAX_SHARED_FILES", 3)
    assert shared_memory.sum_unattached_segment_bytes(60, 1000, tmp_path) > 0
    monkeypatch.setattr(shared_memory, "MAX_SHARED_FILES", 2)
    with pytest.raises(shared_memory.UnknownUsersError, match="more than 2 SysV segments"):
        shared_memory.sum_unattached_segment_bytes(60, 1000, tmp_path)
