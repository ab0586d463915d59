"""kill -9 of the supervisor at every write of its journal: one restart, one complete incident."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from plimsoll_api import supervisor_config
from plimsoll_api.admin import EngineState
from plimsoll_api.engines import EngineType
from plimsoll_api.incident_record import Reason, StepOutcome
from plimsoll_api.incidents import IncidentPhase
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_api.supervisor_config import EngineEndpoint, ServiceRef, SupervisorConfig
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.adapters.plimsoll_engine import PlimsollEngine
from plimsoll_sidecar.config import ConfigFile
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.journal import Journal
from tests.ports import free_port

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
FEWEST_WRITES = 8
"""Of a run that cures its leak: one for each step of the incident."""
SIDE_BY_SIDE = 3
"""Most of an incident is waiting."""
"""``supervise_standin.py`` imports from the tests."""


class Rig:
    """A stand-in engine and the folders of its supervisor."""

    def __init__(self, folder: Path, *faults: str) -> None:
        self.folder, self.faults = folder, faults
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        self.config, self.log = folder / "supervisor.json", folder / "restarts.log"
        self.port = free_port()
        for directory in (self.run_dir, self.state_dir):
            directory.mkdir(parents=True)
        (self.run_dir / "admin-token").write_text("test-token")
        self.configure(Mode.RECOVER)

    def configure(self, mode: Mode) -> None:
        config = SupervisorConfig(
            service=ServiceRef(name="standin"),
            engine=EngineEndpoint(
                type=EngineType.PLIMSOLL,
                admin_url=f"http://127.0.0.1:{self.port}",
                serving_url="http://127.0.0.1:1",
            ),
            memory=MemoryPolicy(warmup_s=0.0),
            supervision=Supervision(mode=mode),
            sample_interval_s=0.02,
        )
        self.config.write_bytes(supervisor_config.encode_config(config))

    @contextmanager
    def engine(self) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, str(HERE / "standin_engine.py"), "--port", str(self.port)]
        command += ["--token-file", str(self.run_dir / "admin-token"), "--log", str(self.log)]
        process = subprocess.Popen([*command, *self.faults], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "serving\n"
            yield process
        finally:
            process.kill()
            process.wait(10)
            process.stdout.close()

    def supervise(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run until the incident has ended."""
        command = self._supervisor(*arguments)
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT
        )

    @contextmanager
    def supervisor(self) -> Iterator[None]:
        """Run for as long as the block does."""
        with (self.folder / "supervisor.log").open("wb") as log:
            process = subprocess.Popen(
                self._supervisor("--limit", "90"), stderr=log, env=ENVIRONMENT
            )
            try:
                yield
            finally:
                process.kill()
                process.wait(10)

    def _supervisor(self, *arguments: str) -> list[str]:
        command = [sys.executable, str(HERE / "supervise_standin.py")]
        command += ["--config", str(self.config), "--run-dir", str(self.run_dir)]
        return [*command, "--state-dir", str(self.state_dir), *arguments]

    @property
    def restarts(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def incidents(self) -> list[Incident]:
        journal = Journal(self.state_dir / "journal.sqlite")
        try:
            return journal.read_recent(10)
        finally:
            journal.close()


def assert_cured(rig: Rig) -> None:
    (incident,) = rig.incidents
    assert (incident.phase, incident.reason) == (IncidentPhase.RESOLVED, Reason.WORKER_RESTART)
    assert len(rig.restarts) == 1, rig.restarts
    assert all(step.outcome is not StepOutcome.BEGUN for step in incident.timeline)
    steps = [step.step for step in incident.timeline]
    assert steps == ["Trim", "Diagnostics", "TakeSlot", "WorkerRestart"]
    assert incident.returned_bytes is not None
    assert incident.returned_bytes > 8 << 20
    stacks = next(name for name in incident.diagnostics if name.endswith("/stacks.txt"))
    assert (rig.state_dir / stacks).read_text().startswith("/diagnostics/stacks")


def killed_at_a_write(rig: Rig, option: str, number: int) -> None:
    """A supervisor is killed at that write, and the next one goes on."""
    with rig.engine():
        killed = rig.supervise(option, str(number))
        # An answer that comes within the same turn as the next step shares its write, so that
        # a run can end with fewer writes than the calm one did.
        if number > FEWEST_WRITES and killed.returncode == 0:
            assert int(killed.stdout.split()[0]) < number, killed.stderr
        else:
            assert killed.returncode == -9, (number, killed.stderr)
            again = rig.supervise()
            assert again.returncode == 0, (number, again.stderr)
    assert_cured(rig)


@pytest.mark.parametrize(
    "option", ["--kill-at", pytest.param("--kill-before", marks=pytest.mark.long)]
)
def test_a_supervisor_killed_at_any_write_restarts_the_engine_once(
    tmp_path: Path, option: str
) -> None:
    calm = Rig(tmp_path / "calm", "--leak")
    with calm.engine():
        done = calm.supervise()
    assert done.returncode == 0, done.stderr
    assert_cured(calm)
    writes = int(done.stdout.split()[0])
    assert writes >= FEWEST_WRITES
    rigs = [Rig(tmp_path / str(number), "--leak") for number in range(1, writes + 1)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        tried = [
            threads.submit(killed_at_a_write, rig, option, number)
            for number, rig in enumerate(rigs, start=1)
        ]
        for one in tried:
            one.result()


def test_a_standby_is_leased_from_the_suspicion_to_the_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "rig", "--leak")
    with rig.engine():
        done = rig.supervise()
    assert done.returncode == 0, done.stderr
    assert_cured(rig)
    first, *later = rig.log.with_name(rig.log.name + ".standby").read_text().splitlines()
    lease_s, epoch, operations = first.split()
    assert (lease_s, operations) == ("60", "0"), "before anything is done to the engine"
    assert epoch == rig.restarts[0].split()[1]
    assert all(line.startswith(f"60 {epoch} ") for line in later), "and not given back before it"


@pytest.mark.parametrize("step", [5 * 3600.0, -5 * 3600.0])
@pytest.mark.parametrize("write", [2, 5, pytest.param(7, marks=pytest.mark.long)])
def test_a_clock_that_is_set_in_the_middle_changes_nothing(
    tmp_path: Path, write: int, step: float
) -> None:
    rig = Rig(tmp_path / "rig", "--leak")
    with rig.engine():
        done = rig.supervise("--step-at", str(write), "--step", str(step))
    assert done.returncode == 0, done.stderr
    assert_cured(rig)
    incident = rig.incidents[0]
    assert incident.ended_at is not None
    assert 0 < incident.ended_at - incident.opened_at < 30, "the times of one clock"


@pytest.mark.parametrize("step", [5 * 3600.0, -5 * 3600.0])
def test_a_clock_that_is_set_while_the_supervisor_is_away_changes_nothing(
    tmp_path: Path, step: float
) -> None:
    rig = Rig(tmp_path / "rig", "--leak")
    with rig.engine():
        assert rig.supervise("--kill-at", "5").returncode == -9
        done = rig.supervise("--wall", str(step))
    assert done.returncode == 0, done.stderr
    assert_cured(rig)
    incident = rig.incidents[0]
    assert incident.ended_at is not None
    assert 0 < incident.ended_at - incident.opened_at < 60, "the times of one clock"


def test_with_a_full_volume_it_observes_on_and_does_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "rig", "--leak")
    with rig.engine():
        done = rig.supervise("--file-limit", "40960", "--limit", "5")
        assert done.returncode == 1
        assert "free space on its volume" in done.stderr
        assert rig.restarts == []
        again = rig.supervise()
        assert again.returncode == 0, again.stderr
    assert len(rig.restarts) == 1
    assert rig.incidents[0].reason is Reason.WORKER_RESTART


