"""From an engine's status to a sample: epochs, load that is unknown, sources of device memory.

Tests ``signals/sampler.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from plimsoll_api.admin import (
    STANDBY_PROCESS_NAME,
    DeviceMemory,
    EngineState,
    LedgerEntry,
    Load,
    MemoryKind,
    ProcessMemory,
    Role,
    Status,
)
from plimsoll_api.assessment import Segment
from plimsoll_api.state import Signal
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.detect.segments import (
    compute_device_segments,
    sum_device_bytes,
    sum_torch_bytes,
)
from plimsoll_sidecar.signals import resident_memory
from plimsoll_sidecar.signals.device_memory import DeviceBytes, DeviceUsers, Nvml
from plimsoll_sidecar.signals.sampler import MAX_PROBE_SILENCE_S, Sampler, SignalLog, make_load
from tests.quiet_engine import QuietEngine

GIB = 1 << 30


def status(epoch: str = "aa:1", **changes: object) -> Status:
    values: dict[str, object] = {
        "state": EngineState.SERVING,
        "epoch": epoch,
        "version": "1",
        "model": "tiny",
        "uptime_s": 1.0,
        "load": Load(running=2, waiting=0, inflight=3, requests_total=9, steps_total=40),
        "report_age_s": 0.2,
    }
    return Status(**{**values, **changes})  # type: ignore[arg-type]


class Engine(QuietEngine):
    """Answers in turn; None is an engine that does not answer."""

    def __init__(self, *answers: Status | None) -> None:
        self.answers = list(answers)

    def status(self) -> Status:
        answer = self.answers.pop(0)
        if answer is None:
            raise EngineError("no answer")
        return answer


def test_epochs_become_numbers_that_grow_and_silence_keeps_the_last() -> None:
    answers = [None, status("aa:1"), None, status("aa:2"), status("bb:1"), status("bb:1")]
    sampler = Sampler(Engine(*answers))
    samples = [sampler.sample() for _ in answers]
    assert [sample.epoch for sample in samples] == [0, 1, 1, 2, 3, 3]
    assert [sample.scrape_ok for sample in samples] == [a is not None for a in answers]


def test_a_standby_is_no_part_of_the_workers_account() -> None:
    """It works on nothing, and its memory is in the ledger: what it has alone counts there."""
    serving = ProcessMemory(Role.WORKER, 1 << 22, malloc_in_use=50, python_objects=7)
    forks = ["sh", "-c", "sleep 60 & echo; wait"]
    with subprocess.Popen(forks, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        alone, waits = (
            Sampler(Engine(status(processes=[serving, one]))).sample()
            for one in (
                ProcessMemory(Role.OTHER, process.pid),
                ProcessMemory(Role.WORKER, process.pid, name=STANDBY_PROCESS_NAME, private=4096),
            )
        )
        os.killpg(process.pid, signal.SIGKILL)
    assert waits.malloc == alone.malloc
    assert waits.malloc is not None
    assert waits.malloc.in_use == 50
    assert (waits.host.rss_anon, waits.host.by_process) == (4096, [])
    assert alone.host.rss_anon is not None
    assert alone.host.rss_anon > 4096
    assert alone.host.by_process is not None
    assert [one.role for one in alone.host.by_process] == ["other", "other"]


def test_without_an_answer_nothing_is_made_up() -> None:
    sampler = Sampler(Engine(None))
    sample = sampler.sample()
    assert sampler.status is None
    assert (sample.malloc, sample.device, sample.ledger) == (None, [], None)
    assert sample.load.inflight is None
    assert sample.host.rss_anon is None


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.WARMING])
def test_the_load_of_an_engine_that_starts_is_unknown(state: EngineState) -> None:
    assert make_load(status(state=state)).steps_total is None


def test_the_load_is_unknown_before_the_worker_of_the_epoch_reports() -> None:
    assert make_load(status(report_age_s=None)).inflight is None


def test_the_load_of_a_worker_that_hangs_is_known() -> None:
    assert make_load(status(report_age_s=500.0)).steps_total == 40


def test_the_workers_allocator_and_the_ledger() -> None:
    worker = ProcessMemory(Role.WORKER, 2**22 + 1, malloc_in_use=5, python_objects=7, py_blocks=3)
    frontend = ProcessMemory(Role.FRONTEND, 2**22 + 2, malloc_in_use=99)
    ledger = [LedgerEntry("kv_pool", MemoryKind.HOST, 10, 10)]
    sampler = Sampler(Engine(status(processes=[frontend, worker], ledger=ledger)))
    sample = sampler.sample()
    assert sample.malloc is not None
    assert (sample.malloc.in_use, sample.malloc.retained) == (5, None)
    assert sample.ledger is not None
    assert (sample.ledger[0].owner, sample.ledger[0].bound) == ("kv_pool", 10)


@pytest.mark.parametrize(("second", "in_use"), [(30, 35), (None, None)])
def test_a_worker_of_several_ranks_is_seen_whole(second: int | None, in_use: int | None) -> None:
    workers = [
        ProcessMemory(Role.WORKER, 2**22 + 1, malloc_in_use=5, python_objects=7, py_blocks=3),
        ProcessMemory(Role.WORKER, 2**22 + 2, malloc_in_use=second, python_objects=2, py_blocks=1),
    ]
    devices = [
        DeviceMemory(index, f"GPU-{index}", used=5, total=9, torch_allocated=1, torch_reserved=2)
        for index in range(2)
    ]
    sampler = Sampler(Engine(status(processes=workers, devices=devices)))
    sample = sampler.sample()
    assert sampler.device_source == "engine"
    assert sample.malloc is not None
    assert (sample.malloc.in_use, sample.malloc.python_objects) == (in_use, 9)
    assert (sample.malloc.retained, sample.malloc.py_blocks) == (None, 4)
    assert [device.index for device in sample.device] == [0, 1]
    assert (sum_device_bytes(sample), sum_torch_bytes(sample, "reserved")) == (10, 4)
    assert compute_device_segments(sample) == {
        Segment.TORCH_ALLOCATED: 2, Segment.TORCH_RESERVED_UNUSED: 2, Segment.NON_TORCH: 6,
    }  # fmt: skip


def test_the_engines_own_report_of_its_devices_is_preferred() -> None:
    device = DeviceMemory(0, "GPU-1", used=5, total=9, torch_allocated=3, torch_reserved=4)
    sampler = Sampler(Engine(status(devices=[device]), None))
    sample = sampler.sample()
    assert sampler.device_source == "engine"
    assert (sample.device[0].used, sample.device[0].total) == (5, 9)
    assert sample.device[0].torch is not None
    assert sampler.sample().device == []


def test_a_device_without_figures_is_unknown_where_nobody_else_knows_it() -> None:
    device = DeviceMemory(0, "GPU-00000000-0000-0000-0000-000000000000", torch_allocated=3)
    sampler = Sampler(Engine(status(devices=[device])))
    sample = sampler.sample()
    assert sampler.device_source is None
    assert sample.device[0].used is None


class Exporter:
    """Knows a device from the second time on that it is asked."""

    error = None

    def __init__(self) -> None:
        self.asked = 0

    def read_memory(self, uuid: str) -> DeviceBytes | None:
        self.asked += 1
        return DeviceBytes(70, 100) if uuid == "GPU-1" and self.asked > 1 else None


def test_the_exporter_is_used_and_kept_where_neither_engine_nor_nvml_knows() -> None:
    device = DeviceMemory(0, "GPU-1")
    answers = [status(devices=[device]) for _ in range(3)]
    sampler = Sampler(Engine(*answers), dcgm=Exporter())
    assert [sampler.sample().device[0].used for _ in answers] == [None, 70, 70]
    assert sampler.device_source == "dcgm"


def test_nvml_without_such_a_device_is_unknown_and_says_why() -> None:
    nvml = Nvml()
    assert nvml.read_memory("GPU-00000000-0000-0000-0000-000000000000") is None
    assert nvml.error


def test_the_processor_time_is_read_of_every_engine() -> None:
    """Of ours too, whose load is of now: it is the witness of a pause of a new kind."""
    program = "print(sum(range(3_000_000)), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    engine = Engine(status(processes=[ProcessMemory(Role.WORKER, process.pid)]))
    try:
        process.stdout.readline()
        sample = Sampler(engine).sample()
    finally:
        process.communicate(b"\n", timeout=10)
    assert sample.load_age_s is None
    assert sample.host.cpu_s is not None
    assert 0 < sample.host.cpu_s < 60


class Driver(Nvml):
    """NVML with a recorded answer: no driver can run here."""

    def __init__(self, used: int | None) -> None:
        super().__init__()
        self.used = used

    def read_memory(self, uuid: str) -> DeviceBytes | None:
        assert uuid == "GPU-1"
        return None if self.used is None else DeviceBytes(self.used, 100)


@pytest.mark.parametrize("used", [40, None])
def test_nvml_is_read_once_every_process_of_the_engine_has_ended(
    used: int | None,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = status(
        processes=[ProcessMemory(Role.FRONTEND, process.pid)],
        devices=[DeviceMemory(0, uuid="GPU-1", used=60, total=100)],
    )
    sampler = Sampler(Engine(alive, None, None), nvml=Driver(used))
    try:
        assert sampler.sample().device[0].used == 60
        silent = sampler.sample()
        assert silent.device == []  # silent, but alive: sources are not mixed
        assert silent.serving is False
    finally:
        process.communicate(b"\n", timeout=10)
    sample = sampler.sample()
    assert (sample.host.processes, sample.serving) == (0, None)
    assert [device.used for device in sample.device] == [used]


def test_a_helper_that_is_not_known_is_no_other_user_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that counts as shared stays so, and a leak on it is not seen."""
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(program) as main, subprocess.Popen(program) as helper:
        seen = status(
            processes=[
                ProcessMemory(Role.WORKER, helper.pid),
                ProcessMemory(Role.FRONTEND, main.pid),
            ],
            devices=[DeviceMemory(0, uuid="GPU-1", used=GIB, total=GIB)],
        )
        nvml = Nvml()
        users = DeviceUsers({main.pid: GIB, helper.pid: GIB}, 0, 0)
        monkeypatch.setattr(nvml, "read_users", lambda uuid: users)
        limits = {True: resident_memory.MAX_PROCESSES, False: 0}
        for are_known, limit in limits.items():
            monkeypatch.setattr(resident_memory, "MAX_PROCESSES", limit)
            (device,) = Sampler(Engine(seen), nvml=nvml).sample().device
            assert device.shared is None, are_known
        main.kill()
        helper.kill()


