"""Why a pod is out of service: reasons that end apart from one another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from plimsoll_api.admin import DrainMode
from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.act import pod_services, readiness
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.adapters.engine_adapter import Arrivals, EngineAdapter
from plimsoll_sidecar.act.pod_services import LEAVE_SERVICES_TIMEOUT_S, PodServices, ServiceExit
from plimsoll_sidecar.act.slots import Slots
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.clients.kube import KubeError
from plimsoll_sidecar.govern.command import Command, Outcome, Result, SlotRequest, Verb
from tests.unit.clients.api_server import ApiServer, endpoint


def command(verb: Verb) -> Command:
    return Command(verb=verb, operation_id="1", incident="i", epoch="a:1", mode=DrainMode.FINISH)


class Engine:
    """Refuses its restart, and says whether it was put back into service."""

    def __init__(self) -> None:
        self.resumed = False
        self.silent = False
        self.drained_for: list[float] = []
        self.restarts = 0
        self.arrivals = 1
        self.asked_for_arrivals = 0
        self.drained_after: list[int] = []

    def status(self) -> SimpleNamespace:
        return SimpleNamespace()

    def resume(self, epoch: str) -> None:
        if self.silent:
            raise EngineError("no answer")
        self.resumed = True

    def read_arrivals(self) -> Arrivals:
        """At first, clients still reach the engine."""
        self.asked_for_arrivals += 1
        return Arrivals(min(self.asked_for_arrivals, self.arrivals), 1.0)

    def drain(self, command: Command, is_wanted: Callable[[], bool]) -> Result:
        self.drained_after.append(self.asked_for_arrivals)
        self.drained_for.append(command.deadline_s)
        return Result(operation_id=command.operation_id, outcome=Outcome.SUCCEEDED)

    def restart_engine(self, command: Command) -> Result:
        self.restarts += 1
        return Result(operation_id=command.operation_id, outcome=Outcome.REFUSED)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def actuator(tmp_path: Path, engine: Engine) -> Actuator:
    adapter = cast(EngineAdapter, engine)
    budget = RestartBudget()
    return Actuator(adapter, Slots(), None, lambda _: (), tmp_path, budget, lambda: None)


def test_each_reason_ends_by_itself_and_the_pod_is_ready_after_the_last(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert readiness.is_ready(folder)
    readiness.set_unready(folder, readiness.MANUAL, 60.0)
    readiness.set_unready(folder, readiness.DRAIN, 30.0)
    assert readiness.read_active_reasons(folder)["manual"] == pytest.approx(60.0, abs=5.0)
    assert readiness.read_active_reasons(folder)["drain"] == pytest.approx(30.0, abs=5.0)
    readiness.clear_reasons(folder, readiness.DRAIN)
    assert list(readiness.read_active_reasons(folder)) == ["manual"]
    assert not readiness.is_ready(folder)
    readiness.clear_reasons(folder, readiness.MANUAL)
    assert readiness.is_ready(folder)
    readiness.clear_reasons(folder, readiness.MANUAL)


@pytest.mark.parametrize("reason", readiness.REASONS)
@pytest.mark.parametrize(
    "content", [b"", b"nan", b"nan x", b"inf", b"-1", b"-1 x", b"9e99", b"\xff" * 9, b"1" * 9999]
)
def test_a_reason_that_cannot_be_read_does_not_hold(
    tmp_path: Path, reason: str, content: bytes
) -> None:
    readiness.set_unready(str(tmp_path), reason, 60.0)
    (tmp_path / readiness.REASONS_FOLDER / reason).write_bytes(content)
    assert readiness.is_ready(str(tmp_path))


def test_a_drain_of_hours_is_not_cut(tmp_path: Path) -> None:
    readiness.set_unready(str(tmp_path), readiness.DRAIN, 6 * 3600.0)
    assert readiness.read_active_reasons(str(tmp_path))["drain"] == pytest.approx(
        6 * 3600.0, abs=5.0
    )


def test_after_a_restart_of_the_node_only_a_persons_drain_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reason in readiness.REASONS:
        readiness.set_unready(str(tmp_path), reason, 600.0)
    monkeypatch.setattr(readiness, "_read_boot_id", lambda: "the next boot")
    assert list(readiness.read_active_reasons(str(tmp_path))) == [readiness.MANUAL]
    readiness.end_drain(str(tmp_path), readiness.MANUAL)
    monkeypatch.setattr(readiness, "_read_boot_id", lambda: "the one after")
    assert readiness.is_ready(str(tmp_path)), "a drain that ended does not come back either"


def test_no_reason_holds_for_longer_than_its_bound(tmp_path: Path) -> None:
    readiness.set_unready(str(tmp_path), readiness.MANUAL, 1e12)
    assert readiness.read_active_reasons(str(tmp_path))["manual"] == pytest.approx(
        readiness.MAX_UNREADY_DURATION_S, abs=5.0
    )


def test_writers_of_the_same_moment_do_not_lose_one_another(tmp_path: Path) -> None:
    failed: list[OSError] = []

    def write(reason: str) -> None:
        try:
            for _ in range(200):
                readiness.set_unready(str(tmp_path), reason, 60.0)
        except OSError as error:
            failed.append(error)

    reasons = [*readiness.REASONS, *readiness.REASONS]
    threads = [threading.Thread(target=write, args=(reason,)) for reason in reasons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert set(readiness.read_active_reasons(str(tmp_path))) == set(readiness.REASONS)
    assert sorted(os.listdir(tmp_path / readiness.REASONS_FOLDER)) == sorted(readiness.REASONS)


def test_the_end_of_an_incident_leaves_a_persons_drain(tmp_path: Path, actuator: Actuator) -> None:
    readiness.set_unready(str(tmp_path), readiness.MANUAL, 60.0)
    readiness.set_unready(str(tmp_path), readiness.DRAIN, 60.0)
    actuator.set_slot_request(SlotRequest("i"))
    assert list(readiness.read_active_reasons(str(tmp_path))) == ["manual", "drain"]
    actuator.set_slot_request(SlotRequest(None))
    assert list(readiness.read_active_reasons(str(tmp_path))) == ["manual"]


@pytest.mark.parametrize("drained", [True, False])
def test_a_refused_restart_leaves_a_persons_drain(
    tmp_path: Path, actuator: Actuator, engine: Engine, drained: bool
) -> None:
    if drained:
        readiness.set_unready(str(tmp_path), readiness.MANUAL, 60.0)
    assert actuator.execute(command(Verb.RESTART_ENGINE)).outcome is Outcome.REFUSED
    assert list(readiness.read_active_reasons(str(tmp_path))) == ["manual"] * drained
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
        readiness.set_unready(folder, readiness.DRAIN, readiness.RESTART_UNREADY_TIMEOUT_S)

    def end() -> Result:
        assert not readiness.is_ready(folder), "before the engine ends"
        return Result(operation_id="1", outcome=outcome)

    assert readiness.end_engine_while_unready(folder, end).outcome is outcome
    assert readiness.is_ready(folder) is ready
    longest_s = readiness.MAX_KUBELET_LAG_S + 0.001  # what is written is rounded
    assert all(left <= longest_s for left in readiness.read_active_reasons(folder).values())


def test_an_error_puts_the_pod_back_into_service(tmp_path: Path) -> None:
    def end() -> Result:
        raise OSError("no such process")

    with pytest.raises(OSError, match="no such process"):
        readiness.end_engine_while_unready(str(tmp_path), end)
    assert readiness.is_ready(str(tmp_path))


def ends(actuator: Actuator, engine: Engine) -> bool:
    """Whether the engine is resumed when the supervisor looks for drains that have ended."""
    engine.resumed, actuator._resume_at = False, 0.0
    actuator.resume_after_drains("a:1")
    if actuator._resuming:
        actuator._run_next_command()
    return engine.resumed


@pytest.mark.parametrize("drain", readiness.DRAIN_REASONS)
def test_the_engine_is_resumed_when_a_drain_expires(
    tmp_path: Path, actuator: Actuator, engine: Engine, drain: str
) -> None:
    folder = str(tmp_path)
    assert not ends(actuator, engine), "nobody drained it"
    readiness.set_unready(folder, drain, 60.0)
    assert not ends(actuator, engine)
    readiness.set_unready(folder, drain, -1.0)
    assert readiness.is_ready(folder)
    readiness.set_unready(folder, readiness.RESTART, 60.0)
    assert not ends(actuator, engine), "it ends anyway"
    readiness.clear_reasons(folder, readiness.RESTART)
    engine.silent = True
    assert not ends(actuator, engine)
    engine.silent = False
    assert ends(actuator, engine), "tried again"
    assert not ends(actuator, engine), "once"


def test_an_incident_that_restarts_nothing_resumes_the_engine(
    tmp_path: Path, actuator: Actuator, engine: Engine
) -> None:
    """A slot that is lost, or a journal that cannot be written, between drain and restart."""
    readiness.set_unready(str(tmp_path), readiness.DRAIN, 60.0)
    actuator.set_slot_request(SlotRequest("i"))
    assert not ends(actuator, engine)
    actuator.set_slot_request(SlotRequest(None))
    assert readiness.is_ready(str(tmp_path))
    assert ends(actuator, engine)


def test_a_restart_that_fails_resumes_the_engine(
    tmp_path: Path, actuator: Actuator, engine: Engine
) -> None:
    readiness.set_unready(str(tmp_path), readiness.DRAIN, 60.0)
    failed = Result(operation_id="1", outcome=Outcome.FAILED)
    readiness.end_engine_while_unready(str(tmp_path), lambda: failed)
    assert ends(actuator, engine)


def test_an_engine_that_was_not_drained_is_left_alone(
    tmp_path: Path, actuator: Actuator, engine: Engine
) -> None:
    """The engine's own hook drains it before its container ends."""
    actuator.set_slot_request(SlotRequest("i"))
    actuator.set_slot_request(SlotRequest(None))
    readiness.end_engine_while_unready(
        str(tmp_path), lambda: Result(operation_id="1", outcome=Outcome.FAILED)
    )
    assert not ends(actuator, engine)


