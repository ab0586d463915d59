"""The adapter for our own engine: the admin protocol over the pod's loopback."""

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
from plimsoll_api.decoding import Malformed, decode
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act.adapters.processes import OwnedEngine, sweep
from plimsoll_sidecar.clients.http import (
    MAX_BYTES,
    Answer,
    EngineError,
    HttpClient,
    NoAnswer,
    pool,
    request,
)
from plimsoll_sidecar.govern.command import Command, Outcome, Result

ANSWER_S = 3.0
"""Longest wait for one answer. Long calls answer 202 at once, so that this is generous."""
POLL_FIRST_S, POLL_S = 0.02, 0.25
"""Most operations end at once; between polls of a long one the pause doubles up to the second."""
TRIM_S = 60.0
DRAIN_GRACE_S = 15.0
WORKER_START_S = 600.0
"""Longest start of a worker after the old one ended: it may have to load its weights again."""
ENGINE_EXIT_S = 60.0
DIAGNOSTIC_S = 15.0
MAX_MESSAGE = 1000
"""Characters of a result or an error: it is logged, written to the journal and shown."""
MAX_STATUS_BYTES = 1 << 20
MAX_EPOCH = 128
"""Characters of an epoch, which the journal keeps many of; ours have some twenty."""
_FINAL = frozenset({OperationState.SUCCEEDED, OperationState.FAILED})

_T = TypeVar("_T")


