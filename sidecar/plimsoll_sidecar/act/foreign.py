"""The adapter for engines that do not speak our protocol: vLLM, SGLang and any HTTP server.

It makes a :class:`~plimsoll_api.admin.Status` from what can be seen: the process that serves the
port, whether it answers, and its metrics. The epoch is that process: start time and PID, and how
often its counters began anew. What the server can do is asked once an epoch, with OPTIONS: a route
for another method answers 405, an unknown one 404, and nothing is done by asking.
"""

from __future__ import annotations

import threading
import time
from urllib.parse import urlsplit

from plimsoll_api.admin import (
    Capability,
    DeviceMemory,
    Diagnostic,
    DrainMode,
    EngineState,
    Load,
    ProcessMemory,
    Role,
    Status,
)
from plimsoll_api.supervision import EngineEndpoint
from plimsoll_sidecar.act import process
from plimsoll_sidecar.act.adapter import EngineError
from plimsoll_sidecar.act.dialect import DIALECTS
from plimsoll_sidecar.act.foreign_load import ForeignLoad
from plimsoll_sidecar.act.http import Server
from plimsoll_sidecar.act.process import ProcessId
from plimsoll_sidecar.govern.command import Command, Outcome, Result
from plimsoll_sidecar.signals.listener import ESTABLISHED, engine_pid, environment, sockets

ANSWER_S = 3.0
TRIM_S = 30.0
POLL_S = 0.5
EXIT_GRACE_S = 30.0
"""Beyond the drain's deadline, which a server's own shutdown timeout may use up once more."""
QUIET_POLLS = 2
"""Looks in a row without work before an engine counts as idle."""