def test_a_silent_engine_is_asked_at_both_ports_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    class Hung(Engine):
        both = threading.Barrier(2, timeout=10)

        def status(self) -> Status:
            if self.answers:
                return super().status()
            self.meet()
            raise EngineError("no answer in time")

        def is_serving(self) -> bool:
            self.meet()
            return False

        def meet(self) -> None:
            if beside:
                self.both.wait()

    beside = False
    sampler = Sampler(Hung(status(processes=[ProcessMemory(Role.FRONTEND, process.pid)])))
    try:
        assert sampler.sample().serving is None
        assert sampler.sample().serving is False
        beside = True  # each waits for the other
        assert sampler.sample().serving is False
    finally:
        process.communicate(b"\n", timeout=10)


def test_a_serving_port_of_its_own_is_asked_beside_the_status_and_holds_up_no_sample() -> None:
    now, asked, answers = [0.0], list[float](), threading.Event()

    class Both(Engine):
        has_status_port = True

        def is_serving(self) -> bool:
            asked.append(now[0])
            return answers.wait(10)

    def sample() -> bool | None:
        now[0] += 1.0
        return sampler.sample().serving

    def until(wanted: bool) -> None:
        begin = time.monotonic()
        while sample() is not wanted:
            assert time.monotonic() - begin < 10

    sampler = Sampler(Both(*[status()] * 10_000), clock=lambda: now[0])
    begin = time.monotonic()
    assert [sample() for _ in range(20)] == [None] * 20
    assert time.monotonic() - begin < 5, "no answer is waited for"
    assert len(asked) == 1
    answers.set()
    until(True)
    asked.clear()
    for _ in range(20):
        sample()
        time.sleep(0.01)
    assert 3 <= len(asked) <= 4, "every five seconds"


