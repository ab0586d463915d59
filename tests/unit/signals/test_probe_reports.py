"""The supervisor's side of the probe: what it takes from untrusted peers, and makes of it.

Tests ``signals/probes.py`` and ``signals/probe_reports.py``.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from plimsoll_api.admin import (
    Capability,
    DeviceMemory,
    EngineState,
    Load,
    MemoryKind,
    ProcessMemory,
    Role,
    Status,
)
from plimsoll_api.decoding import MalformedError, decode
from plimsoll_sidecar.signals import probe_reports
from plimsoll_sidecar.signals.probe_reports import (
    EngineReport,
    ProbeMemory,
    Report,
    ReportedOwner,
    TorchDevice,
    query_probes,
)
from plimsoll_sidecar.signals.probes import (
    MAX_LATE_ANSWER_S,
    MAX_REPORT_AGE_S,
    REPORT_TIMEOUT_S,
    RETRY_PAUSE_S,
    Probes,
)

ME = os.getpid()
Answer = Callable[[socket.socket], None]


@contextmanager
def listening(folder: Path, answer: Answer, pid: int = ME) -> Iterator[None]:
    """A socket of this process in the place of ``pid``'s; ``answer`` is called for each peer."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / f"{pid}.sock"))
        server.listen(4)

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer, suppress(OSError):
                    peer.recv(4096)
                    answer(peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def says(data: bytes) -> Answer:
    return lambda peer: peer.sendall(data)


def ask(folder: Path, timeout_s: float = 5.0, limit: int = 1000) -> dict[int, bytes]:
    return query_probes(folder, [ME], b"{}\n", timeout_s, limit)


def test_a_whole_answer(tmp_path: Path) -> None:
    with listening(tmp_path, says(b"x" * 1000)):
        assert ask(tmp_path) == {ME: b"x" * 1000}


@pytest.mark.parametrize("data", [b"", b"x" * 1001, b"x" * 100_000])
def test_an_empty_or_endless_answer_is_none(tmp_path: Path, data: bytes) -> None:
    with listening(tmp_path, says(data)):
        assert ask(tmp_path) == {}


def test_whoever_hangs_costs_the_time_limit_once(tmp_path: Path) -> None:
    released = threading.Event()

    def hang(peer: socket.socket) -> None:
        peer.sendall(b"x")
        released.wait(30)

    with listening(tmp_path, hang):
        begin = time.monotonic()
        assert ask(tmp_path, timeout_s=0.3) == {}
        assert 0.3 <= time.monotonic() - begin < 5
        released.set()


def test_the_socket_must_belong_to_the_process(tmp_path: Path) -> None:
    """A folder that the engine writes to may hold another process's socket, or a link to one."""
    other = os.getppid()
    with listening(tmp_path, says(b"{}"), pid=other):
        assert query_probes(tmp_path, [other], b"{}\n", 5.0) == {}
        linked = 2 if other == 1 else 1  # the parent of a test in a container may be process 1
        (tmp_path / f"{linked}.sock").symlink_to(tmp_path / f"{other}.sock")
        assert query_probes(tmp_path, [linked], b"{}\n", 5.0) == {}


def test_no_socket_a_file_and_a_socket_of_nobody(tmp_path: Path) -> None:
    (tmp_path / "1.sock").write_text("")
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(tmp_path / "2.sock"))
    assert query_probes(tmp_path, [1, 2, 3], b"{}\n", 5.0) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"pid": -1}',
        b'{"pid": 1, "malloc_in_use": NaN}',
        b'{"pid": 1, "malloc_in_use": 1e999}',
        b'{"pid": 1, "malloc_in_use": 99999999999999999999}',
        b'{"pid": 1, "engine": {"kv_usage_ratio": 1.5}}',
        b'{"pid": 1, "engine": {"ledger": [{"owner": "A b\\n", "kind": "host", "bytes": 1}]}}',
        b'{"pid": 1, "devices": [{"index": 0, "allocated": 1, "reserved": 1, "uuid": "x"}]}',
        b'{"pid": 1, "engine": {"ledger": ['
        + b",".join([b'{"owner": "a", "kind": "host", "bytes": 1}'] * 33)
        + b"]}}",
        b"[" * 100_000,
        b'{"pid": "\xff"}',
    ],
)
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(data, Report)


def test_ranks_are_added_up_and_an_unknown_bound_stays_unknown() -> None:
    def rank(bound: int | None) -> Report:
        lines = [
            ReportedOwner("weights", MemoryKind.DEVICE, 10, 10),
            ReportedOwner("grammar_cache", MemoryKind.HOST, 1, bound),
        ]
        report = EngineReport(ledger=lines)
        return Report(1, host_pinned=5, engine=report, diagnostics=ProbeMemory(3, 8))

    entries = probe_reports.merge_ledgers([(Role.WORKER, rank(4)), (Role.WORKER, rank(None))])
    assert [(e.owner, e.kind.value, e.bytes, e.bound) for e in entries] == [
        ("weights", "device", 20, 20),
        ("grammar_cache", "host", 2, None),
        ("pinned_host", "host", 10, None),
        ("diagnostics", "host", 6, 16),
    ]