class ForeignEngine:
    """Safe to use from several threads: what is remembered of the engine is behind a lock."""

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self._endpoint, self._dialect = endpoint, DIALECTS[endpoint.type]
        self._port = urlsplit(endpoint.serving_url).port or 80
        self._server = Server(endpoint.serving_url)
        self._load = ForeignLoad(self._server, self._dialect)
        self._lock = threading.Lock()
        self._process: ProcessId | None = None
        self._served = self._drained = False
        self._routes: frozenset[str] | None = None
        self._devices: list[DeviceMemory] = []

    # ---- status

    def status(self) -> Status:
        with self._lock:
            found = self._find()
            state = self._state()
            if state is EngineState.SERVING and self._routes is None:
                self._routes = self._discover()
            newest = self._load.newest() if self._served else None
            return Status(
                state=EngineState.DRAINED if self._drained else state,
                epoch=self._epoch(found),
                version=self._endpoint.version,
                model=self._endpoint.model,
                uptime_s=process.age_s(found),
                load=newest[0] if newest else Load(),
                report_age_s=newest[1] if newest else None,
                processes=[ProcessMemory(role=Role.FRONTEND, pid=found.pid)],
                devices=self._devices,
                capabilities=self._capabilities(),
            )

    def serves(self) -> bool:
        return self._server.answers(self._dialect.alive, ANSWER_S)

    def _find(self) -> ProcessId:
        """The engine's process: the one that is known while it lives, else who serves now."""
        known = self._process
        if known is not None and process.identify(known.pid) == known:
            return known
        pid = engine_pid(self._port, self._dialect.words)
        found = process.identify(pid) if pid is not None else None
        if found is None:
            raise EngineError(f"no process of this pod is known to serve port {self._port}")
        self._process, self._served, self._drained = found, False, False
        self._routes, self._devices = None, _devices(found.pid)
        self._load.forget()
        return found

    def _epoch(self, found: ProcessId) -> str:
        return f"{found.started:x}-{found.pid}:{self._load.restarts + 1}"

    def _state(self) -> EngineState:
        """Any answer says that the frontend lives; a server error that the engine behind does not.
        Raises EngineError where nothing answers."""
        status, _ = self._server.call("GET", self._dialect.alive, ANSWER_S)
        if status < 500:
            self._served = True
            return EngineState.SERVING
        return EngineState.FAILED if self._served else EngineState.STARTING

    def _discover(self) -> frozenset[str]:
        paths = [*self._dialect.trims, self._dialect.pause, self._dialect.resume]
        return frozenset(path for path in paths if path and self._has(path.partition("?")[0]))

    def _has(self, path: str) -> bool:
        try:
            return self._server.call("OPTIONS", path, ANSWER_S)[0] == 405
        except EngineError:
            return False

    def _capabilities(self) -> list[Capability]:
        found = [Capability.DRAIN, Capability.RESTART_ENGINE]
        if self._routes and any(path in self._routes for path in self._dialect.trims):
            found.insert(0, Capability.TRIM)
        return found

    def diagnostics(self, kind: Diagnostic) -> bytes:
        raise EngineError(f"a {self._endpoint.type.value} engine has no diagnostic {kind.value}")

    # ---- verbs

    def trim(self, command: Command) -> Result:
        """Empties the caches that the server can empty; running requests are left alone."""
        reason = self._fence(command)
        if reason is not None:
            return _answer(command, Outcome.REFUSED, reason)
        emptied: list[str] = []
        failed: list[str] = []
        for path in self._dialect.trims:
            if path in (self._routes or ()):
                trouble = self._post(path, None)
                (failed if trouble else emptied).append(trouble or path)
        outcome = Outcome.SUCCEEDED if emptied else Outcome.FAILED
        return _answer(command, outcome, "; ".join(emptied + failed) or "nothing can be emptied")

    def drain(self, command: Command) -> Result:
        """Waits for running requests, then pauses the engine where it can be paused.

        Without metrics a request shows as a connection. What runs beyond the deadline ends with
        the engine.
        """
        reason = self._fence(command)
        if reason is not None:
            return _answer(command, Outcome.REFUSED, reason)
        limit_s = 0.0 if command.mode is DrainMode.ABORT else command.deadline_s
        deadline, quiet = time.monotonic() + limit_s, 0
        while quiet < QUIET_POLLS and time.monotonic() < deadline:
            quiet = quiet + 1 if self._work() == 0 else 0
            time.sleep(POLL_S)
        left = self._work() if quiet < QUIET_POLLS else 0
        told = "idle" if left == 0 else f"{'unknown' if left is None else left} requests left"
        pause = self._dialect.pause
        if pause and pause in (self._routes or ()):
            trouble = self._post(pause, self._dialect.pause_body)
            told += f"; not paused: {trouble}" if trouble else "; paused"
        with self._lock:
            self._drained = True
        return _answer(command, Outcome.SUCCEEDED, told)

    def resume(self, epoch: str) -> None:
        if self._fence_of(epoch) is not None:
            return  # a new process was never drained
        resume = self._dialect.resume
        if resume and resume in (self._routes or ()):
            trouble = self._post(resume, b"{}")
            if trouble is not None:
                raise EngineError(trouble)
        with self._lock:
            self._drained = False

    def restart_worker(self, command: Command) -> Result:
        return _answer(command, Outcome.REFUSED, "this engine has no worker of its own to restart")

    def restart_engine(self, command: Command) -> Result:
        """SIGTERM, the server's own shutdown, SIGKILL after it. The kubelet starts the next one."""
        reason = self._fence(command)
        with self._lock:
            found = self._process
        if reason is not None or found is None:
            return _answer(command, Outcome.REFUSED, reason or "no process is known")
        begin = time.monotonic()
        trouble = process.end(found, grace_s=command.deadline_s + EXIT_GRACE_S)
        if trouble is not None:
            return _answer(command, Outcome.FAILED, trouble)
        told = f"process {found.pid} ended within {time.monotonic() - begin:.1f} s of SIGTERM"
        return _answer(command, Outcome.SUCCEEDED, told)

    # ---- parts

    def _fence(self, command: Command) -> str | None:
        return self._fence_of(command.epoch)

    def _fence_of(self, epoch: str) -> str | None:
        """Why nothing may be done; None while the process is the one that was decided on."""
        with self._lock:
            try:
                now = self._epoch(self._find())
            except EngineError as error:
                return str(error)
        return None if now == epoch else f"the engine is in epoch {now}, decided on was {epoch}"

    def _work(self) -> int | None:
        """Requests under way; None where it is not known now."""
        if not self._dialect.metrics:
            return len(sockets(self._port, ESTABLISHED))
        with self._lock:
            self._load.expire()
            newest = self._load.newest()
        if newest is None:
            return len(sockets(self._port, ESTABLISHED))
        return (newest[0].running or 0) + (newest[0].waiting or 0)

    def _post(self, path: str, body: bytes | None) -> str | None:
        """None when it was done, else why not."""
        try:
            status, _ = self._server.call("POST", path, TRIM_S, body)
        except EngineError as error:
            return str(error)
        return None if status < 300 else f"POST {path}: HTTP {status}"


def _devices(pid: int) -> list[DeviceMemory]:
    """The devices that the device plugin gave the engine's container, by UUID. Their memory is
    known where this container has NVML; an engine that was given none, or all, says nothing."""
    names = (environment(pid, "NVIDIA_VISIBLE_DEVICES") or "").split(",")
    if not all(name.startswith(("GPU-", "MIG-")) for name in names):
        return []
    return [DeviceMemory(index=index, uuid=name) for index, name in enumerate(names)]


def _answer(command: Command, outcome: Outcome, message: str) -> Result:
    return Result(operation_id=command.operation_id, outcome=outcome, message=message)
