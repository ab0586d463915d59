"""The supervisor's threads: none ends unnoticed (``background.py``)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from plimsoll_api.admin import EngineState, Load, Status
from plimsoll_api.assessment import Assessment
from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar import background
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.act.slots import LEASE_DURATION_S, LeaseSlots, Slots
from plimsoll_sidecar.act.standby import StandbyLease
from plimsoll_sidecar.background import BackgroundThread, read_thread_status, run_in_thread
from plimsoll_sidecar.clients.kube import KubeClient, KubeError
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.signals.other_pods import GroupLeader, GroupPages
from plimsoll_sidecar.signals.sampler import Sampler
from tests.quiet_engine import QuietEngine
from tests.unit.clients.api_server import ApiServer


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Work:
    """Turns that raise the given errors."""

    def __init__(self) -> None:
        self.raises: Exception | None = None
        self.turns = 0

    def turn(self) -> float:
        self.turns += 1
        if self.raises is not None:
            raise self.raises
        return 0.01

    def again(self) -> None:
        """Wait for two more turns: the first may be under way."""
        until = self.turns + 2
        eventually(lambda: self.turns >= until)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def part(work: Work, monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundThread]:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.01)
    made = BackgroundThread("tested", work.turn, expected_errors=(KubeError,), max_pause_s=0.02)
    made.start()
    yield made
    made.stop()
    made.join(10)
    assert not made.is_alive()


def test_a_part_that_raises_goes_on_and_shows_it(
    work: Work, part: BackgroundThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    work.again()
    assert read_thread_status()["tested"]
    work.raises = KeyError("metadata")
    work.again()
    assert not read_thread_status()["tested"]
    assert b'plimsoll_supervisor_part_ok{part="tested"} 0.0' in Metrics().render()
    work.raises = None
    work.again()
    assert b'plimsoll_supervisor_part_ok{part="tested"} 1.0' in Metrics().render()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["thread tested failed: 'metadata'", "thread tested has recovered"], "each once"
    assert caplog.records[0].exc_info


def test_what_is_expected_has_no_traceback(
    work: Work, part: BackgroundThread, caplog: pytest.LogCaptureFixture
) -> None:
    work.raises = KubeError(503, "away")
    work.again()
    assert [record.exc_info for record in caplog.records] == [None]


def test_a_wish_of_the_server_is_followed_within_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    part = BackgroundThread("tested", lambda: None)
    assert part._record_failure(KubeError(429, "wait", retry_after_s=7.0)) == 7.0
    assert part._record_failure(KubeError(429, "wait", retry_after_s=86_400.0)) <= 300.0
    assert part._record_failure(KubeError(503, "now", retry_after_s=0.0)) >= 1.0
    pauses = [part._record_failure(ValueError()) for _ in range(2000)]
    assert max(pauses) <= background.MAX_PAUSE_S


def test_no_wish_of_the_server_costs_the_restart_slot(tmp_path: Path) -> None:
    adapter = cast(EngineAdapter, None)
    made = Actuator(adapter, Slots(), None, lambda _: (), tmp_path, RestartBudget(), lambda: None)
    assert (
        made._slot_loop._record_failure(KubeError(429, "wait", retry_after_s=300.0))
        <= LEASE_DURATION_S / 4
    )


def test_a_trim_without_a_thread_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its command would be under way forever, and no other would be sent."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made = Actuator(
        cast(EngineAdapter, None), Slots(), None, lambda _: (), tmp_path, RestartBudget(),
        lambda: None,
    )  # fmt: skip
    made.queue_command(Command(verb=Verb.TRIM, operation_id="1", incident="i", epoch="a:1"))
    monkeypatch.setattr(threading.Thread, "start", start)
    made._run_next_command()
    assert [result.outcome for result in made.take_results()] == [Outcome.FAILED]


def test_a_part_sleeps_until_it_is_woken() -> None:
    turns: list[int] = []
    part = BackgroundThread("tested", lambda: turns.append(1))
    part.start()
    try:
        eventually(lambda: len(turns) == 1)
        part.wake()
        eventually(lambda: len(turns) == 2)
    finally:
        part.stop()
        part.join(10)


def test_a_task_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def task() -> None:
        done.set()
        raise ValueError("of the task")

    run_in_thread("task", task)
    assert done.wait(10)
    eventually(lambda: "of the task" in caplog.text)


def test_an_answer_that_is_no_lease_does_not_end_the_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 200 with ``{}`` in place of the Lease: as a proxy between may give it."""
    answers: list[object] = [{}]

    class Kube:
        def get(self, path: str, **_: str) -> object:
            return answers[-1]

    class Engine:
        def end_leftover_processes(self) -> str:
            return ""

    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.01)
    slots = LeaseSlots(cast(KubeClient, Kube()), "n", ("slot-0",), "pod-0")
    actuator = Actuator(
        cast(EngineAdapter, Engine()), slots, None, lambda _: (), tmp_path, RestartBudget(),
        lambda: None,
    )  # fmt: skip
    actuator.start()
    try:
        eventually(lambda: read_thread_status().get("slot") is False)
        answers.append({"metadata": {"name": "slot-0"}})
        eventually(lambda: read_thread_status()["slot"])
        eventually(lambda: actuator.take_stored_restarts() is not None)
    finally:
        actuator.stop()


def test_a_main_thread_that_hangs_is_seen_and_the_log_says_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a call to a driver of a device that has fallen off its bus."""
    metrics, text = Metrics(), b'plimsoll_supervisor_part_ok{part="sampling"} %.1f'
    metrics.observe(Assessment(t=1.0, epoch=1, warm=False), {}, 0.001)
    assert text % 1.0 in metrics.render()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + background.HANG_TIMEOUT_S + 1.0)
    for _ in range(2):
        assert text % 0.0 in metrics.render()
    assert [record.getMessage().count("test_background.py") > 0 for record in caplog.records] == [
        True
    ], "once"
    metrics.observe(Assessment(t=2.0, epoch=1, warm=False), {}, 0.001)
    assert text % 1.0 in metrics.render()


class _Away(QuietEngine):
    """An engine that reports its status, but does not serve, nor takes a lease."""

    has_status_port = True

    def status(self) -> Status:
        return Status(EngineState.SERVING, "a:1", "1", "m", 1.0, Load())

    def lease_standby(self, epoch: str, lease_s: float) -> None:
        return None


def test_a_pod_without_free_processes_is_supervised_on(api: ApiServer) -> None:
    """The supervisor needs no new thread for a sample: it could not start again either."""
    engine = _Away()
    sampler, standby = Sampler(engine), StandbyLease(cast(EngineAdapter, engine))
    leader = GroupLeader(GroupPages(api.endpoint_slices, "llm", lambda name: True))
    before = threading.stack_size(1 << 48)  # no kernel has room for such a thread
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        served = [sampler.sample().serving for _ in range(3)]
        standby.set_wanted("a:1", is_wanted=True)
        assert not leader.is_serving()
    finally:
        threading.stack_size(before)
    assert False in served, "an engine that does not serve is still seen"
    assert standby._thread is None
    assert leader._part is None
    standby.set_wanted("a:1", is_wanted=True)
    leader.is_serving()
    for thread in (standby._thread, leader._part):
        assert thread is not None
        assert thread.is_alive(), "once there is room"
        thread.stop()
