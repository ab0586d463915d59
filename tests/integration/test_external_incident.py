"""A leak beside an external engine, from its first bytes to the new process that does not leak."""

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.incident_record import Reason
from plimsoll_api.incidents import IncidentKind, IncidentPhase
from plimsoll_api.memory_policy import AutoBudgets, MemoryBudget, MemoryPolicy, parse_growth_budget
from plimsoll_api.supervision import Action, Drain, Mode, Supervision
from plimsoll_api.supervisor_config import (
    CONTAINER_ENV,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
)
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.journal import Journal
from plimsoll_sidecar.record.storage import read_learned_budgets
from tests.ports import free_port

HERE = Path(__file__).parent
LIMIT_S = 90.0
RELIST_S = 1.0
"""Between the kubelet's looks for containers that ended. Until then such a one counts as ready."""


MEMORY = MemoryPolicy(host=MemoryBudget(growth_bytes=64 << 20, window_s=3600.0), warmup_s=1.0)


class Pod:
    """An engine that is started again whenever it ends, as the kubelet does, and its supervisor.
    ``environment`` is added to that of both, and ``arguments`` are the engine's."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str] | None = None,
        mode: Mode = Mode.RECOVER,
        arguments: tuple[str, ...] = ("--leak-mib-s=8",),
        memory: MemoryPolicy = MEMORY,
    ) -> None:
        self.folder, self.log = folder, folder / "log"
        self._environment = os.environ | {"POD_NAME": "external-0"} | (environment or {})
        # Without a name, what other tests left in a container is taken for the engine.
        self.container = f"engine-{secrets.token_hex(4)}"
        self.state_dir, self.sick = folder / "state", folder / "sick"
        self.state_dir.mkdir()
        self.sick.touch()
        self._mode, self._arguments, self._memory = mode, arguments, memory
        self.ports = [free_port() for _ in range(2)]
        self.ready_at_start: list[bool] = []
        self._ending = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._kubelet = threading.Thread(target=self._keep, daemon=True)

    def start(self) -> None:
        self._kubelet.start()
        url = f"http://127.0.0.1:{self.ports[0]}"
        config = SupervisorConfig(
            service=ServiceRef(name="external"),
            engine=EngineEndpoint(EngineType.VLLM, url, url, container=self.container),
            memory=self._memory,
            supervision=Supervision(mode=self._mode, drain=Drain(deadline_s=5.0)),
            sample_interval_s=0.25,
        )
        path = self.folder / "supervisor.json"
        path.write_bytes(supervisor_config.encode_config(config))
        command = [sys.executable, str(HERE / "supervise_external.py"), f"--config={path}"]
        command += [f"--run-dir={self.folder}", f"--state-dir={self.state_dir}"]
        command += [f"--metrics-port={self.ports[1]}", "--host=127.0.0.1"]
        with (self.folder / "supervisor.log").open("wb") as log:
            self.supervisor = subprocess.Popen(command, env=self._environment, stderr=log)
        self._processes.append(self.supervisor)

    def _keep(self) -> None:
        command = [sys.executable, str(HERE / "standin_external.py"), "--kind=vllm"]
        command += [f"--port={self.ports[0]}", f"--log={self.log}", *self._arguments]
        command += [
            f"--sick={self.sick}",
            f"--gate={self.state_dir / readiness.REASONS_FOLDER / readiness.RESTART}",
        ]
        environment = self._environment | {CONTAINER_ENV: self.container}
        while not self._ending.is_set():
            self.ready_at_start.append(readiness.is_ready(str(self.state_dir)))
            engine = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
            self._processes.append(engine)
            while engine.poll() is None and not self._ending.wait(0.1):
                pass
            self._ending.wait(RELIST_S)

    def end(self) -> None:
        self._ending.set()
        self._kubelet.join(10)
        for process in self._processes:
            process.kill()
            process.wait(10)

    def recent(self) -> list[Incident]:
        if not (self.state_dir / "journal.sqlite").exists():
            return []
        journal = Journal(self.state_dir / "journal.sqlite")
        try:
            return journal.read_recent(10)
        finally:
            journal.close()

    def ended(self) -> Incident | None:
        return next((one for one in self.recent() if one.ended), None)

    def ended_incident(self) -> tuple[Incident, str]:
        """The first incident that ends, within the limit, and the supervisor's log."""
        deadline = time.monotonic() + LIMIT_S
        while (incident := self.ended()) is None and time.monotonic() < deadline:
            time.sleep(0.5)
        log = (self.folder / "supervisor.log").read_text()
        assert incident is not None, log
        return incident, log


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    one = Pod(tmp_path)
    yield one
    one.end()


def test_a_leaking_engine_is_drained_ended_and_found_well(pod: Pod) -> None:
    pod.start()
    incident, told = pod.ended_incident()
    assert (incident.phase, incident.reason) == (IncidentPhase.RESOLVED, Reason.ENGINE_RESTART), (
        told
    )
    steps = {step.step: step.message for step in incident.timeline}
    assert "Drain" in steps
    assert steps[Action.TRIM.value] == "the engine does not support this action"
    assert steps[Action.ENGINE_RESTART.value].endswith("after SIGTERM")
    assert incident.returned_bytes is not None
    assert incident.returned_bytes > 48 << 20
    assert [line.split(" ", 1)[1] for line in pod.log.read_text().splitlines()] == [
        "SIGTERM unready"
    ], "one restart, and no new connection could come before it"
    assert pod.ready_at_start == [True, False], "no connection came while no engine ran"
    deadline = time.monotonic() + LIMIT_S
    while not readiness.is_ready(str(pod.state_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert readiness.is_ready(str(pod.state_dir))


def test_a_leak_is_found_beside_pages_of_several_registries(tmp_path: Path) -> None:
    """Each second page was a crash: the restart budget went, and the leak was never found."""
    one = Pod(tmp_path, arguments=("--leak-mib-s=8", "--registries=2"))
    try:
        one.start()
        incident, told = one.ended_incident()
    finally:
        one.end()
    assert (incident.kind, incident.reason) == (IncidentKind.HOST_GROWTH, Reason.ENGINE_RESTART)
    assert told.count("signal metrics: MetricsInconsistent") <= 2, "once in an engine's life"
    assert "EngineCrash" not in told


def test_a_budget_that_sets_itself_reports_first_and_acts_once_it_has_learned(
    tmp_path: Path,
) -> None:
    host = replace(parse_growth_budget("Auto", 3600.0), limit_bytes=1 << 30)
    memory = MemoryPolicy(host=host, warmup_s=1.0, auto=AutoBudgets(learning_s=40.0))
    one = Pod(tmp_path, memory=memory)
    try:
        one.start()
        reported, told = one.ended_incident()
        assert (reported.phase, reported.reason) == (IncidentPhase.SUPPRESSED, Reason.OBSERVED)
        assert not one.log.exists() or "SIGTERM" not in one.log.read_text()
        deadline = time.monotonic() + LIMIT_S
        while len(one.recent()) < 2 or not one.recent()[0].ended:
            assert time.monotonic() < deadline, (told, one.recent())
            time.sleep(0.5)
        assert one.recent()[0].reason is Reason.ENGINE_RESTART
        one.supervisor.terminate()
        assert one.supervisor.wait(20) == 0
    finally:
        one.end()
    learned = read_learned_budgets(one.state_dir / "journal.sqlite").host
    assert learned.budget == 128 << 20, "an eighth of the limit: no hour was healthy"
    assert learned.observed_s >= 40.0
    assert any(hour.incident for hour in learned.hours)