def test_each_process_with_a_probe_has_figures_of_its_own() -> None:
    command = [sys.executable, "-c", "input()"]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
    with running[0] as first, running[1] as second:
        one = ProcessMemory(
            Role.FRONTEND, first.pid, malloc_in_use=5, malloc_retained=3, python_objects=2
        )
        other = ProcessMemory(Role.OTHER, second.pid, malloc_in_use=5)
        answer = status(processes=[one, other], probed=True)
        found = Sampler(Engine(answer)).sample().host.by_process
        for process in running:
            process.communicate(b"\n", timeout=10)
    figures = {each.role: (each.in_use, each.retained) for each in found or []}
    assert figures == {"frontend": (7, 3), "other": (None, None)}


def test_the_account_of_all_is_unknown_while_one_process_is_silent() -> None:
    """Else a gigabyte would seem to have moved from malloc to elsewhere."""

    def probed(*sizes: int | None) -> Status:
        processes = [
            ProcessMemory(Role.OTHER, 4_000_000 + at, malloc_in_use=size, python_objects=size)
            for at, size in enumerate(sizes)
        ]
        return status(processes=processes, probed=True)

    sampler = Sampler(Engine(probed(5, 7, None), probed(5, None, None), probed(6, 7, None)))
    found = [sampler.sample().malloc for _ in range(3)]
    assert [one.in_use if one else None for one in found] == [12, None, 13]

    now = [0.0]
    silent = Sampler(Engine(probed(5, 7), *[probed(5, None)] * 4), clock=lambda: now[0])
    seen = []
    for now[0] in (
        0.0,
        1.0,
        1.0 + MAX_PROBE_SILENCE_S,
        2.0 + MAX_PROBE_SILENCE_S,
        3.0 + MAX_PROBE_SILENCE_S,
    ):
        malloc = silent.sample().malloc
        seen.append(malloc.in_use if malloc else None)
    assert seen == [12, None, None, None, 5], "one that became another program has none to come"


def test_a_state_of_a_later_engine_says_nothing_of_its_readiness() -> None:
    """Neither that it starts, which would put off its warm-up for ever, nor that it makes steps."""
    sample = Sampler(Engine(status(state=EngineState("hibernating")))).sample()
    assert sample.scrape_ok
    assert sample.ready is None
    assert sample.load == Load()


def test_a_signal_that_stays_away_is_logged_once_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    told = SignalLog(lambda: now[0])
    gone = {"metrics": Signal(False, "MetricsMissing", "no route")}
    caplog.set_level("INFO")
    for signals, at in (({}, 0.0), (gone, 1.0), ({"metrics": Signal()}, 5.0)):
        now[0] = at
        told.update(signals)
    assert not caplog.messages, "one answer that came late"
    for at in range(10, 100):
        now[0] = float(at)
        told.update(gone)
    told.update({"metrics": Signal()})
    assert caplog.messages == [
        "signal metrics is missing for the reason MetricsMissing: no route",
        "signal metrics is available again",
    ]
