"""Frontend process: two HTTP servers and the engine on one event loop, from start to exit.

The event loop is uvloop's, because asyncio's leaves a reference cycle for each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from plimsoll_api.admin_token import write_token
from plimsoll_api.listening import bind_socket
from plimsoll_engine.api import admin, answer_sizes, serving
from plimsoll_engine.api.answer import encode_error_body, refuse_connection
from plimsoll_engine.api.auth import ApiKeyMiddleware, ApiKeys
from plimsoll_engine.api.body import BodyReader
from plimsoll_engine.api.body_sizes import BodySizes
from plimsoll_engine.api.preparer import Preparer
from plimsoll_engine.errors import UsageError
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.frontend.workers.adopted import set_subreaper
from plimsoll_engine.http.budget import BodyBudget
from plimsoll_engine.http.connection import Connection
from plimsoll_engine.http.connections import Connections
from plimsoll_engine.http.limits import SOCKET_BUFFER_BYTES
from plimsoll_engine.http.slices import SlicedResponses
from plimsoll_engine.process import host_memory, stacks
from plimsoll_engine.process.stacks import make_stacks_path
from plimsoll_engine.process.start_gate import wait_until_open
from plimsoll_engine.settings import PORTS_FILE_NAME, Settings

log = logging.getLogger(__name__)

ADMIN_TOKEN_TIMEOUT_S = 30.0
MAX_ADMIN_CONNECTIONS = 64
# Request bodies of the admin API in memory, all together.
MAX_ADMIN_BODIES_BYTES = 1 << 20
# File descriptors that client connections cannot use.
RESERVED_FILE_DESCRIPTORS = 256
# After a shutdown, all requests have been answered. Slow clients need this time to read.
HTTP_CLOSE_TIMEOUT_S = 2
LISTEN_BACKLOG = 2048
# A connection ends four intervals after its client has disappeared.
TCP_KEEPALIVE_INTERVAL_S = 30


class _Server(uvicorn.Server):
    # Without signal handlers, because the process has two servers.
    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.connections = connections

    async def on_tick(self, counter: int) -> bool:
        # uvicorn calls this ten times a second.
        if counter % 10 == 0:
            self.connections.close_timed_out()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def close_connections(self) -> None:
        # Clients with keep-alive connections then reconnect, and the Service routes them to another
        # pod.
        for connection in list(self.server_state.connections):
            connection.shutdown()


def read_admin_token(file: Path, timeout_s: float) -> str:
    """Return the admin token in ``file``. Raises UsageError.

    In a pod, wait for the supervisor to write the file. Elsewhere, create a missing file.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        try:
            if write_token(str(file.parent)):
                log.info("admin token written", extra={"file": str(file), "mode": "0600"})
        except OSError as error:
            raise UsageError(f"cannot write the admin token to {file}: {error}") from None
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            token = ""
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the admin token from {file}: {error}") from None
        if token:
            return token
        if time.monotonic() >= deadline:
            raise UsageError(
                f"the admin token {file} is missing or empty after {timeout_s:g} s: check "
                "that the supervisor, which writes the token, is running and mounts the same "
                "run directory"
            )
        time.sleep(0.05)


def _open_listening_socket(host: str, port: int, flag: str) -> socket.socket:
    try:
        listener = bind_socket(host, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on port {port} of {host} ({flag}): {reason}") from None
    # Each connection inherits these options.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_KEEPALIVE_INTERVAL_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, TCP_KEEPALIVE_INTERVAL_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    try:
        listener.listen(LISTEN_BACKLOG)  # readers of engine.json may connect at once
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on port {port} of {host} ({flag}): {error.strerror}"
        ) from None
    return listener


@contextlib.contextmanager
def _report_run_dir_errors(settings: Settings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write to --run-dir {settings.run_dir}: {error}; use a writable "
            "directory with free space"
        ) from None


def _write_ports(settings: Settings, port: int, admin_port: int, boot_id: str) -> None:
    # For callers that started the engine with port 0.
    content: dict[str, Any] = {
        "pid": os.getpid(),
        "port": port,
        "admin_port": admin_port,
        "boot_id": boot_id,
    }
    file = settings.run_dir / PORTS_FILE_NAME
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(content))
    temporary.replace(file)


