"""ASGI application of the admin API (:mod:`plimsoll_api.admin`), which requires a token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from plimsoll_api import admin
from plimsoll_api.admin import ADMIN_PREFIX, EngineState, ErrorBody, Operation
from plimsoll_api.names import TOKEN_FILE
from plimsoll_engine.api.body import BodyReader, BodyRefusedError
from plimsoll_engine.api.secret import Secret
from plimsoll_engine.frontend.admin import (
    drain,
    engine_audit,
    engine_diagnostics,
    engine_trim,
    restart,
)
from plimsoll_engine.frontend.admin.status import StatusReader
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.epochs import StaleEpochError
from plimsoll_engine.frontend.operations import OperationConflictError, Recorder
from plimsoll_engine.settings import StandbyPolicy

MAX_BODY_BYTES = 64 << 10

_FencedRequest = (
    admin.TrimRequest | admin.DrainRequest | admin.RestartRequest | admin.ShutdownRequest
)
_Body = TypeVar("_Body")


class AdminError(Exception):
    """Error response of the admin API."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def encode_error_body(status: int, message: str, code: str) -> bytes:
    """Return the body of an error response to a request that was not read."""
    return msgspec.json.encode(ErrorBody(_convert_to_camel_case(code), message))


async def refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer status 503 on a connection beyond the limit."""
    body = ErrorBody("TooManyConnections", "the admin port has too many connections: retry later")
    response = _make_json_response(body, 503)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def _convert_to_camel_case(code: str) -> str:
    return "".join(word.capitalize() for word in code.split("_"))


def create_app(engine: AsyncEngine, token: str, bodies: BodyReader) -> ASGIApp:
    """Return the application of the admin API. Every request must have the bearer ``token``."""
    api = FastAPI(title="Plimsoll admin", docs_url=None, redoc_url=None, openapi_url=None)
    statuses = StatusReader(engine)

    async def read_request(request: Request, body_type: type[_Body]) -> _Body:
        try:
            async with bodies.read(request, MAX_BODY_BYTES) as body:
                return msgspec.json.decode(body.raw, type=body_type)
        except BodyRefusedError as error:
            raise AdminError(error.status, _convert_to_camel_case(error.code), str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise AdminError(400, "BadRequest", f"the body is invalid: {error}") from None

    @api.get(ADMIN_PREFIX + "/status")
    async def get_status() -> Response:
        return _make_json_response(statuses.read())

    @api.get(ADMIN_PREFIX + "/audit")
    async def get_audit() -> Response:
        return _make_json_response(await engine_audit.run_audit(engine))

    @api.get(ADMIN_PREFIX + "/diagnostics/{kind}")
    async def get_diagnostics(kind: str) -> Response:
        try:
            wanted = admin.Diagnostic(kind)
        except ValueError:
            raise AdminError(
                404,
                "UnknownDiagnostic",
                f"the diagnostic {kind!r} does not exist: use {', '.join(admin.Diagnostic)}",
            ) from None
        text = await engine_diagnostics.run_diagnostic(engine, wanted)
        return Response(text, media_type="text/plain; charset=utf-8")

    @api.get(ADMIN_PREFIX + "/operations/{operation_id}")
    async def get_operation(operation_id: str) -> Response:
        operation = engine.operations.get(operation_id)
        if operation is None:
            raise AdminError(
                404,
                "UnknownOperation",
                f"operation {operation_id!r} is unknown, because the engine has restarted or "
                "has deleted the operation",
            )
        return _make_json_response(operation)

    @api.post(ADMIN_PREFIX + "/trim")
    async def post_trim(request: Request) -> Response:
        body = await read_request(request, admin.TrimRequest)
        return _start_operation(engine, "trim", body, None, lambda r: engine_trim.trim(engine, r))

    @api.post(ADMIN_PREFIX + "/drain")
    async def post_drain(request: Request) -> Response:
        body = await read_request(request, admin.DrainRequest)
        return _start_operation(
            engine, "drain", body, EngineState.DRAINING, lambda r: drain.drain(engine, r, body)
        )

    @api.post(ADMIN_PREFIX + "/resume")
    async def post_resume(request: Request) -> Response:
        body = await read_request(request, admin.ResumeRequest)
        _check_epoch(engine, body.expected_epoch)
        if engine.lifecycle.state not in (EngineState.DRAINING, EngineState.DRAINED):
            if engine.lifecycle.state is not EngineState.SERVING:
                raise _make_not_possible_error(engine, "resume")
            return _make_json_response(statuses.read())
        current = engine.operations.current
        if current is not None and current.kind != "drain":
            raise AdminError(
                409,
                "Busy",
                f"operation {current.id} ({current.kind}) is running: wait until it has ended, then"
                " resume",
            )
        await engine.operations.cancel()
        drain.resume(engine)
        return _make_json_response(statuses.read())

    @api.post(ADMIN_PREFIX + "/standby")
    async def post_standby(request: Request) -> Response:
        body = await read_request(request, admin.StandbyRequest)
        _check_epoch(engine, body.expected_epoch)
        if engine.settings.standby_worker is not StandbyPolicy.ON_SUSPICION:
            raise AdminError(
                409,
                "NotPossible",
                f"standby leases require --standby-worker {StandbyPolicy.ON_SUSPICION}, but the"
                f" engine was started with {engine.settings.standby_worker}",
            )
        if engine.lifecycle.has_ended or engine.lifecycle.state is EngineState.STOPPING:
            raise _make_not_possible_error(engine, "prepare a standby worker")
        engine.manager.standby.set_lease(body.lease_s)
        return _make_json_response(statuses.read())

    @api.post(ADMIN_PREFIX + "/restart")
    async def post_restart(request: Request) -> Response:
        body = await read_request(request, admin.RestartRequest)
        if body.scope is admin.Scope.ENGINE:
            return _start_shutdown(engine, "restart_engine", body)
        return _start_operation(
            engine,
            "restart_worker",
            body,
            EngineState.RESTARTING,
            lambda r: restart.restart_worker(engine, r, body),
        )

    @api.post(ADMIN_PREFIX + "/shutdown")
    async def post_shutdown(request: Request) -> Response:
        return _start_shutdown(
            engine, "shutdown", await read_request(request, admin.ShutdownRequest)
        )

    _add_error_handlers(api, engine)
    return _TokenMiddleware(api, token)


def _add_error_handlers(api: FastAPI, engine: AsyncEngine) -> None:
    @api.exception_handler(AdminError)
    async def respond_to_admin_error(request: Request, error: AdminError) -> Response:
        epoch = str(engine.epochs.current)
        return _make_json_response(ErrorBody(error.code, str(error), epoch), error.status)

    @api.exception_handler(ClientDisconnect)
    async def ignore_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # the client has disconnected

    @api.exception_handler(404)
    async def respond_not_found(request: Request, error: Exception) -> Response:
        return _make_json_response(
            ErrorBody("NotFound", f"the path {request.url.path} does not exist"), 404
        )

    @api.exception_handler(405)
    async def respond_not_allowed(request: Request, error: Exception) -> Response:
        message = f"the method {request.method} is not allowed for {request.url.path}"
        return _make_json_response(ErrorBody("MethodNotAllowed", message), 405)


class _TokenMiddleware:
    def __init__(self, inner: ASGIApp, token: str) -> None:
        self._inner = inner
        self._expected = Secret(b"Bearer " + token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            if not self._expected.is_equal(given):
                body = ErrorBody(
                    "Unauthorized",
                    f"the bearer token is missing or wrong: see {TOKEN_FILE} in the run directory",
                )
                await _make_json_response(body, 401)(scope, receive, send)
                return
        await self._inner(scope, receive, send)


def _make_json_response(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _check_epoch(engine: AsyncEngine, expected_epoch: str) -> None:
    try:
        engine.epochs.check_current(expected_epoch)
    except StaleEpochError as error:
        raise AdminError(409, "StaleEpoch", str(error)) from None
    except ValueError as error:
        raise AdminError(400, "BadRequest", f"expected_epoch: {error}") from None


def _make_not_possible_error(engine: AsyncEngine, operation: str) -> AdminError:
    return AdminError(
        409, "NotPossible", f"the engine cannot {operation} in state {engine.lifecycle.state}"
    )


def _start_operation(
    engine: AsyncEngine,
    kind: str,
    body: _FencedRequest,
    state: EngineState | None,
    work: Callable[[Recorder], Awaitable[None]],
) -> Response:
    # ``state`` is the first state of the engine during the operation; None if it does not change.
    operations = engine.operations
    known = operations.get(body.operation_id)
    if known is None:
        _check_epoch(engine, body.expected_epoch)
        if operations.current is None and not _is_possible(engine, state):
            raise _make_not_possible_error(engine, kind)
    try:
        operation = operations.begin(body.operation_id, kind, body.expected_epoch, work)
    except OperationConflictError as error:
        raise AdminError(409, "Busy", str(error)) from None
    return _respond_accepted(operation)


def _is_possible(engine: AsyncEngine, state: EngineState | None) -> bool:
    if state is None:
        return not engine.lifecycle.has_ended
    return engine.lifecycle.state is state or engine.lifecycle.can_move_to(state)


def _start_shutdown(
    engine: AsyncEngine, kind: str, body: admin.RestartRequest | admin.ShutdownRequest
) -> Response:
    async def shut_down(recorder: Recorder) -> None:
        with recorder.measure_step("shutdown"):
            await engine.shut_down(body.deadline_s)

    return _start_operation(engine, kind, body, EngineState.STOPPING, shut_down)


def _respond_accepted(operation: Operation) -> Response:
    return _make_json_response(operation, 202)
