"""Supervise engines without Plimsoll's admin protocol: vLLM, SGLang and any HTTP server.

The epoch consists of the main process's start time and PID, and of the number of times that all
helper processes were replaced. vLLM and SGLang listen on their port only when they are ready.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from plimsoll_api.admin import (
    Diagnostic,
    DrainMode,
    EngineState,
    Epoch,
    Load,
    ProcessMemory,
    Status,
)
from plimsoll_api.state import Signal
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.engine_adapter import Arrivals
from plimsoll_sidecar.act.adapters.external_load import HTTP_UNAUTHORIZED, ExternalLoad
from plimsoll_sidecar.act.adapters.external_profile import ENGINE_PROFILES
from plimsoll_sidecar.act.adapters.external_server import ServerInfo
from plimsoll_sidecar.act.adapters.kv_transfer import can_test_with_connector, find_restart_blocker
from plimsoll_sidecar.act.adapters.processes import (
    TERM_GRACE_S,
    OwnedEngine,
    measure_trim_effect,
    measure_trimmable_bytes,
)
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.govern.command import Command, Outcome, Result
from plimsoll_sidecar.signals import stacks
from plimsoll_sidecar.signals.engine_processes import (
    EngineNotFoundError,
    EngineProcesses,
    find_process_names,
)
from plimsoll_sidecar.signals.gpu_identity import DeviceFinder
from plimsoll_sidecar.signals.probes import Probes
from plimsoll_sidecar.signals.process_table import ProcessId, compute_age_s, identify, is_running
from plimsoll_sidecar.signals.tcp_sockets import (
    TCP_ESTABLISHED,
    TCP_LISTEN,
    count_unanswered_connections,
    find_socket_inodes,
)

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 3.0
# All requests of a trim together take milliseconds unless the engine hangs.
TRIM_TIMEOUT_S = 5.0
PAUSE_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.5
# The server may need this time for its shutdown after the deadline of the drain.
EXIT_GRACE_S = 30.0
MIN_IDLE_POLLS = 2


class ExternalEngine(OwnedEngine):
    """Adapter for one external engine. Thread-safe.

    ``is_group_serving`` reports whether the multi-node group of this worker serves. Without it, a
    worker always counts as serving.
    """

    def __init__(
        self,
        endpoint: EngineEndpoint,
        is_group_serving: Callable[[], bool] | None = None,
    ) -> None:
        self._group_serves = is_group_serving
        self._probes = Probes.from_environment()
        self._endpoint, self._profile = endpoint, ENGINE_PROFILES[endpoint.type]
        self._port = endpoint.serving_port
        self._server = HttpClient(endpoint.serving_url)
        self._load = ExternalLoad(
            self._server,
            self._profile,
            count_waiting=lambda: count_unanswered_connections(self._port),
            are_helpers_replaced=self._has_replaced_helpers,
        )
        super().__init__(endpoint)
        self._lock = threading.Lock()
        self._main: ProcessId | None = None
        self._earlier_epoch: Epoch | None = None
        self._page_helpers: frozenset[ProcessId] = frozenset()
        self._served = self._drained = self._group_served = False
        self._info = ServerInfo(endpoint, self._server, self._owned)
        self._gpus = DeviceFinder()
        self._newest: Status | None = None

    # ---- status

    def status(self) -> Status:
        """Return the status from the engine's metrics page, its probes and ``/proc``.

        Raises EngineError without a main process, or if the port's answer is unexpected.
        """
        with self._lock:
            members = self._find_processes()
            main = self._main
            assert main is not None
            state = self._determine_state()
            if state is EngineState.SERVING and self._served:
                self._info.update()
            newest = self._load.get_newest_load() if self._served else None
            if newest is not None:
                newest[0].kv_lease_s = self._info.kv_lease_s
            if newest is not None and members.helpers:
                self._page_helpers = frozenset(members.helpers)
            seen = Status(
                state=EngineState.DRAINED if self._drained else state,
                epoch=self._make_epoch(main),
                version=self._info.version,
                model=self._endpoint.model,
                uptime_s=compute_age_s(main),
                load=newest[0] if newest else Load(),
                report_age_s=newest[1] if newest else None,
                load_age_s=newest[1] if newest else None,
                processes=self._owned.list_processes(members),
                devices=self._gpus.find_devices(main.pid, [p.pid for p in members.processes]),
                capabilities=self._info.capabilities,
            )
            seen = self._probes.add_reports(seen)
            parts = find_process_names(seen.processes, self._endpoint.type)
            self._newest = msgspec.structs.replace(seen, parts=parts)
            return self._newest

    @property
    def can_test_partners(self) -> bool:
        """Whether the supervisor can send a test request through this engine and its partners."""
        return can_test_with_connector(self._info.connector)

    @property
    def restart_blocker(self) -> str | None:
        """Reason why this engine must not restart without its partners; None if it may restart."""
        return find_restart_blocker(self._info.connector, self._info.version)

    def read_metrics_signal(self) -> Signal | None:
        """Return the signal of the newest metrics page; None without such a page."""
        if not self._profile.metrics or not self._endpoint.serves:
            return None
        with self._lock:
            return self._load.signal

    def is_serving(self) -> bool:
        """Report whether the health path of the engine's profile answers, even with an error."""
        return self._endpoint.serves and self._server.responds_to_get(
            self._profile.health_path, REQUEST_TIMEOUT_S
        )

    def read_arrivals(self) -> Arrivals | None:
        """Return the requests that have ended or are in flight; None if the page lacks them."""
        load = self._scrape_load()
        with self._lock:
            main = self._main
        if load is None or load.requests_total is None or main is None:
            return None
        return Arrivals(load.requests_total + (load.inflight or 0), compute_age_s(main))

    def _find_processes(self) -> EngineProcesses:
        try:
            members = self._owned.find_processes()
        except EngineNotFoundError as error:
            raise EngineError(str(error)) from error
        main = members.main
        if main is None:
            left = ", ".join(str(p.pid) for p in members.processes[:8])
            raise EngineError(
                f"the engine's main process has ended, but its processes {left} are still running"
            )
        if main != self._main:
            self._main = main
            self._served = self._drained = self._group_served = False
            self._info.reset()
            self._gpus.reset()
            self._load.reset()
            self._page_helpers = frozenset()
        return members

    def _has_replaced_helpers(self) -> bool:
        # The list of the helpers may be older than the page.
        return bool(self._page_helpers) and not any(map(is_running, self._page_helpers))

    def continue_epoch(self, epoch: str) -> None:
        """Count on from ``epoch`` while its main process runs."""
        with self._lock, contextlib.suppress(ValueError):
            self._earlier_epoch = Epoch.parse(epoch)

    def _make_epoch(self, main: ProcessId) -> str:
        boot_id, earlier = f"{main.started:x}-{main.pid}", self._earlier_epoch
        first = earlier.number if earlier is not None and earlier.boot_id == boot_id else 1
        return str(Epoch(boot_id, first + self._load.restarts))

    def _determine_state(self) -> EngineState:
        # Any answer of the health path shows that the frontend runs. A status of 500 or more shows
        # that the engine core does not. A worker of a multi-node engine has no port: it is starting
        # until its group serves.
        if not self._endpoint.serves:
            self._group_served = (
                self._group_served or self._group_serves is None or self._group_serves()
            )
            return EngineState.SERVING if self._group_served else EngineState.STARTING
        # This is checked before the request: a server that starts to listen meanwhile is starting.
        listens = self._served or bool(find_socket_inodes(self._port, TCP_LISTEN))
        try:
            status, _ = self._server.call("GET", self._profile.health_path, REQUEST_TIMEOUT_S)
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

    def read_diagnostic(self, kind: Diagnostic, command: Command) -> bytes:
        """Return a diagnostic from the processes' probes or py-spy. Raises EngineError."""
        newest = self._newest
        seen = {process.pid: process for process in newest.processes} if newest else {}
        processes = [seen.get(process.pid, process) for process in self._owned.list_processes()]
        text = collect_diagnostics(kind, command, processes, self._probes)
        if text is None:
            kind_of = self._endpoint.type.value
            raise EngineError(
                f"no process of the {kind_of} engine provides the diagnostic {kind.value}: load "
                "plimsoll-probe into the engine"
            )
        return text

    def read_stacks(self, command: Command) -> bytes | None:
        """Return stacks from the probes or py-spy; None if neither is available."""
        try:
            return self.read_diagnostic(Diagnostic.STACKS, command)
        except EngineError as error:
            log.info("cannot read the engine's stacks: %s", error)
            return None

    # ---- verbs

    def trim(self, command: Command) -> Result:
        """Empty the engine's caches. The outcome depends on how much memory was freed."""
        reason = self._explain_other_epoch(command.epoch)
        if reason is not None:
            return command.make_result(Outcome.REFUSED, reason)
        members = self._owned.find_processes_or_none()
        pids = [process.pid for process in members.processes] if members else []
        before = measure_trimmable_bytes(pids)
        called_paths: list[str] = []
        deadline = time.monotonic() + TRIM_TIMEOUT_S
        trouble: str | None = None
        for path in self._profile.trim_paths:
            if trouble is None and path in self._info.routes:
                trouble = self._post(path, None, max(0.1, deadline - time.monotonic()))
                called_paths += [path] if trouble is None else []
        trimmed = None if trouble else self._probes.trim(is_idle=self._count_requests() == 0)
        if trimmed is not None:
            called_paths.append(f"{trimmed.processes} probe{'s' if trimmed.processes > 1 else ''}")
        if not called_paths and trouble is None:
            return command.make_result(
                Outcome.FAILED, "the engine has no cache that the supervisor can empty"
            )
        devices = bool(self._newest and self._newest.devices)
        effect = measure_trim_effect(
            before, measure_trimmable_bytes(pids), trimmed.device if trimmed else None, devices
        )
        summary = "; ".join(
            filter(
                None,
                (f"called {', '.join(called_paths) or 'nothing'}, which {effect.summary}", trouble),
            )
        )
        failed = trouble is not None and effect.outcome is not Outcome.SUCCEEDED
        return command.make_result(Outcome.FAILED if failed else effect.outcome, summary)

    def drain(self, command: Command, is_wanted: Callable[[], bool] = lambda: True) -> Result:
        """Wait for running requests, and then pause the engine if it supports pauses.

        The wait includes KV blocks that another engine must still read. Requests that still run at
        the deadline end with the engine.
        """
        reason = self._explain_other_epoch(command.epoch)
        if reason is not None:
            return command.make_result(Outcome.REFUSED, reason)
        summary = self._wait_until_idle(command, is_wanted)
        pause = self._profile.pause_path
        if pause and pause in self._info.routes and is_wanted():
            trouble = self._post(pause, self._profile.pause_body, PAUSE_TIMEOUT_S)
            summary += f"; failed to pause the engine: {trouble}" if trouble else "; paused"
        if not is_wanted():
            self.resume(command.epoch)  # the drain may have ended before the pause
            return command.make_result(
                Outcome.REFUSED, f"the drain was cancelled before it finished; {summary}"
            )
        with self._lock:
            self._drained = True
        return command.make_result(Outcome.SUCCEEDED, summary)

    def finish_requests(self, command: Command) -> Result:
        """Wait for running requests without pausing the engine."""
        reason = self._explain_other_epoch(command.epoch)
        if reason is not None:
            return command.make_result(Outcome.REFUSED, reason)
        return command.make_result(Outcome.SUCCEEDED, self._wait_until_idle(command))

    def resume(self, epoch: str) -> None:
        """Resume the engine if it supports pauses and is still in ``epoch``. Raises EngineError."""
        if self._explain_other_epoch(epoch) is not None:
            return  # a new process was never drained
        resume = self._profile.resume_path
        if resume and self._info.has_silent_route:
            raise EngineError(f"the engine has not said yet whether it has the route {resume}")
        if resume and resume in self._info.routes:
            status, _ = self._server.call("POST", resume, PAUSE_TIMEOUT_S, b"{}")
            # SGLang with an API key has refused the pause for the same reason.
            if status >= 300 and status not in HTTP_UNAUTHORIZED:
                raise EngineError(f"POST {resume} failed with HTTP status {status}")
        with self._lock:
            self._drained = False

    def restart_worker(self, command: Command) -> Result:
        """Refuse the command, because an external engine cannot replace only its worker."""
        return command.make_result(
            Outcome.REFUSED, "an external engine cannot restart its worker alone"
        )

    def restart_engine(self, command: Command) -> Result:
        """End the engine with SIGTERM, and with SIGKILL if it does not shut down in time."""
        reason = self._explain_other_epoch(command.epoch)
        with self._lock:
            main = self._main
        if reason is not None or main is None:
            return command.make_result(
                Outcome.REFUSED,
                reason
                or "cannot restart the engine, because the PID of its main process is unknown",
            )
        grace_s = TERM_GRACE_S if command.stalled else command.deadline_s + EXIT_GRACE_S
        ending = self._owned.end_processes(main, grace_s)
        outcome = Outcome.SUCCEEDED if ending.error is None else Outcome.FAILED
        return command.make_result(outcome, "; ".join(filter(None, (ending.summary, ending.error))))

    # ---- parts

    def _explain_other_epoch(self, epoch: str) -> str | None:
        with self._lock:
            try:
                self._find_processes()
                assert self._main is not None
                now = self._make_epoch(self._main)
            except EngineError as error:
                return str(error)
        return (
            None
            if now == epoch
            else f"the engine is in epoch {now}, but the command is for epoch {epoch}"
        )

    def _wait_until_idle(
        self, command: Command, is_wanted: Callable[[], bool] = lambda: True
    ) -> str:
        limit_s = 0.0 if command.mode is DrainMode.ABORT else command.deadline_s
        deadline, quiet = time.monotonic() + limit_s, 0
        while quiet < MIN_IDLE_POLLS and time.monotonic() < deadline and is_wanted():
            quiet = quiet + 1 if self._count_requests() == 0 else 0
            time.sleep(POLL_INTERVAL_S)
        left = self._count_requests() if quiet < MIN_IDLE_POLLS else 0
        if left != 0:
            count = "an unknown number of" if left is None else left
            return f"{count} requests are still running"
        lease_s = self._info.kv_lease_s
        if lease_s is None:
            return "idle"
        deadline = min(deadline, time.monotonic() + lease_s)
        while (
            (kv_usage := self._read_kv_cache_usage()) != 0.0
            and time.monotonic() < deadline
            and is_wanted()
        ):
            time.sleep(POLL_INTERVAL_S)
        if kv_usage == 0.0:
            return "idle"
        share = "an unknown share" if kv_usage is None else f"{kv_usage:.1%}"
        return f"no request is running, but other engines still hold {share} of the KV cache"

    def _read_kv_cache_usage(self) -> float | None:
        load = self._scrape_load()
        return load.kv_usage_ratio if load is not None else None

    def _count_requests(self) -> int | None:
        if not self._profile.metrics:
            return len(find_socket_inodes(self._port, TCP_ESTABLISHED))
        load = self._scrape_load()
        inflight = load.inflight if load is not None else None
        if load is not None and inflight is not None and load.waiting is not None:
            return inflight
        # A page that lacks the waiting requests shows a lower bound. Each request has a connection.
        return max(inflight or 0, len(find_socket_inodes(self._port, TCP_ESTABLISHED)))

    def _scrape_load(self) -> Load | None:
        with self._lock:
            self._load.request_scrape()
            newest = self._load.get_newest_load()
        return newest[0] if newest is not None else None

    def _post(self, path: str, body: bytes | None, timeout_s: float) -> str | None:
        # Returns None on success, or else the error.
        try:
            status, _ = self._server.call("POST", path, timeout_s, body)
        except EngineError as error:
            return str(error)
        return None if status < 300 else f"POST {path} failed with HTTP status {status}"


def collect_diagnostics(
    kind: Diagnostic, command: Command, processes: Sequence[ProcessMemory], probes: Probes
) -> bytes | None:
    """Return a diagnostic of all processes as one text; None if no process has one.

    The suspected process comes first.
    """
    texts: dict[int, bytes] = dict(probes.read_texts(kind))
    if kind is Diagnostic.STACKS:
        silent = [p for p in processes if p.pid not in texts]
        identities = [identity for p in silent if (identity := identify(p.pid)) is not None]
        if command.stalled and probes.folder is not None:
            texts |= stacks.read_stacks_by_signal(probes.folder, identities)
        texts |= stacks.read_stacks_by_py_spy(p for p in identities if p.pid not in texts)
    answered = [p for p in command.sort_suspected_first(processes) if p.pid in texts]
    parts = [_format_diagnostic(process, texts[process.pid], command) for process in answered]
    return b"\n".join(parts) if parts else None


def _format_diagnostic(process: ProcessMemory, content: bytes, command: Command) -> bytes:
    suspected = ", suspected" if process.label == command.process else ""
    return f"==== {process.label}, process {process.pid}{suspected}\n".encode() + content + b"\n"
