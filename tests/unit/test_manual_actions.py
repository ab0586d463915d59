"""Actions by hand (``manual.py``): a restart of a whole engine, drains, and their end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from plimsoll_api.admin import Capability, EngineState, Load, Status
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint, ServiceRef, SupervisorConfig
from plimsoll_sidecar.act import pod_services, readiness
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.command import Command, Outcome, Result
from plimsoll_sidecar.manual import create_parser, perform_action

CONFIG = SupervisorConfig(
    service=ServiceRef("vllm"), engine=EngineEndpoint(EngineType.VLLM, "", "")
)


class Engine:
    """Says what it was asked for, and whether its pod was ready then."""

    def __init__(self, state_dir: Path, finishes: Outcome) -> None:
        self._state_dir, self._finishes = str(state_dir), finishes
        self.calls: list[tuple[str, bool]] = []
        self.while_draining: Callable[[], object] = bool

    def status(self) -> Status:
        can = [Capability.DRAIN]
        return Status(EngineState.SERVING, "a:1", "0.32.0", "tiny", 1.0, Load(), capabilities=can)

    def read_arrivals(self) -> None:
        assert not readiness.is_ready(self._state_dir)

    def drain(self, command: Command, stands: Callable[[], bool]) -> Result:
        self.while_draining()
        return self._called("drain", command, self._finishes if stands() else Outcome.REFUSED)

    def resume(self, epoch: str) -> None:
        self.calls.append(("resume", readiness.is_ready(self._state_dir)))

    def finish_requests(self, command: Command) -> Result:
        return self._called("finish", command, self._finishes)

    def restart_engine(self, command: Command) -> Result:
        return self._called("restart", command, Outcome.SUCCEEDED)

    def _called(self, name: str, command: Command, outcome: Outcome) -> Result:
        self.calls.append((name, readiness.is_ready(self._state_dir)))
        return Result(operation_id=command.operation_id, outcome=outcome)


@pytest.mark.parametrize(
    ("finishes", "calls"),
    [(Outcome.SUCCEEDED, ["finish", "restart"]), (Outcome.REFUSED, ["finish"])],
)
def test_its_pod_leaves_and_its_requests_end_before_the_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finishes: Outcome, calls: list[str]
) -> None:
    waited: list[float] = []

    def wait(
        self: pod_services.ServiceExit, timeout_s: float = pod_services.LEAVE_SERVICES_TIMEOUT_S
    ) -> bool:
        waited.append(timeout_s)
        assert not readiness.is_ready(str(tmp_path))
        return True

    monkeypatch.setattr(pod_services.ServiceExit, "wait_until_left", wait)
    monkeypatch.setenv("POD_NAME", "vllm-0")
    engine = Engine(tmp_path, finishes)
    arguments = ["restart", "--expected-epoch=a:1", f"--state-dir={tmp_path}"]
    answer = perform_action(
        create_parser().parse_args(arguments), cast(EngineAdapter, engine), CONFIG
    )
    assert answer.outcome == finishes
    assert waited == [pod_services.LEAVE_SERVICES_TIMEOUT_S]
    assert engine.calls == [(name, False) for name in calls]
    assert readiness.is_ready(str(tmp_path)) is (finishes is Outcome.REFUSED)


@pytest.mark.parametrize("first", [True, False])
def test_a_drain_that_fails_leaves_an_earlier_one(tmp_path: Path, first: bool) -> None:
    engine = cast(EngineAdapter, Engine(tmp_path, Outcome.FAILED))
    if first:
        readiness.set_unready(str(tmp_path), readiness.MANUAL, 60.0)
    arguments = ["drain", "--expected-epoch=a:1", f"--state-dir={tmp_path}"]
    assert perform_action(create_parser().parse_args(arguments), engine, CONFIG).outcome == "Failed"
    assert list(readiness.read_active_reasons(str(tmp_path))) == ["manual"] * first
    assert readiness.list_ended_drains(str(tmp_path)) == ["manual"] * (not first), (
        "the engine may be drained"
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_drain_that_still_waits_ends_with_the_resume(tmp_path: Path, first: bool) -> None:
    engine = Engine(tmp_path, Outcome.SUCCEEDED)
    adapter, flags = (
        cast(EngineAdapter, engine),
        ["--expected-epoch=a:1", f"--state-dir={tmp_path}"],
    )
    if first:
        readiness.set_unready(str(tmp_path), readiness.MANUAL, 60.0)
    engine.while_draining = lambda: perform_action(
        create_parser().parse_args(["resume", *flags]), adapter, CONFIG
    )
    assert (
        perform_action(create_parser().parse_args(["drain", *flags]), adapter, CONFIG).outcome
        == "Refused"
    )
    assert readiness.is_ready(str(tmp_path)), "an earlier drain was ended as well"


def test_a_drain_that_is_refused_began_nothing(tmp_path: Path) -> None:
    engine = cast(EngineAdapter, Engine(tmp_path, Outcome.REFUSED))
    arguments = ["drain", "--expected-epoch=a:1", f"--state-dir={tmp_path}"]
    assert (
        perform_action(create_parser().parse_args(arguments), engine, CONFIG).outcome == "Refused"
    )
    assert readiness.list_ended_drains(str(tmp_path)) == []


def test_a_resume_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: Engine, epoch: str) -> None:
        raise EngineError("no answer")

    monkeypatch.setattr(Engine, "resume", silent)
    engine = cast(EngineAdapter, Engine(tmp_path, Outcome.SUCCEEDED))
    readiness.set_unready(str(tmp_path), readiness.MANUAL, 60.0)
    arguments = ["resume", "--expected-epoch=a:1", f"--state-dir={tmp_path}"]
    assert perform_action(create_parser().parse_args(arguments), engine, CONFIG).outcome == "Failed"
    assert readiness.list_ended_drains(str(tmp_path)) == ["manual"]


def test_a_resume_ends_every_reason(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Outcome.SUCCEEDED)
    for reason in readiness.REASONS:
        readiness.set_unready(str(tmp_path), reason, 60.0)
    arguments = ["resume", "--expected-epoch=a:1", f"--state-dir={tmp_path}"]
    answer = perform_action(
        create_parser().parse_args(arguments), cast(EngineAdapter, engine), CONFIG
    )
    assert answer.outcome == "Succeeded"
    assert readiness.is_ready(str(tmp_path))
    assert readiness.list_ended_drains(str(tmp_path)) == list(readiness.DRAIN_REASONS), (
        "the supervisor resumes it"
    )


@pytest.mark.parametrize("deadline", ["0", "30", "7200"])
def test_a_drain_stands_until_a_person_ends_it(tmp_path: Path, deadline: str) -> None:
    engine = cast(EngineAdapter, Engine(tmp_path, Outcome.SUCCEEDED))
    flags = ["--expected-epoch=a:1", f"--state-dir={tmp_path}"]
    asked = create_parser().parse_args(["drain", f"--deadline={deadline}", *flags])
    assert perform_action(asked, engine, CONFIG).outcome == "Succeeded"
    assert readiness.read_active_reasons(str(tmp_path))["manual"] > 7 * 86_400.0
    assert (
        perform_action(create_parser().parse_args(["resume", *flags]), engine, CONFIG).outcome
        == "Succeeded"
    )
    assert readiness.is_ready(str(tmp_path))


@pytest.mark.parametrize("deadline", ["nan", "inf", "-1", "1e9", "soon"])
def test_a_deadline_that_never_comes_is_refused(deadline: str) -> None:
    with pytest.raises(ValueError, match="--deadline"):
        create_parser().parse_args(["drain", f"--deadline={deadline}"])
