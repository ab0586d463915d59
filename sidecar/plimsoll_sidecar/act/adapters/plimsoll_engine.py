"""Control Plimsoll's own engine through the admin protocol, over the pod's loopback interface."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from plimsoll_api import admin
from plimsoll_api.admin import (
    Diagnostic,
    DrainMode,
    ErrorBody,
    Operation,
    OperationState,
    StandbyStatus,
    Status,
)
from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.files import open_regular_file
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.engine_adapter import Arrivals
from plimsoll_sidecar.act.adapters.processes import OwnedEngine, end_orphaned_helpers
from plimsoll_sidecar.clients.http import (
    MAX_BODY_BYTES,
    EngineError,
    HttpClient,
    HttpResponse,
    RequestError,
    create_pool,
    request,
)
from plimsoll_sidecar.govern.command import Command, Outcome, Result
from plimsoll_sidecar.signals.engine_processes import EngineProcesses
from plimsoll_sidecar.signals.process_table import is_running
from plimsoll_sidecar.signals.tcp_sockets import TCP_LISTEN, find_socket_inodes

# The engine answers 202 if an operation takes longer.
REQUEST_TIMEOUT_S = 3.0
# The pause doubles after each poll. Most operations end within the first.
FIRST_POLL_PAUSE_S, MAX_POLL_PAUSE_S = 0.02, 0.25
TRIM_TIMEOUT_S = 60.0
# After the deadline of a drain, it must end within this time.
DRAIN_GRACE_S = 15.0
# The worker may have to load the weights.
WORKER_START_TIMEOUT_S = 600.0
# After the deadline of a restart, the engine must end within this time.
ENGINE_EXIT_GRACE_S = 60.0
DIAGNOSTIC_TIMEOUT_S = 15.0
# A result's message is logged, stored and shown.
MAX_MESSAGE_CHARS = 1000
MAX_STATUS_BYTES = 1 << 20
MAX_TOKEN_BYTES = 4096
# The journal stores many epochs. Those of Plimsoll's engine have about 20 characters.
MAX_EPOCH_CHARS = 128
_FINAL_STATES = frozenset({OperationState.SUCCEEDED, OperationState.FAILED})

_T = TypeVar("_T")


class RefusedError(EngineError):
    """A request that the engine refused with the HTTP status ``status``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PlimsollEngine(OwnedEngine):
    """Adapter for one Plimsoll engine. Thread-safe."""

    has_status_port = True

    def __init__(self, endpoint: EngineEndpoint, token_file: Path) -> None:
        self._url = endpoint.admin_url.rstrip("/") + admin.ADMIN_PREFIX
        self._port = endpoint.admin_port
        self._serving = HttpClient(endpoint.serving_url)
        self._token_file = token_file
        self._http = create_pool(maxsize=4)
        super().__init__(endpoint)

    def status(self) -> Status:
        """Return the engine's status from ``GET /status``. Raises EngineError."""
        status = _decode(self._call("GET", "/status", max_bytes=MAX_STATUS_BYTES), Status)
        if len(status.epoch) > MAX_EPOCH_CHARS:
            raise EngineError(
                f"the epoch in the engine's status has more than {MAX_EPOCH_CHARS} characters"
            )
        return status

    def is_serving(self) -> bool:
        """Report whether ``/health`` on the serving port answers, even with an error."""
        return self._serving.responds_to_get("/health", REQUEST_TIMEOUT_S)

    def read_arrivals(self) -> Arrivals | None:
        """Return the requests that the frontend has accepted. Raises EngineError."""
        status = self.status()
        accepted = status.load.requests_total
        return None if accepted is None else Arrivals(accepted, status.uptime_s)

    def read_diagnostic(self, kind: Diagnostic, command: Command) -> bytes:
        """Return the text from ``GET /diagnostics/KIND``. Raises EngineError."""
        return self._call("GET", f"/diagnostics/{kind.value}", timeout_s=DIAGNOSTIC_TIMEOUT_S)

    def read_stacks(self, command: Command) -> bytes | None:
        """Return None: this engine writes its stacks to the shared directory on a signal."""
        return None

    def resume(self, epoch: str) -> None:
        """Send ``POST /resume`` for ``epoch``. Raises EngineError."""
        self._call("POST", "/resume", admin.ResumeRequest(expected_epoch=epoch))

    def lease_standby(self, epoch: str, lease_s: float) -> StandbyStatus | None:
        """Lease a standby worker for ``lease_s`` seconds, and return its status; 0 ends the lease.

        Return None if the engine does not report the status. Raises EngineError.
        """
        body = admin.StandbyRequest(expected_epoch=epoch, lease_s=lease_s)
        return _decode(self._call("POST", "/standby", body), Status).standby

    def trim(self, command: Command) -> Result:
        """Start a trim, and wait at most :data:`TRIM_TIMEOUT_S` for its end."""
        body = admin.TrimRequest(operation_id=command.operation_id, expected_epoch=command.epoch)
        return self._run_operation(command, "/trim", body, TRIM_TIMEOUT_S)

    def drain(self, command: Command, is_wanted: Callable[[], bool] = lambda: True) -> Result:
        """Start a drain, and wait for its end until :data:`DRAIN_GRACE_S` after its deadline.

        ``is_wanted`` is not called: a request to resume ends the drain in the engine itself.
        """
        body = admin.DrainRequest(
            operation_id=command.operation_id,
            expected_epoch=command.epoch,
            mode=command.mode,
            deadline_s=command.deadline_s,
        )
        return self._run_operation(command, "/drain", body, command.deadline_s + DRAIN_GRACE_S)

    def finish_requests(self, command: Command) -> Result:
        """Return success without waiting: the engine finishes its requests when its pod ends."""
        return _make_result(
            command, Outcome.SUCCEEDED, "the engine itself finishes its requests when its pod ends"
        )

    def restart_worker(self, command: Command) -> Result:
        """Restart the worker, and wait until the new worker serves."""
        body = self._make_restart_request(command, admin.Scope.WORKER)
        return self._run_operation(
            command, "/restart", body, command.deadline_s + WORKER_START_TIMEOUT_S
        )

    def restart_engine(self, command: Command) -> Result:
        """Restart the engine, and wait until all its processes have ended."""
        body = self._make_restart_request(command, admin.Scope.ENGINE)
        limit_s = command.deadline_s + ENGINE_EXIT_GRACE_S
        before = self._owned.find_processes_or_none()
        result = self._run_operation(
            command, "/restart", body, limit_s, lambda: self._has_ended(before)
        )
        if result.outcome is not Outcome.SUCCEEDED or before is None:
            return result
        ending = end_orphaned_helpers(before)
        outcome = Outcome.SUCCEEDED if ending.error is None else Outcome.FAILED
        summary = (result.message, ending.summary, ending.error)
        return _make_result(command, outcome, "; ".join(filter(None, summary)))

    def _has_ended(self, before: EngineProcesses | None) -> bool:
        # An engine that does not answer in time may still run, and serve its last requests.
        main = before.main if before is not None else None
        if main is not None and not is_running(main):
            return True
        return not find_socket_inodes(self._port, TCP_LISTEN)

    def _make_restart_request(self, command: Command, scope: admin.Scope) -> admin.RestartRequest:
        return admin.RestartRequest(
            operation_id=command.operation_id,
            expected_epoch=command.epoch,
            scope=scope,
            carry=command.mode is DrainMode.CARRY,
            deadline_s=command.deadline_s,
        )

    def _run_operation(
        self,
        command: Command,
        path: str,
        body: msgspec.Struct,
        limit_s: float,
        has_ended: Callable[[], bool] | None = None,
    ) -> Result:
        # A request whose response is lost is sent again with the same operation ID. An engine that
        # has restarted meanwhile refuses it, because the epoch differs. With has_ended, the
        # operation has succeeded once the engine accepted it and has ended.
        deadline = time.monotonic() + limit_s
        accepted = False
        trouble, pause = "the engine did not answer", FIRST_POLL_PAUSE_S
        while time.monotonic() < deadline:
            try:
                if not accepted:
                    data = self._call("POST", path, body)
                    accepted = True
                else:
                    data = self._call("GET", f"/operations/{command.operation_id}")
                operation = _decode(data, Operation)
                if operation.state in _FINAL_STATES:
                    return _make_operation_result(command, operation)
                trouble = "the operation is still running"
            except RefusedError as error:
                if error.status == 404 and accepted:
                    accepted = False
                    continue
                refused = error.status == 409
                return _make_result(
                    command, Outcome.REFUSED if refused else Outcome.FAILED, str(error)
                )
            except EngineError as error:
                if accepted and has_ended is not None and has_ended():
                    return _make_result(
                        command, Outcome.SUCCEEDED, "the engine's process has ended"
                    )
                trouble = str(error)
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_PAUSE_S)
        return _make_result(
            command, Outcome.FAILED, f"POST {path} did not finish within {limit_s:.0f} s: {trouble}"
        )

    def _call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> bytes:
        headers = {"Authorization": f"Bearer {self._read_token()}"}
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        try:
            answer = request(
                self._http, method, self._url + path, timeout_s, data, headers, max_bytes
            )
        except RequestError as error:
            raise EngineError(f"{method} {path} failed: {error}") from error
        if answer.status < 300:
            return answer.body
        raise RefusedError(answer.status, f"{method} {path} failed: {_describe_error(answer)}")

    def _read_token(self) -> str:
        # The engine can replace the file, because it shares the directory.
        try:
            file = open_regular_file(self._token_file)
        except OSError as error:
            raise EngineError(
                f"cannot read the admin token {self._token_file}: {error.strerror}"
            ) from error
        if file is None:
            raise EngineError(f"the admin token {self._token_file} is not a regular file")
        with file:
            return file.read(MAX_TOKEN_BYTES).decode(errors="replace").strip()


def _decode(data: bytes, target_type: type[_T]) -> _T:
    try:
        return decode(data, target_type)
    except MalformedError as error:
        raise EngineError(
            f"the engine's answer is not a valid {target_type.__name__}: {error}"
        ) from error


def _describe_error(answer: HttpResponse) -> str:
    try:
        body = decode(answer.body, ErrorBody)
    except MalformedError:
        return f"HTTP {answer.status}"
    return f"HTTP {answer.status} ({body.code}): {body.message}"[:MAX_MESSAGE_CHARS]


def _make_result(command: Command, outcome: Outcome, message: str) -> Result:
    return command.make_result(outcome, message[:MAX_MESSAGE_CHARS])


def _make_operation_result(command: Command, operation: Operation) -> Result:
    if operation.state is OperationState.FAILED:
        return _make_result(
            command,
            Outcome.FAILED,
            operation.error or "the operation failed, and the engine gave no reason",
        )
    steps = ", ".join(f"{step.name} {step.duration_s:.3f} s" for step in operation.steps)
    if operation.carried_requests is not None:
        steps = f"{operation.carried_requests} requests were carried over; {steps}"
    return _make_result(command, Outcome.SUCCEEDED, steps)