class Refused(EngineError):
    """The engine answered that it will not; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PlimsollEngine(OwnedEngine):
    """Safe to use from several threads: urllib3's pool is, and so is what is kept of processes."""

    def __init__(self, endpoint: EngineEndpoint, token_file: Path) -> None:
        self._url = endpoint.admin_url.rstrip("/") + admin.ADMIN_PREFIX
        self._serving = HttpClient(endpoint.serving_url)
        self._token_file = token_file
        self._http = pool(maxsize=4)
        super().__init__(endpoint)

    def status(self) -> Status:
        """``GET /status`` of the admin protocol. Raises EngineError."""
        found = _decode(self._call("GET", "/status", max_bytes=MAX_STATUS_BYTES), Status)
        if len(found.epoch) > MAX_EPOCH:
            raise EngineError(f"its epoch has more than {MAX_EPOCH} characters")
        return found

    def serves(self) -> bool:
        """Whether ``/health`` on the serving port is answered at all."""
        return self._serving.answers("/health", ANSWER_S)

    def diagnostics(self, kind: Diagnostic, command: Command) -> bytes:
        """``GET /diagnostics/KIND``: the engine writes the text itself. Raises EngineError."""
        return self._call("GET", f"/diagnostics/{kind.value}", timeout_s=DIAGNOSTIC_S)

    def stacks(self, command: Command) -> bytes | None:
        """None: its processes write their stacks on a signal, to the shared directory."""
        return None  # its processes write them on a signal, to the shared directory

    def resume(self, epoch: str) -> None:
        """``POST /resume``, fenced by ``epoch``.

        Raises EngineError, also when the epoch is over.
        """
        self._call("POST", "/resume", admin.ResumeRequest(expected_epoch=epoch))

    def standby(self, epoch: str, lease_s: float) -> StandbyStatus | None:
        """``POST /standby``, fenced by ``epoch``; with 0 seconds the worker is given back.

        Raises EngineError, also when the epoch is over.
        """
        body = admin.StandbyRequest(expected_epoch=epoch, lease_s=lease_s)
        return _decode(self._call("POST", "/standby", body), Status).standby

    def trim(self, command: Command) -> Result:
        """Start the operation and wait for its end, at most ``TRIM_S`` seconds."""
        body = admin.TrimRequest(operation_id=command.operation_id, expected_epoch=command.epoch)
        return self._operate(command, "/trim", body, TRIM_S)

    def drain(self, command: Command, stands: Callable[[], bool] = lambda: True) -> Result:
        """Start the operation and wait for its end, a grace longer than its own deadline.

        A resume ends the operation in the engine itself.
        """
        body = admin.DrainRequest(
            operation_id=command.operation_id,
            expected_epoch=command.epoch,
            mode=command.mode,
            deadline_s=command.deadline_s,
        )
        return self._operate(command, "/drain", body, command.deadline_s + DRAIN_GRACE_S)

    def finish(self, command: Command) -> Result:
        """Nothing to wait for: this engine ends its requests itself when its pod ends."""
        return _answer(command, Outcome.SUCCEEDED, "the engine finishes its requests itself")

    def restart_worker(self, command: Command) -> Result:
        """Start the operation and wait until a new worker serves.

        Or until its start has taken too long.
        """
        body = self._restart(command, admin.Scope.WORKER)
        return self._operate(command, "/restart", body, command.deadline_s + WORKER_START_S)

    def restart_engine(self, command: Command) -> Result:
        """Succeeds as soon as the accepted operation's engine is gone: the next has other ids."""
        body = self._restart(command, admin.Scope.ENGINE)
        limit_s = command.deadline_s + ENGINE_EXIT_S
        before = self._owned.known()
        result = self._operate(command, "/restart", body, limit_s, ends_engine=True)
        if result.outcome is not Outcome.SUCCEEDED or before is None:
            return result
        ending = sweep(before)
        outcome = Outcome.SUCCEEDED if ending.trouble is None else Outcome.FAILED
        summary = (result.message, ending.summary, ending.trouble)
        return _answer(command, outcome, "; ".join(filter(None, summary)))

    def _restart(self, command: Command, scope: admin.Scope) -> admin.RestartRequest:
        return admin.RestartRequest(
            operation_id=command.operation_id,
            expected_epoch=command.epoch,
            scope=scope,
            carry=command.mode is DrainMode.CARRY,
            deadline_s=command.deadline_s,
        )

    def _operate(
        self,
        command: Command,
        path: str,
        body: msgspec.Struct,
        limit_s: float,
        ends_engine: bool = False,
    ) -> Result:
        """Send an operation and follow it to its end, within ``limit_s``.

        A lost answer is asked for again with the same id; an engine that started anew meanwhile
        knows no such operation and refuses it for its epoch.
        """
        deadline = time.monotonic() + limit_s
        accepted = False
        trouble, pause = "no answer", POLL_FIRST_S
        while time.monotonic() < deadline:
            try:
                if not accepted:
                    data = self._call("POST", path, body)
                    accepted = True
                else:
                    data = self._call("GET", f"/operations/{command.operation_id}")
                operation = _decode(data, Operation)
                if operation.state in _FINAL:
                    return _result(command, operation)
                trouble = "still running"
            except Refused as error:
                if error.status == 404 and accepted:
                    accepted = False
                    continue
                refused = error.status == 409
                return _answer(command, Outcome.REFUSED if refused else Outcome.FAILED, str(error))
            except EngineError as error:
                if accepted and ends_engine:
                    return _answer(command, Outcome.SUCCEEDED, "the engine's process ended")
                trouble = str(error)
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        return _answer(
            command, Outcome.FAILED, f"{path}: not finished within {limit_s:.0f} s: {trouble}"
        )

    def _call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        timeout_s: float = ANSWER_S,
        max_bytes: int = MAX_BYTES,
    ) -> bytes:
        headers = {"Authorization": f"Bearer {self._token()}"}
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        try:
            answer = request(
                self._http, method, self._url + path, timeout_s, data, headers, max_bytes
            )
        except NoAnswer as error:
            raise EngineError(f"{method} {path}: {error}") from error
        if answer.status < 300:
            return answer.body
        raise Refused(answer.status, f"{method} {path}: {_reason(answer)}")

    def _token(self) -> str:
        try:
            return self._token_file.read_text().strip()
        except OSError as error:
            raise EngineError(f"admin token {self._token_file}: {error.strerror}") from error


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return decode(data, kind)
    except Malformed as error:
        raise EngineError(f"the engine's answer is not a {kind.__name__}: {error}") from error


def _reason(answer: Answer) -> str:
    try:
        body = decode(answer.body, ErrorBody)
    except Malformed:
        return f"HTTP {answer.status}"
    return f"HTTP {answer.status} {body.code}: {body.message}"[:MAX_MESSAGE]


def _answer(command: Command, outcome: Outcome, message: str) -> Result:
    return command.result(outcome, message[:MAX_MESSAGE])


def _result(command: Command, operation: Operation) -> Result:
    if operation.state is OperationState.FAILED:
        return _answer(command, Outcome.FAILED, operation.error or "the engine gave no reason")
    steps = ", ".join(f"{step.name} {step.duration_s:.3f} s" for step in operation.steps)
    if operation.carried_requests is not None:
        steps = f"{operation.carried_requests} requests carried over; {steps}"
    return _answer(command, Outcome.SUCCEEDED, steps)