@pytest.mark.parametrize("mode", list(Mode))
def test_a_hang_saves_stacks_and_restarts_only_in_recover(tmp_path: Path, mode: Mode) -> None:
    rig = Rig(tmp_path / "rig", "--hang")
    rig.configure(mode)
    with rig.engine():
        done = rig.supervise()
    assert done.returncode == 0, done.stderr
    (incident,) = rig.incidents
    if mode is Mode.OBSERVE:
        assert incident.phase is IncidentPhase.SUPPRESSED
        assert rig.restarts == []
    else:
        assert incident.reason is Reason.WORKER_RESTART
        assert incident.timeline[0].step == "Diagnostics"
        assert len(rig.restarts) == 1


def test_a_frontend_that_hears_nothing_is_ended_by_a_signal(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "rig", "--unresponsive-after", "5")
    with rig.engine() as engine, rig.supervisor():
        assert engine.wait(75) == -15
        # Nobody starts this engine again, so that the incident does not end.
        deadline = time.monotonic() + 15
        while (incident := rig.incidents[0]).phase is not IncidentPhase.VERIFYING:
            assert time.monotonic() < deadline, (rig.folder / "supervisor.log").read_text()
            time.sleep(0.1)
    assert incident.timeline[-1].step == Action.ENGINE_RESTART.value
    assert incident.timeline[-1].outcome is StepOutcome.SUCCEEDED


def test_an_engine_serves_again_when_its_drain_by_hand_expires(tmp_path: Path) -> None:
    """Also where the supervisor that saw the drain begin has ended meanwhile."""
    rig = Rig(tmp_path)
    rig.configure(Mode.OBSERVE)
    state_dir = str(rig.state_dir)
    with rig.engine():
        endpoint = ConfigFile(rig.config).current.engine
        engine = PlimsollEngine(endpoint, rig.run_dir / "admin-token")
        epoch = engine.status().epoch
        readiness.set_unready(state_dir, readiness.MANUAL, 3.0)
        drain = Command(verb=Verb.DRAIN, operation_id="person-1", incident="person", epoch=epoch)
        assert engine.drain(drain).outcome is Outcome.SUCCEEDED
        with rig.supervisor():
            deadline = time.monotonic() + 30
            while readiness.MANUAL in readiness.read_active_reasons(state_dir):
                assert engine.status().state is EngineState.DRAINED
                time.sleep(0.1)
            while readiness.list_ended_drains(state_dir):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert engine.status().state is EngineState.SERVING
        assert engine.status().epoch == epoch