class Away(ServiceExit):
    """Endpoints and slots of an API server that does not answer, or refuses with ``status``."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.asked = 0

    def wait_until_left(self, timeout_s: float = LEAVE_SERVICES_TIMEOUT_S) -> bool:
        self.asked += 1
        raise KubeError(self.status, "no answer")

    def ensure_held(self, incident: str, policy: RestartBudget) -> None:
        raise KubeError(503, "no answer")


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []

    def wait(_: object, timeout_s: float = LEAVE_SERVICES_TIMEOUT_S) -> None:
        waited.append(timeout_s)

    monkeypatch.setattr(ServiceExit, "wait_until_left", wait)
    return waited


def test_an_engine_drains_once_no_more_requests_arrive(
    actuator: Actuator, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kube-proxy that lost its watch still forwards to a pod that left its endpoints."""
    monkeypatch.setattr(pod_services, "ARRIVALS_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(pod_services, "MIN_QUIET_S", 0.0)
    monkeypatch.setattr(pod_services, "MAX_QUIET_S", 0.0)
    engine.arrivals = 20
    monkeypatch.setattr(pod_services, "UNKNOWN_ENDPOINTS_WAIT_S", 0.0)
    actuator._service_exit = ServiceExit()
    assert actuator.execute(command(Verb.DRAIN)).outcome is Outcome.SUCCEEDED
    assert engine.drained_after == [21]
    engine.asked_for_arrivals = 0
    hung = replace(command(Verb.DRAIN), stalled=True)
    assert actuator.execute(hung).outcome is Outcome.SUCCEEDED
    assert engine.drained_after == [21, 0], "a hung engine answers nobody"


def test_requests_end_before_a_restart_while_endpoints_cannot_be_read(
    actuator: Actuator, engine: Engine, waited: list[float]
) -> None:
    actuator._service_exit = cast(ServiceExit, Away(403))
    assert actuator.execute(command(Verb.DRAIN)).outcome is Outcome.SUCCEEDED
    assert waited == [LEAVE_SERVICES_TIMEOUT_S], "a fixed time"
    assert len(engine.drained_for) == 1


def test_requests_end_before_a_restart_while_the_api_server_is_away(
    actuator: Actuator, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_services, "LEAVE_SERVICES_TIMEOUT_S", 1.0)
    monkeypatch.setattr(pod_services, "ENDPOINTS_POLL_INTERVAL_S", 0.1)
    away = Away()
    actuator._service_exit = cast(ServiceExit, away)
    since = time.monotonic()
    assert actuator.execute(command(Verb.DRAIN)).outcome is Outcome.SUCCEEDED
    assert time.monotonic() - since >= 1.0
    assert away.asked > 1, "it may be back soon"
    assert len(engine.drained_for) == 1


def test_an_engine_stays_if_it_has_become_the_last_ready_replica(
    tmp_path: Path, actuator: Actuator, engine: Engine, api: ApiServer
) -> None:
    """The other one ended while this one drained: clients need this one now."""
    api.add("front", [endpoint("llm-0", ready=False), endpoint("llm-1")])
    actuator._service_exit = PodServices(api.endpoint_slices, "llm-0")
    assert actuator.execute(command(Verb.DRAIN)).outcome is Outcome.SUCCEEDED
    api.slices[0]["endpoints"][1] = endpoint("llm-1", ready=False)
    result = actuator.execute(replace(command(Verb.RESTART_ENGINE), leaves=True))
    assert (result.outcome, engine.restarts) == (Outcome.REFUSED, 0)
    assert "no other replica of the service is ready" in result.message
    assert engine.resumed
    assert readiness.is_ready(str(tmp_path))
    actuator.execute(command(Verb.RESTART_ENGINE))
    assert engine.restarts == 1, "its memory runs out"


def test_an_engine_stays_while_a_kubelet_reports_its_pod_as_ready(
    actuator: Actuator, engine: Engine, api: ApiServer
) -> None:
    api.add("front", [endpoint("llm-0", ready=False), endpoint("llm-1")])
    actuator._service_exit = PodServices(api.endpoint_slices, "llm-0")
    assert actuator.execute(command(Verb.DRAIN)).outcome is Outcome.SUCCEEDED
    api.slices[0]["endpoints"][0] = endpoint("llm-0")

    def leave() -> None:
        assert engine.restarts == 0
        api.slices[0]["endpoints"][0] = endpoint("llm-0", ready=False)

    timer = threading.Timer(0.7, leave)
    timer.start()
    actuator.execute(replace(command(Verb.RESTART_ENGINE), leaves=True))
    assert not timer.is_alive()
    assert engine.restarts == 1


@pytest.mark.parametrize("verb", [Verb.LEAVE, Verb.DRAIN, Verb.RESTART_ENGINE])
def test_a_slot_that_nobody_can_renew_now_costs_no_rung(actuator: Actuator, verb: Verb) -> None:
    actuator._slots = cast(Slots, Away())
    result = actuator.execute(command(verb))
    assert result.outcome is Outcome.REFUSED
    assert "the API server does not answer" in result.message
