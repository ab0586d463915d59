"""Why a pod is out of service: reasons that end apart from one another."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from plimsoll_api.admin import DrainMode
from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.act.restart_slots.slots import LocalSlots
from plimsoll_sidecar.govern.command import Command, Outcome, Result, SlotWish, Verb


def command(verb: Verb) -> Command:
    return Command(verb=verb, operation_id="1", incident="i", epoch="a:1", mode=DrainMode.FINISH)


class Engine:
    """Refuses its restart, and says whether it was put back into service."""

    def __init__(self) -> None:
        self.resumed = False

    def status(self) -> SimpleNamespace:
        return SimpleNamespace()

    def resume(self, epoch: str) -> None:
        self.resumed = True

    def restart_engine(self, command: Command) -> Result:
        return Result(operation_id=command.operation_id, outcome=Outcome.REFUSED)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def actuator(tmp_path: Path, engine: Engine) -> Actuator:
    adapter = cast(EngineAdapter, engine)
    budget = RestartBudget()
    return Actuator(adapter, LocalSlots(), None, lambda _: (), tmp_path, budget, lambda: None)


def test_each_reason_ends_by_itself_and_the_pod_is_ready_after_the_last(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert readiness.is_ready(folder)
    readiness.hold(folder, readiness.MANUAL, 60.0)
    readiness.hold(folder, readiness.DRAIN, 30.0)
    assert readiness.holding(folder)["manual"] == pytest.approx(60.0, abs=5.0)
    assert readiness.holding(folder)["drain"] == pytest.approx(30.0, abs=5.0)
    readiness.clear(folder, readiness.DRAIN)
    assert list(readiness.holding(folder)) == ["manual"]
    assert not readiness.is_ready(folder)
    readiness.clear(folder, readiness.MANUAL)
    assert readiness.is_ready(folder)
    readiness.clear(folder, readiness.MANUAL)


@pytest.mark.parametrize("content", [b"", b"nan", b"inf", b"-1", b"9e99", b"\xff" * 9, b"1" * 9999])
def test_a_reason_that_cannot_be_read_does_not_hold(tmp_path: Path, content: bytes) -> None:
    readiness.hold(str(tmp_path), readiness.DRAIN, 60.0)
    (tmp_path / readiness.FOLDER / readiness.DRAIN).write_bytes(content)
    assert readiness.is_ready(str(tmp_path))


def test_no_reason_holds_for_longer_than_its_bound(tmp_path: Path) -> None:
    readiness.hold(str(tmp_path), readiness.MANUAL, 1e12)
    assert readiness.holding(str(tmp_path))["manual"] == pytest.approx(readiness.MAX_S, abs=5.0)


def test_writers_of_the_same_moment_do_not_lose_one_another(tmp_path: Path) -> None:
    failed: list[OSError] = []

    def write(reason: str) -> None:
        try:
            for _ in range(200):
                readiness.hold(str(tmp_path), reason, 60.0)
        except OSError as error:
            failed.append(error)

    reasons = [*readiness.REASONS, *readiness.REASONS]
    threads = [threading.Thread(target=write, args=(reason,)) for reason in reasons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert set(readiness.holding(str(tmp_path))) == set(readiness.REASONS)
    assert sorted(os.listdir(tmp_path / readiness.FOLDER)) == sorted(readiness.REASONS)


def test_the_end_of_an_incident_leaves_a_persons_drain(tmp_path: Path, actuator: Actuator) -> None:
    readiness.hold(str(tmp_path), readiness.MANUAL, 60.0)
    readiness.hold(str(tmp_path), readiness.DRAIN, 60.0)
    actuator.follow_slot(SlotWish("i"))
    assert list(readiness.holding(str(tmp_path))) == ["manual", "drain"]
    actuator.follow_slot(SlotWish(None))
    assert list(readiness.holding(str(tmp_path))) == ["manual"]


@pytest.mark.parametrize("drained", [True, False])
def test_a_refused_restart_leaves_a_persons_drain(
    tmp_path: Path, actuator: Actuator, engine: Engine, drained: bool
) -> None:
    if drained:
        readiness.hold(str(tmp_path), readiness.MANUAL, 60.0)
    assert actuator.execute(command(Verb.RESTART_ENGINE)).outcome is Outcome.REFUSED
    assert list(readiness.holding(str(tmp_path))) == ["manual"] * drained
    assert engine.resumed is not drained


@pytest.mark.parametrize("drained", [True, False])
@pytest.mark.parametrize(
    ("outcome", "ready"),
    [(Outcome.SUCCEEDED, False), (Outcome.REFUSED, True), (Outcome.FAILED, True)],
)
def test_the_pod_is_unready_where_the_engine_ended(
    tmp_path: Path, drained: bool, outcome: Outcome, ready: bool
) -> None:
    folder = str(tmp_path)
    if drained:
        readiness.hold(folder, readiness.DRAIN, readiness.RETURN_S)

    def end() -> Result:
        assert not readiness.is_ready(folder), "before the engine ends"
        return Result(operation_id="1", outcome=outcome)

    assert readiness.while_ending(folder, end).outcome is outcome
    assert readiness.is_ready(folder) is ready
    assert all(left <= readiness.SEEN_S for left in readiness.holding(folder).values())


def test_an_error_puts_the_pod_back_into_service(tmp_path: Path) -> None:
    def end() -> Result:
        raise OSError("no such process")

    with pytest.raises(OSError, match="no such process"):
        readiness.while_ending(str(tmp_path), end)
    assert readiness.is_ready(str(tmp_path))
