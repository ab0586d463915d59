"""A real engine that is started again whenever it ends, as the kubelet does, the supervisor beside
it as it is, and clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import urllib3

from plimsoll_api import supervisor_config
from plimsoll_api.admin import EngineState, Role, Status
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.supervision import Drain, Mode, RestartBudget, Supervision
from plimsoll_api.supervisor_config import (
    CONTAINER_ENV,
    PROBE_DIR_ENV,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
)
from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.journal import Journal
from plimsoll_sidecar.signals.process_table import (
    ProcessId,
    find_descendants,
    identify,
    read_command_line,
    read_environment_variable,
    read_parent_pids,
)
from tests.conformance.peers import CHECKPOINT, Peer
from tests.ports import free_port

START_S = float(os.environ.get("PLIMSOLL_ENGINES_START_S", "600"))
"""Longest start of an engine; a busy machine takes minutes for what takes 50 s on an idle one."""
ANSWER_S = 60.0
MIB = 1 << 20
MEMORY = MemoryPolicy(host=MemoryBudget(256 * MIB, 3600.0), warmup_s=60.0)


class Rig:
    """``folder`` takes logs, journal and the plugin's files; :meth:`end` leaves no process.

    ``probe`` is the folder that :mod:`plimsoll_probe.install` filled, where the engine is to have
    one; ``arguments`` and ``more`` are the engine's further arguments and environment.
    """

    def __init__(
        self,
        peer: Peer,
        folder: Path,
        memory: MemoryPolicy = MEMORY,
        probe: Path | None = None,
        arguments: tuple[str, ...] = (),
        more: dict[str, str] | None = None,
    ) -> None:
        self.peer, self.folder = peer, folder
        self.memory, self.probe = memory, probe
        self.arguments, self.more = arguments, more or {}
        self.port, self.metrics_port = free_port(), free_port()
        self.container = f"conformance-{self.port}"
        url = f"http://127.0.0.1:{self.port}"
        self.url = url
        self.endpoint = EngineEndpoint(peer.type, url, url, container=self.container)
        self.adapter = ExternalEngine(self.endpoint)
        self.answers: Counter[str] = Counter()
        self._ending, self._loaded = threading.Event(), threading.Event()
        self._engine: subprocess.Popen[bytes] | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self._known: set[ProcessId] = set()

    # ---- processes

    def start(self, asks: bool = True) -> None:
        """Engine and supervisor, which asks the probe if ``asks``; returns at once."""
        self.start_engine()
        self.start_supervisor(asks=asks)

    def start_engine(self) -> None:
        """The engine alone; returns at once."""
        if self.probe is not None:
            (self.folder / "probe").mkdir(exist_ok=True)
        self._thread(self._keep)

    def start_supervisor(self, mode: Mode = Mode.RECOVER, asks: bool = True) -> None:
        """The supervisor that :meth:`end` ends; returns at once."""
        self._supervisor = self.supervise(mode=mode, asks=asks)

    def supervise(
        self, state: str = "state", mode: Mode = Mode.RECOVER, asks: bool = True
    ) -> subprocess.Popen[bytes]:
        """A supervisor with the folder ``state`` below ours; it asks the probe if ``asks``. Whoever
        starts one ends it."""
        path = self.folder / f"{state}.json"
        path.write_bytes(supervisor_config.encode_config(self._config(mode)))
        port = self.metrics_port if state == "state" else free_port()
        command = [sys.executable, "-m", "plimsoll_sidecar.main", f"--config={path}"]
        command += [f"--run-dir={self.folder}", f"--state-dir={self.folder / state}"]
        command += [f"--metrics-port={port}", "--host=127.0.0.1"]
        # As in a pod: leaving the service's endpoints takes time.
        environment = os.environ | {"POD_NAME": self.container}
        if self.probe is not None and asks:
            environment[PROBE_DIR_ENV] = str(self.folder / "probe")
        with (self.folder / "supervisor.log").open("ab") as log:
            return subprocess.Popen(command, stderr=log, env=environment)

    def _config(self, mode: Mode) -> SupervisorConfig:
        return SupervisorConfig(
            service=ServiceRef(name="conformance"),
            engine=self.endpoint,
            memory=self.memory,
            supervision=Supervision(
                mode=mode,
                drain=Drain(deadline_s=10.0),
                restart_budget=RestartBudget(count=100),
            ),
        )

    def _keep(self) -> None:
        more = {"PLIMSOLL_CONFORMANCE_DIR": str(self.folder), CONTAINER_ENV: self.container}
        python = self.peer.home / "bin"
        environment = os.environ | self.peer.environment | more | self.more
        environment["PATH"] = f"{python}:{environment['PATH']}"
        # Ours is not the engine's: it has packages of its own.
        environment.pop("PYTHONPATH", None)
        if self.probe is not None:
            environment["PYTHONPATH"] = str(self.probe)
            environment[PROBE_DIR_ENV] = str(self.folder / "probe")
        command = [str(self.peer.home / self.peer.command[0]), *self.peer.command[1:]]
        command += self.arguments
        while not self._ending.is_set():
            with (self.folder / "engine.log").open("ab") as log:
                self._engine = subprocess.Popen(
                    [*command, f"--port={self.port}"],
                    env=environment, stdout=log, stderr=log, cwd=CHECKPOINT.parent,
                )  # fmt: skip
            while self._engine.poll() is None and not self._ending.wait(0.2):
                pass

    def _thread(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def end(self) -> None:
        self._ending.set()
        if self._supervisor is not None:
            self._supervisor.terminate()
            self._supervisor.wait(30)
        for thread in self._threads:
            thread.join(ANSWER_S)
        for pid in self.processes():
            os.kill(pid, 9)
        if self._engine is not None:
            self._engine.wait(30)

    # ---- what is seen

    def processes(self) -> set[int]:
        """Every living process of the engine, whoever is its parent now.

        vLLM's helpers write their titles over their environment: they are known as descendants,
        for as long as they live.
        """
        tree = read_parent_pids()
        marked = {
            pid for pid in tree if read_environment_variable(pid, CONTAINER_ENV) == self.container
        }
        alive = {p.pid for p in self._known if identify(p.pid) == p}
        found = marked | alive
        found |= find_descendants(found, tree)
        self._known = {p for pid in found if (p := identify(pid)) is not None}
        return {process.pid for process in self._known}

    def part(self, role: str) -> ProcessId:
        """The process of ``role``: ``frontend`` or one of the engine's own."""
        if role == "frontend":
            pid = next(p.pid for p in self.status().processes if p.role is Role.FRONTEND)
        else:
            title = self.peer.parts[role]
            found = [
                p
                for p in self.processes()
                if read_command_line(p)[:1] and title in read_command_line(p)[0]
            ]
            (pid,) = found
        known = identify(pid)
        assert known is not None
        return known

    def status(self) -> Status:
        return self.adapter.status()

    def serving(self) -> bool:
        try:
            return self.status().state is EngineState.SERVING
        except EngineError:
            return False

    def incidents(self) -> list[Incident]:
        """Newest first."""
        path = self.folder / "state" / "journal.sqlite"
        if not path.exists():
            return []
        journal = Journal(path)
        try:
            return journal.read_recent(50)
        finally:
            journal.close()

    def log(self, name: str = "supervisor") -> str:
        """The end of it; empty where nothing was written yet."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    # ---- clients

    def ask(self, tokens: int = 16, **more: object) -> int:
        """The HTTP status of one completion; 0 where the connection broke."""
        body = {"model": "tiny", "prompt": "the water line", "max_tokens": tokens, **more}
        with urllib3.PoolManager(retries=False) as http:
            try:
                answer = http.request(
                    "POST", f"{self.url}/v1/completions", timeout=ANSWER_S,
                    body=json.dumps(body | {"ignore_eos": True}),
                    headers={"Content-Type": "application/json"},
                )  # fmt: skip
            except urllib3.exceptions.HTTPError:
                return 0
            return answer.status

    def load(self, clients: int = 3, tokens: int = 16) -> None:
        """Clients that ask again and again, until :meth:`rest`."""
        if self._loaded.is_set():
            return
        self._loaded.set()
        for _ in range(clients):
            self._thread(lambda: self._client(tokens))

    def rest(self) -> None:
        self._loaded.clear()

    def _client(self, tokens: int) -> None:
        while self._loaded.is_set() and not self._ending.is_set():
            status = self.ask(tokens)
            self.answers[str(status)] += 1
            self._ending.wait(0.2 if status == 200 else 1.0)


def until(seen: Callable[[], object], limit_s: float, what: str) -> float:
    """Seconds until ``seen`` was true; fails after ``limit_s``."""
    begin = time.monotonic()
    while not seen():
        assert time.monotonic() - begin < limit_s, f"{what} within {limit_s:.0f} s"
        time.sleep(0.25)
    return time.monotonic() - begin
