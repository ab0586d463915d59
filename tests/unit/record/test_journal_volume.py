"""A volume that lets nothing be written: the supervisor watches on, and acts on nothing.

Tests ``record/journal.py``.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from plimsoll_api import supervisor_config
from plimsoll_api.admin import Capability, EngineState, Load, Status
from plimsoll_api.assessment import Assessment, Suspicion
from plimsoll_api.engines import EngineType
from plimsoll_api.incident_record import JOURNAL_FILE
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.state import Signal
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervisor_config import EngineEndpoint, ServiceRef, SupervisorConfig
from plimsoll_api.trace import Sample
from plimsoll_sidecar.config import ConfigFile
from plimsoll_sidecar.detect.detector import Checkpoint, Detector
from plimsoll_sidecar.govern.command import Command, Outcome, Result, SlotRequest, Verb
from plimsoll_sidecar.govern.restart_budget import ReplicaRestarts
from plimsoll_sidecar.record import journal
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.signals.process_table import ProcessId
from plimsoll_sidecar.signals.sampler import Sampler
from plimsoll_sidecar.supervisor import Supervisor

STATUS = Status(
    state=EngineState.SERVING,
    epoch="aa:1",
    version="1",
    model="m",
    uptime_s=1.0,
    load=Load(),
    capabilities=list(Capability),
)


class Stalled:
    """An engine that stalls from its first sample on: source and detector in one."""

    def __init__(self) -> None:
        self.status: Status | None = STATUS
        self.signals: dict[str, Signal] = {}

    def sample(self) -> Sample:
        return Sample(t=0.0, epoch=1)

    def update(self, sample: Sample) -> Assessment:
        stall = Suspicion(kind=IncidentKind.STALL, segment=None, confidence=1.0, consumed_ratio=0.0)
        return Assessment(t=sample.t, epoch=1, warm=True, suspicions=[stall])

    def make_checkpoint(self) -> Checkpoint:
        return Checkpoint()

    def resume(self, checkpoint: Checkpoint) -> None:
        return


class Hands:
    """What would act: it only takes note."""

    can_test_partners, restart_blocker = False, None

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.standby = self
        self.leases: set[str | None] = set()
        self.slots: list[SlotRequest] = []
        self.answers: list[Result] = []
        self.drains_ended = 0
        self.epochs: list[str | None] = []

    def continue_epoch(self, epoch: str | None) -> None:
        self.epochs.append(epoch)

    def set_wanted(self, epoch: str, wanted: bool) -> None:
        self.leases.add(epoch if wanted else None)

    def queue_command(self, command: Command) -> None:
        self.sent.append(command)

    def take_results(self) -> list[Result]:
        found, self.answers = self.answers, []
        return found

    def did(self) -> None:
        """Succeed with what was sent last."""
        done = self.sent[-1].operation_id
        self.answers.append(Result(operation_id=done, outcome=Outcome.SUCCEEDED))

    def take_stored_restarts(self) -> None:
        return None

    def set_slot_request(self, request: SlotRequest) -> None:
        self.slots.append(request)

    def store_restarts(self, known: ReplicaRestarts) -> None:
        pass

    def resume_after_drains(self, epoch: str) -> None:
        self.drains_ended += 1

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


def supervisor(folder: Path, mode: Mode = Mode.RECOVER) -> tuple[Supervisor, Hands, Metrics]:
    file = folder / "supervisor.json"
    config = SupervisorConfig(
        service=ServiceRef(name="s"),
        engine=EngineEndpoint(
            type=EngineType.PLIMSOLL, admin_url="http://x", serving_url="http://x"
        ),
        memory=MemoryPolicy(),
        supervision=Supervision(mode=mode),
    )
    file.write_bytes(supervisor_config.encode_config(config))
    engine, hands, metrics = Stalled(), Hands(), Metrics()

    def actuator(frontend: Callable[[], ProcessId | None]) -> Hands:
        return hands

    made = Supervisor(
        ConfigFile(file), cast(Sampler, engine), lambda config: cast(Detector, engine),
        actuator,  # type: ignore[arg-type]
        None, metrics, folder, "pod-0",
    )  # fmt: skip
    return made, hands, metrics


def read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )


def test_nothing_is_sent_until_the_volume_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = journal._open_connection
    monkeypatch.setattr("plimsoll_sidecar.record.journal_manager.WRITE_RETRY_INTERVAL_S", 0.0)
    connect(tmp_path / JOURNAL_FILE).close()
    # What a read-only mount gives, also to a process that may do everything.
    monkeypatch.setattr(journal, "_open_connection", read_only)
    watching, hands, metrics = supervisor(tmp_path)
    for second in range(60):
        watching.tick(1_000.0 + second)
    assert hands.sent == []
    assert hands.leases == {None}, "no restart can come"
    assert b"plimsoll_supervisor_journal_writable 0.0" in metrics.render()
    assert b"plimsoll_supervisor_samples_total 60.0" in metrics.render()
    assert (
        b"readonly database; free space on its volume or make it writable" in watching.display.state
    )

    monkeypatch.setattr(journal, "_open_connection", connect)
    for second in range(20):
        watching.tick(1_100.0 + second)
    assert [command.verb for command in hands.sent] == ["diagnose"]
    assert b"plimsoll_supervisor_journal_writable 1.0" in metrics.render()


def until_restarting(watching: Supervisor, hands: Hands) -> float:
    """Until the restart of the worker is sent; return the time of that tick."""
    now, pending = 1_000.0, None
    while pending is None or pending.verb is not Verb.RESTART_WORKER:
        watching.tick(now := now + 1.0)
        pending = watching._governor.state.pending
        if pending is not None and pending.verb in (Verb.DIAGNOSE, Verb.TAKE_SLOT):
            hands.did()
    return now


def test_what_was_begun_is_finished_also_where_the_mode_is_observe_by_now(tmp_path: Path) -> None:
    """It would leave a drained engine behind: a supervisor that ended cannot know how far it got.

    Nothing new begins.
    """
    watching, hands, _ = supervisor(tmp_path)
    now = until_restarting(watching, hands)
    begun = hands.sent[-1]
    later, hands, _ = supervisor(tmp_path, Mode.OBSERVE)
    later.run(lambda seconds: True)
    assert hands.sent == [begun], "the same operation, which the engine carries out once"
    later, hands, _ = supervisor(tmp_path, Mode.OBSERVE)
    hands.sent.append(begun)
    hands.did()
    for second in range(300):
        later.tick(now + second)
    assert hands.sent == [begun]


def test_the_epoch_in_the_journal_goes_on(tmp_path: Path) -> None:
    """Otherwise, an open incident would take the next supervisor for a restart of the engine."""
    watching, hands, _ = supervisor(tmp_path)
    until_restarting(watching, hands)
    assert hands.epochs == [None]
    later, hands, _ = supervisor(tmp_path)
    assert hands.epochs == [later._governor.state.epoch] != [None]


def test_the_slot_goes_to_others_when_the_volume_fails_as_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, hands, _ = supervisor(tmp_path)
    now = until_restarting(watching, hands)
    assert hands.slots[-1].incident is not None
    hands.did()
    broken = journal.JournalError("read-only")

    def write(*_: object) -> None:
        raise broken

    monkeypatch.setattr(journal.Journal, "write", write)
    watching._governor.state.incidents.clear()
    sent = len(hands.sent)
    for _ in range(3):
        watching.tick(now := now + 1.0)
    assert hands.slots[-1] == SlotRequest(None)
    assert len(hands.sent) == sent, "nothing is done to the engine"


def test_no_drain_is_ended_while_a_command_is_under_way(tmp_path: Path) -> None:
    watching, hands, _ = supervisor(tmp_path)
    now = 1_000.0
    while watching._governor.state.pending is None:
        before = hands.drains_ended
        watching.tick(now := now + 1.0)
    assert before > 0
    watching.tick(now + 1.0)
    assert hands.drains_ended == before


def test_a_volume_that_fails_ends_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, _, metrics = supervisor(tmp_path)
    stat = os.stat

    def failing(path: str | Path, *arguments: Any, **options: Any) -> os.stat_result:
        if Path(path).parent == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", failing)
    for second in range(30):
        watching.tick(1_000.0 + second)
    assert b"plimsoll_supervisor_samples_total 30.0" in metrics.render()
    later, _, metrics = supervisor(tmp_path)
    for second in range(30):
        later.tick(1_100.0 + second)
    assert b"plimsoll_supervisor_samples_total 30.0" in metrics.render()