def _write_stacks_on_sigusr1(settings: Settings) -> None:
    path = make_stacks_path(settings.run_dir, "frontend", os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    stacks.remove_stale_stacks(settings.run_dir)
    faulthandler.register(signal.SIGUSR1, file=path.open("a"), all_threads=True, chain=False)


def run(settings: Settings) -> int:
    """Serve until a signal, a shutdown or a failure. Return the exit status. Raises UsageError."""
    set_subreaper()  # so that it becomes the parent of workers whose zygote has been killed
    host_memory.set_mmap_threshold()
    with _report_run_dir_errors(settings):
        _write_stacks_on_sigusr1(settings)
    wait_until_open(settings.run_dir)
    token = read_admin_token(
        settings.token_file, min(settings.startup_timeout_s, ADMIN_TOKEN_TIMEOUT_S)
    )
    tokenizer = Tokenizer(
        settings.model, settings.api.chat_template, settings.api.generation_config
    )
    log.info("checkpoint read", extra=tokenizer.checkpoint.make_summary())
    keys = None if settings.api_key_file is None else ApiKeys(settings.api_key_file)
    with (
        _open_listening_socket(settings.host, settings.port, "--port") as serving_socket,
        _open_listening_socket("127.0.0.1", settings.admin_port, "--admin-port") as admin_socket,
    ):
        return uvloop.run(_serve(settings, tokenizer, token, keys, serving_socket, admin_socket))


async def _serve(
    settings: Settings,
    tokenizer: Tokenizer,
    token: str,
    keys: ApiKeys | None,
    serving_socket: socket.socket,
    admin_socket: socket.socket,
) -> int:
    with _report_run_dir_errors(settings):
        engine = AsyncEngine(settings, tokenizer)
    tasks: set[asyncio.Task[Any]] = set()

    def start_background(coroutine: Any, name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(
            number,
            lambda: start_background(_shut_down(engine, settings.shutdown_timeout_s), "shutdown"),
        )
    sizes = BodySizes(
        accepts_images=engine.media.processors.image is not None,
        accepts_audio=engine.media.processors.audio is not None,
        max_bytes=settings.http.max_body_bytes,
    )
    preparer = Preparer(engine, settings.http.prepare_timeout_s)
    limits = settings.http.make_limits(_compute_max_connections(settings))
    budget = BodyBudget(
        lambda: settings.http.body_buffer_bytes or sizes.compute_buffer_bytes(engine.max_model_len),
        limits.max_connections,
    )
    answers = BodyBudget(
        lambda: answer_sizes.compute_buffer_bytes(engine.max_model_len), limits.max_connections
    )
    public: Any = serving.create_app(engine, BodyReader(limits, budget), sizes, preparer, answers)
    if keys is not None:
        public = ApiKeyMiddleware(public, keys)
    public = serving.add_cors(public, settings.api.allowed_origins)
    admin_limits = settings.http.make_limits(MAX_ADMIN_CONNECTIONS)
    admin_budget = BodyBudget(lambda: MAX_ADMIN_BODIES_BYTES, MAX_ADMIN_CONNECTIONS)
    servers = [
        _create_http_server(public, Connections(limits, refuse_connection, encode_error_body)),
        _create_http_server(
            admin.create_app(engine, token, BodyReader(admin_limits, admin_budget)),
            Connections(admin_limits, admin.refuse_connection, admin.encode_error_body),
        ),
    ]
    for name, server in zip(("serving", "admin"), servers, strict=True):
        engine.metrics.http.add(name, server.connections)
    engine.ledger.register(
        "http_bodies",
        lambda: budget.held_bytes + admin_budget.held_bytes,
        lambda: budget.max_held_bytes + admin_budget.max_held_bytes,
    )
    engine.ledger.register(
        "http_answers",
        lambda: answers.held_bytes + sum(server.connections.unsent_bytes for server in servers),
        lambda: (
            answers.max_held_bytes + sum(server.connections.max_unsent_bytes for server in servers)
        ),
    )
    engine.set_drain_callback(servers[0].close_connections)
    serve_tasks = [
        asyncio.create_task(server.serve(sockets=[listener]), name="http")
        for server, listener in zip(servers, (serving_socket, admin_socket), strict=True)
    ]
    port, admin_port = serving_socket.getsockname()[1], admin_socket.getsockname()[1]
    with _report_run_dir_errors(settings):
        _write_ports(settings, port, admin_port, engine.epochs.current.boot_id)
    log.info("listening", extra={"port": port, "admin_port": admin_port})
    preparer.start()
    starting = asyncio.create_task(engine.start(), name="start")
    starting.add_done_callback(lambda _: engine.metrics.loop.start())
    try:
        watched: set[asyncio.Future[Any]] = {engine.exit_code, starting}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return await engine.exit_code
    finally:
        starting.cancel()
        for server in servers:
            server.should_exit = True
        await asyncio.wait(serve_tasks, timeout=HTTP_CLOSE_TIMEOUT_S + 2)
        engine.metrics.loop.stop()
        preparer.close()
        await engine.workers.close()


def _compute_max_connections(settings: Settings) -> int:
    wanted = settings.http.max_connections or 2 * settings.max_queued
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + RESERVED_FILE_DESCRIPTORS:
        soft = min(hard, wanted + RESERVED_FILE_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = max(1, min(wanted, soft - RESERVED_FILE_DESCRIPTORS))
    if allowed < wanted:
        log.warning(
            "the limit of %d open files allows only %d of %d connections: raise the limit to "
            "%d with ulimit -n",
            soft,
            allowed,
            wanted,
            wanted + RESERVED_FILE_DESCRIPTORS,
            extra={"connections": allowed, "wanted": wanted, "open_files": soft},
        )
    return allowed


def _create_http_server(app: Any, connections: Connections) -> _Server:
    return _Server(
        uvicorn.Config(
            SlicedResponses(app),
            http=functools.partial(Connection, connections),  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=math.ceil(connections.limits.idle_timeout_s),
            timeout_graceful_shutdown=HTTP_CLOSE_TIMEOUT_S,
        ),
        connections,
    )


async def _shut_down(engine: AsyncEngine, timeout_s: float) -> None:
    await engine.operations.cancel()
    await engine.shut_down(timeout_s)
