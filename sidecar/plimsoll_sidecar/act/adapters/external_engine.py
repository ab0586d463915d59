"""The adapter for engines that do not speak our protocol: vLLM, SGLang and any HTTP server.

It makes a :class:`~plimsoll_api.admin.Status` from what can be seen: the processes of the engine's
container, whether the port answers, and its metrics. The epoch is its main process: start time and
PID, and how often all processes that it started were replaced. Counters confirm that and begin no
epoch by themselves.

Known engines listen only when they are ready: until then the process is there, and starts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec

from plimsoll_api.admin import (
    Diagnostic,
    DrainMode,
    EngineState,
    Load,
    ProcessMemory,
    Status,
)
from plimsoll_api.state import Signal
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.external_load import ExternalLoad
from plimsoll_sidecar.act.adapters.external_profile import PROFILES
from plimsoll_sidecar.act.adapters.external_server import ServerInfo
from plimsoll_sidecar.act.adapters.processes import TERM_GRACE_S, OwnedEngine, held, trim_effect
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.govern.command import Command, Outcome, Result
from plimsoll_sidecar.signals import stacks
from plimsoll_sidecar.signals.engine_processes import Members, NoEngine, parts_of
from plimsoll_sidecar.signals.gpu_identity import GpuIdentity
from plimsoll_sidecar.signals.probes import Probes
from plimsoll_sidecar.signals.process_table import ProcessId, age_s, identify
from plimsoll_sidecar.signals.tcp_sockets import ESTABLISHED, LISTEN, sockets, unanswered

log = logging.getLogger(__name__)

ANSWER_S = 3.0
TRIM_S = 5.0
"""For all caches together: to empty one takes milliseconds, unless the engine hangs."""
POLL_S = 0.5
EXIT_GRACE_S = 30.0
"""Beyond the drain's deadline, which a server's own shutdown timeout may use up once more."""
QUIET_POLLS = 2
"""Looks in a row without work before an engine counts as idle."""


class ExternalEngine(OwnedEngine):
    """Safe to use from several threads: what is remembered of the engine is behind a lock.

    ``group_serves`` says whether the group of a worker serves; without it a worker always works.
    """

    def __init__(
        self,
        endpoint: EngineEndpoint,
        probes: Probes | None = None,
        group_serves: Callable[[], bool] | None = None,
    ) -> None:
        self._group_serves = group_serves
        self._probes = probes or Probes.from_environment()
        self._endpoint, self._profile = endpoint, PROFILES[endpoint.type]
        self._port = urlsplit(endpoint.serving_url).port or 80
        self._server = HttpClient(endpoint.serving_url)
        self._load = ExternalLoad(
            self._server,
            self._profile,
            waiting=lambda: unanswered(self._port),
            replaced=self._replaced,
        )
        super().__init__(endpoint)
        self._lock = threading.Lock()
        self._process: ProcessId | None = None
        self._helpers: frozenset[ProcessId] = frozenset()
        self._helpers_now: frozenset[ProcessId] = frozenset()
        self._served = self._drained = self._joined = False
        self._info = ServerInfo(endpoint, self._server, self._owned)
        self._gpus = GpuIdentity()
        self._newest: Status | None = None

    # ---- status

    def status(self) -> Status:
        """Put together what the engine's pages, its probe and ``/proc`` show.

        Raises EngineError where the main process does not run.
        """
        with self._lock:
            members = self._find()
            found = self._process
            assert found is not None
            state = self._state()
            if state is EngineState.SERVING and self._served:
                self._info.learn()
            self._helpers_now = frozenset(members.helpers)
            newest = self._load.newest() if self._served else None
            if newest is not None and self._helpers_now:
                self._helpers = self._helpers_now
            seen = Status(
                state=EngineState.DRAINED if self._drained else state,
                epoch=self._epoch(found),
                version=self._info.version,
                model=self._endpoint.model,
                uptime_s=age_s(found),
                load=newest[0] if newest else Load(),
                report_age_s=newest[1] if newest else None,
                load_age_s=newest[1] if newest else None,
                processes=self._owned.listed(members),
                devices=self._gpus.devices(found.pid, [p.pid for p in members.everyone]),
                capabilities=self._info.capabilities,
            )
            seen = self._probes.complete(seen)
            parts = parts_of(seen.processes, self._endpoint.type)
            self._newest = msgspec.structs.replace(seen, parts=parts)
            return self._newest

    def page_signal(self) -> Signal | None:
        """Return whether the newest metrics page could be used; None for an engine without one."""
        if not self._profile.metrics or not self._endpoint.serves:
            return None
        with self._lock:
            return self._load.signal

    def serves(self) -> bool:
        """Whether the profile's liveness path is answered at all."""
        return self._endpoint.serves and self._server.answers(self._profile.alive, ANSWER_S)

    def _find(self) -> Members:
        """Return the engine's processes, with a main one that serves or will.

        EngineError without.
        """
        try:
            members = self._owned.find()
        except NoEngine as none:
            raise EngineError(str(none)) from none
        found = members.main
        if found is None:
            left = ", ".join(str(p.pid) for p in members.everyone[:8])
            raise EngineError(f"the engine's main process ended, but processes {left} still run")
        if found != self._process:
            self._process = found
            self._served = self._drained = self._joined = False
            self._info.forget()
            self._gpus.forget()
            self._load.forget()
            self._helpers = frozenset()
        return members

    def _replaced(self) -> bool:
        """Return whether no process that it had started at the last page is there any more."""
        return bool(self._helpers) and self._helpers.isdisjoint(self._helpers_now)

    def _epoch(self, found: ProcessId) -> str:
        return f"{found.started:x}-{found.pid}:{self._load.restarts + 1}"

    def _state(self) -> EngineState:
        """Return the engine's state: any answer says that the frontend lives.

        A server error says that the engine behind it does not. Raises EngineError where something
        listens and does not answer, or is another engine. A worker of a multi-node engine cannot be
        asked: it starts until its group serves, and then works as long as its process lives.
        """
        if not self._endpoint.serves:
            self._joined = self._joined or self._group_serves is None or self._group_serves()
            return EngineState.SERVING if self._joined else EngineState.STARTING
        # Asked before the call: one that begins to listen in between is starting.
        listens = self._served or bool(sockets(self._port, LISTEN))
        try:
            status, _ = self._server.call("GET", self._profile.alive, ANSWER_S)
        except EngineError:
            if listens:
                raise
            return EngineState.STARTING
        if not self._served:
            self._info.verify_type()
        if status < 500:
            self._served = True
            return EngineState.SERVING
        return EngineState.FAILED if self._served else EngineState.STARTING

    def diagnostics(self, kind: Diagnostic, command: Command) -> bytes:
        """Return what the processes, their probes or py-spy say.

        Raises EngineError where none says anything.
        """
        newest = self._newest
        seen = {process.pid: process for process in newest.processes} if newest else {}
        processes = [seen.get(process.pid, process) for process in self._owned.listed()]
        text = gather(kind, command, processes, self._probes)
        if text is None:
            kind_of = self._endpoint.type.value
            raise EngineError(
                f"no process of the {kind_of} engine provides the diagnostic {kind.value}"
            )
        return text

    def stacks(self, command: Command) -> bytes | None:
        """Return stacks by the probe or py-spy, which need no answer of the engine.

        None where neither is there.
        """
        try:
            return self.diagnostics(Diagnostic.STACKS, command)
        except EngineError as none:
            log.info("%s", none)
            return None

    # ---- verbs

    def trim(self, command: Command) -> Result:
        """Empty the caches that the server can empty; running requests are left alone.

        It is judged by the memory that came back.
        """
        reason = self._fence(command)
        if reason is not None:
            return command.result(Outcome.REFUSED, reason)
        members = self._owned.known()
        pids = [process.pid for process in members.everyone] if members else []
        before = held(pids)
        asked: list[str] = []
        deadline = time.monotonic() + TRIM_S
        trouble: str | None = None
        for path in self._profile.trims:
            if trouble is None and path in self._info.routes:
                trouble = self._post(path, None, max(0.1, deadline - time.monotonic()))
                asked += [path] if trouble is None else []
        trimmed = None if trouble else self._probes.trim(idle=self._work() == 0)
        if trimmed is not None:
            asked.append(f"trim by {trimmed.processes} probe{'s' if trimmed.processes > 1 else ''}")
        if not asked and trouble is None:
            return command.result(Outcome.FAILED, "the engine has no cache that it can empty")
        devices = bool(self._newest and self._newest.devices)
        found = trim_effect(before, held(pids), trimmed.device if trimmed else None, devices)
        summary = "; ".join(
            filter(None, (f"{', '.join(asked) or 'nothing'}: {found.summary}", trouble))
        )
        failed = trouble is not None and found.outcome is not Outcome.SUCCEEDED
        return command.result(Outcome.FAILED if failed else found.outcome, summary)

    def drain(self, command: Command, stands: Callable[[], bool] = lambda: True) -> Result:
        """Wait for running requests, then pause the engine where it can be paused.

        Without metrics a request shows as a connection. What runs beyond the deadline ends with
        the engine.
        """
        reason = self._fence(command)
        if reason is not None:
            return command.result(Outcome.REFUSED, reason)
        summary = self._wait_idle(command, stands)
        pause = self._profile.pause
        if pause and pause in self._info.routes and stands():
            trouble = self._post(pause, self._profile.pause_body)
            summary += f"; not paused: {trouble}" if trouble else "; paused"
        if not stands():
            self.resume(command.epoch)  # the end of the drain may have come before the pause
            return command.result(
                Outcome.REFUSED, f"the drain was ended while it waited; {summary}"
            )
        with self._lock:
            self._drained = True
        return command.result(Outcome.SUCCEEDED, summary)

    def finish(self, command: Command) -> Result:
        """Wait for running requests, and pause nothing."""
        reason = self._fence(command)
        if reason is not None:
            return command.result(Outcome.REFUSED, reason)
        return command.result(Outcome.SUCCEEDED, self._wait_idle(command))

    def resume(self, epoch: str) -> None:
        """Undo the drain with the profile's request.

        Only if the same process still runs and has that route.
        """
        if self._fence_of(epoch) is not None:
            return  # a new process was never drained
        resume = self._profile.resume
        if resume and resume in self._info.routes:
            trouble = self._post(resume, b"{}")
            if trouble is not None:
                raise EngineError(trouble)
        with self._lock:
            self._drained = False

    def restart_worker(self, command: Command) -> Result:
        """Refuse: no other engine replaces its worker under its requests."""
        return command.result(Outcome.REFUSED, "this engine cannot restart its worker alone")

    def restart_engine(self, command: Command) -> Result:
        """End the engine: SIGTERM, the server's own shutdown, SIGKILL after it.

        The kubelet starts the next one. An engine that hangs has no shutdown to wait for.
        """
        reason = self._fence(command)
        with self._lock:
            found = self._process
        if reason is not None or found is None:
            return command.result(Outcome.REFUSED, reason or "no process is known")
        grace_s = TERM_GRACE_S if command.stalled else command.deadline_s + EXIT_GRACE_S
        ending = self._owned.end(found, grace_s)
        outcome = Outcome.SUCCEEDED if ending.trouble is None else Outcome.FAILED
        return command.result(outcome, "; ".join(filter(None, (ending.summary, ending.trouble))))

    # ---- parts

    def _fence(self, command: Command) -> str | None:
        return self._fence_of(command.epoch)

    def _fence_of(self, epoch: str) -> str | None:
        """Why nothing may be done; None while the process is the one that was decided on."""
        with self._lock:
            try:
                self._find()
                assert self._process is not None
                now = self._epoch(self._process)
            except EngineError as error:
                return str(error)
        return (
            None
            if now == epoch
            else f"the engine is in epoch {now}; the command is for epoch {epoch}"
        )

    def _wait_idle(self, command: Command, stands: Callable[[], bool] = lambda: True) -> str:
        """Wait until nothing runs, at most to the deadline. Says what is left."""
        limit_s = 0.0 if command.mode is DrainMode.ABORT else command.deadline_s
        deadline, quiet = time.monotonic() + limit_s, 0
        while quiet < QUIET_POLLS and time.monotonic() < deadline and stands():
            quiet = quiet + 1 if self._work() == 0 else 0
            time.sleep(POLL_S)
        left = self._work() if quiet < QUIET_POLLS else 0
        return "idle" if left == 0 else f"{'unknown' if left is None else left} requests left"

    def _work(self) -> int | None:
        """Return the requests under way; None where it is not known now."""
        if not self._profile.metrics:
            return len(sockets(self._port, ESTABLISHED))
        with self._lock:
            self._load.expire()
            newest = self._load.newest()
        if newest is None:
            return len(sockets(self._port, ESTABLISHED))
        return newest[0].inflight or 0

    def _post(self, path: str, body: bytes | None, timeout_s: float = TRIM_S) -> str | None:
        """None when it was done, else why not."""
        try:
            status, _ = self._server.call("POST", path, timeout_s, body)
        except EngineError as error:
            return str(error)
        return None if status < 300 else f"POST {path}: HTTP {status}"


def gather(
    kind: Diagnostic, command: Command, processes: Sequence[ProcessMemory], probes: Probes
) -> bytes | None:
    """Return the texts of all processes that have one, suspected ones first; None without any.

    Without a probe there are stacks alone, where py-spy can read them.

    A process that hangs and cannot answer gets a signal only if it is to be ended anyway.
    """
    texts: dict[int, bytes] = dict(probes.texts(kind))
    if kind is Diagnostic.STACKS:
        silent = [p for p in processes if p.pid not in texts]
        known = [identity for p in silent if (identity := identify(p.pid)) is not None]
        if command.stalled and probes.folder is not None:
            texts |= stacks.by_signal(probes.folder, known)
        texts |= stacks.by_py_spy(p for p in known if p.pid not in texts)
    answered = [p for p in command.suspected_first(processes) if p.pid in texts]
    parts = [_part(process, texts[process.pid], command) for process in answered]
    return b"\n".join(parts) if parts else None


def _part(process: ProcessMemory, text: bytes, command: Command) -> bytes:
    suspected = ", suspected" if process.label == command.process else ""
    return f"==== {process.label}, process {process.pid}{suspected}\n".encode() + text + b"\n"