def test_devices_are_matched_by_uuid_and_summed_over_processes() -> None:
    reports = [
        Report(1, devices=[TorchDevice(0, 1, 2, "GPU-a")]),
        Report(2, devices=[TorchDevice(0, 10, 20, "GPU-b")]),
        Report(3, devices=[TorchDevice(1, 100, 200, "GPU-a")]),
    ]
    known = [DeviceMemory(0, "GPU-b"), DeviceMemory(1, "GPU-a")]
    found = probe_reports.merge_devices(known, reports)
    assert [(d.uuid, d.torch_allocated, d.torch_reserved) for d in found] == [
        ("GPU-b", 10, 20),
        ("GPU-a", 101, 202),
    ]
    alone = probe_reports.merge_devices([], reports)
    assert [(d.index, d.uuid, d.torch_reserved) for d in alone] == [
        (0, "GPU-a", 202),
        (1, "GPU-b", 20),
    ]
    assert probe_reports.merge_devices(known, []) == known


def seen() -> Status:
    return Status(
        state=EngineState.SERVING,
        epoch="a:1",
        version="",
        model="m",
        uptime_s=1.0,
        load=Load(),
        processes=[ProcessMemory(role=Role.OTHER, pid=ME)],
        capabilities=[Capability.DRAIN],
    )


def report(**more: Any) -> bytes:
    figures = {"pid": ME, "malloc_in_use": 7, "malloc_retained": 1, "python_objects": 3}
    return json.dumps(figures | more).encode()


def test_a_report_completes_the_status(tmp_path: Path) -> None:
    inside = {
        "role": "Worker",
        "kv_usage_ratio": 0.5,
        "ledger": [{"owner": "kv_cache", "kind": "host", "bytes": 5, "bound": 5}],
    }
    with listening(tmp_path, says(report(engine=inside))):
        status = Probes(tmp_path).add_reports(seen())
    assert status.probed
    me = next(process for process in status.processes if process.pid == ME)
    assert (me.role, me.malloc_in_use, me.python_objects) == (Role.WORKER, 7, 3)
    assert status.load.kv_usage_ratio == 0.5
    assert [entry.owner for entry in status.ledger] == ["kv_cache"]
    assert set(status.capabilities) >= {Capability.TRIM, Capability.DIAGNOSTICS}


@pytest.mark.parametrize("data", [b"garbage", b'{"pid": 1}'])
def test_garbage_and_a_report_of_another_leave_the_status_as_it_is(
    tmp_path: Path, data: bytes
) -> None:
    with listening(tmp_path, says(data)):
        assert Probes(tmp_path).add_reports(seen()) == seen()
    assert Probes(None).add_reports(seen()) == seen()
    assert Probes(tmp_path / "none").add_reports(seen()) == seen()


def test_a_report_lasts_a_while_and_a_hung_probe_is_polled_less_often(tmp_path: Path) -> None:
    now, asked = [0.0], [0]
    answers = [report()]

    def answer(peer: socket.socket) -> None:
        asked[0] += 1
        peer.sendall(answers[0])

    probes = Probes(tmp_path, clock=lambda: now[0])
    with listening(tmp_path, answer):
        assert probes.add_reports(seen()).probed
        answers[0] = b"hangs"
        for second in range(1, 6):
            now[0] = float(second)
            assert probes.add_reports(seen()).probed, "its newest report"
        assert asked[0] == 2, "once, and not again for a while"
        now[0] = MAX_REPORT_AGE_S + RETRY_PAUSE_S
        assert not probes.add_reports(seen()).probed, "unknown, not what it was"
        answers[0] = report()
        now[0] += RETRY_PAUSE_S
        assert probes.add_reports(seen()).probed


def test_a_process_that_always_answers_late_is_known(tmp_path: Path) -> None:
    """It computes without a pause: its probe waits for Python's lock longer than a sample does."""
    made = iter(range(1000))

    def late(peer: socket.socket) -> None:
        time.sleep(REPORT_TIMEOUT_S + 0.1)
        peer.sendall(report(malloc_in_use=next(made)))

    probes = Probes(tmp_path)
    found, costs = [], []
    with listening(tmp_path, late):
        for _ in range(8):
            begin = time.monotonic()
            processes = probes.add_reports(seen()).processes
            costs.append(time.monotonic() - begin)
            found.append(next(p.malloc_in_use for p in processes if p.pid == ME))
            time.sleep(REPORT_TIMEOUT_S)
    assert found[0] is None
    assert None not in found[2:]
    assert (found[-1] or 0) >= 2, "its reports go on to be new"
    assert max(costs[1:]) < REPORT_TIMEOUT_S, "the first sample waits for it alone"


def test_a_late_answer_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    now, asked = [0.0], [0]
    released = threading.Event()

    def hang(peer: socket.socket) -> None:
        asked[0] += 1
        released.wait(30)

    probes = Probes(tmp_path, clock=lambda: now[0])
    with listening(tmp_path, hang):
        for second in range(3):
            now[0] = float(second)
            assert not probes.add_reports(seen()).probed
        assert asked[0] == 1
        now[0] = MAX_LATE_ANSWER_S + 1.0
        probes.add_reports(seen())
        assert not probes._requests.is_waiting
        now[0] += RETRY_PAUSE_S
        probes.add_reports(seen())
        assert probes._requests.is_waiting, "asked again after a while"
        released.set()


def test_an_old_report_is_unknown_however_new_the_answer(tmp_path: Path) -> None:
    """A leak since then would be called another segment's."""
    for age_s, known in ((MAX_REPORT_AGE_S - 1, True), (MAX_REPORT_AGE_S + 1, False)):
        folder = tmp_path / str(known)
        folder.mkdir()
        with listening(folder, says(report(age_s=age_s))):
            assert Probes(folder, clock=lambda: 100.0).add_reports(seen()).probed is known
