"""The frontend process: two HTTP servers and the engine on one event loop, from start to exit.

The loop is uvloop's: each connection of asyncio's own leaves a cycle of five objects behind (a
transport that keeps a method of itself), so that some of the collections that stop every stream
would have work.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from plimsoll_engine.api import admin, serving
from plimsoll_engine.api.auth import ApiKeys, Guard
from plimsoll_engine.frontend.engine import Engine
from plimsoll_engine.frontend.tokenizer import Tokenizer
from plimsoll_engine.settings import ENGINE_FILE, Settings, UsageError
from plimsoll_engine.zygote_ipc import stacks_path

log = logging.getLogger(__name__)

TOKEN_TIMEOUT_S = 30.0
# After shutdown every request is answered; this is for clients that read slowly.
HTTP_CLOSE_TIMEOUT_S = 2
BACKLOG = 2048


class _Server(uvicorn.Server):
    """Signals are the process's business: two servers share it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def part(self) -> None:
        """Idle connections close, the others with the answer that they are giving. A client that
        keeps one connection alive would otherwise not notice that the Service leads elsewhere.
        """
        for connection in list(self.server_state.connections):
            connection.shutdown()


def read_token(file: Path, timeout_s: float) -> str:
    """The admin token, which the supervisor writes; waits for it. Raises UsageError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            token = ""
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"admin token {file}: cannot be read: {error}") from None
        if token:
            return token
        if time.monotonic() >= deadline:
            raise UsageError(
                f"admin token {file}: missing or empty after {timeout_s:g} s; the supervisor "
                "writes it: check that both containers mount the run directory"
            )
        time.sleep(0.05)


def _bind(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named: asyncio turns Nagle off for sockets that say they are TCP only.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # who reads engine.json may connect at once
    except OSError as error:
        listener.close()
        raise UsageError(f"{flag} {port} on {host}: {error.strerror}") from None
    return listener


def _record(settings: Settings, port: int, admin_port: int, boot_id: str) -> None:
    """Tell whoever started us with port 0 where we listen; replaced in one step."""
    content: dict[str, Any] = {
        "pid": os.getpid(),
        "port": port,
        "admin_port": admin_port,
        "boot_id": boot_id,
    }
    file = settings.run_dir / ENGINE_FILE
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(content))
    temporary.replace(file)


def _write_stacks_on_sigusr1(settings: Settings) -> None:
    path = stacks_path(settings.run_dir, "frontend", os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGUSR1, file=path.open("a"), all_threads=True, chain=False)


def run(settings: Settings) -> int:
    """Serve until a signal, a shutdown call or a failure; the exit status. Raises UsageError."""
    _write_stacks_on_sigusr1(settings)
    token = read_token(settings.token_file, min(settings.startup_timeout_s, TOKEN_TIMEOUT_S))
    tokenizer = Tokenizer(settings.model)
    keys = None if settings.api_key_file is None else ApiKeys(settings.api_key_file)
    with (
        _bind(settings.host, settings.port, "--port") as serving_socket,
        _bind("127.0.0.1", settings.admin_port, "--admin-port") as admin_socket,
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
    engine = Engine(settings, tokenizer)
    tasks: set[asyncio.Task[Any]] = set()

    def background(coroutine: Any, name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(
            number, lambda: background(_terminate(engine, settings.shutdown_timeout_s), "shutdown")
        )
    public: Any = serving.app(engine)
    if keys is not None:
        public = Guard(public, keys)
    servers = [_http(public), _http(admin.app(engine, token))]
    engine.on_draining = servers[0].part
    serve_tasks = [
        asyncio.create_task(server.serve(sockets=[listener]), name="http")
        for server, listener in zip(servers, (serving_socket, admin_socket), strict=True)
    ]
    port, admin_port = serving_socket.getsockname()[1], admin_socket.getsockname()[1]
    _record(settings, port, admin_port, engine.epochs.current.boot_id)
    log.info("listening", extra={"port": port, "admin_port": admin_port})
    starting = asyncio.create_task(engine.start(), name="start")
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
        await engine.workers.close()


def _http(app: Any) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=HTTP_CLOSE_TIMEOUT_S,
        )
    )


async def _terminate(engine: Engine, timeout_s: float) -> None:
    await engine.operations.cancel()
    await engine.shutdown(timeout_s)
