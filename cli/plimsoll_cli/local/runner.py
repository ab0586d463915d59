"""Run one replica on this machine, in the order of a pod with a native sidecar.

The supervisor starts before the engine, which needs its admin token, and stops after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO

import httpx

from plimsoll_api import supervisor_config
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import TOKEN_FILE
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import model, plan
from plimsoll_cli.local.container import Container
from plimsoll_cli.local.plan import LOOPBACK_ADDRESS, Plan, SupervisorPlan

SUPERVISOR_START_TIMEOUT_S = 60.0
SUPERVISOR_STOP_TIMEOUT_S = 10.0
"""Time until a stopping supervisor is killed, longer than its launcher's grace period."""
READY_MARGIN_S = 30.0
"""Time to wait in addition to the engine's startup timeout, so that the engine fails first, with
a message."""
PROBE_PERIOD_S = 0.2
PROBE_TIMEOUT_S = 2.0

PrintLine = Callable[[str], None]


async def prepare_plan(service: InferenceService, root: Path, print_line: PrintLine) -> Plan:
    """Choose free ports, provide the checkpoint, and return the plan of ``service``.

    ``root`` is the run directory as an absolute path. Raises UsageError and RunError.
    """
    folder, missing = model.locate_checkpoint(service, root)
    if missing:
        await model.prepare_checkpoint(service, folder, print_line)
    chosen = choose_free_ports(plan.list_requested_ports(service))
    return plan.plan_replica(service, root, chosen, folder, os.environ)


class LocalReplica:
    """Running engine and supervisor of a plan, or only its supervisor."""

    def __init__(self, plan: SupervisorPlan, print_line: PrintLine) -> None:
        self.plan = plan
        self._engine = Container(plan.engine, print_line) if plan.engine else None
        self.supervisor = Container(plan.supervisor, print_line)

    @property
    def engine(self) -> Container:
        """Container of the engine; the plan must contain one."""
        assert self._engine is not None
        return self._engine

    async def start(self) -> None:
        """Start the processes, and wait until the supervisor and the engine are ready.

        Without a startup timeout, do not wait for the engine. Raises :class:`RunError` with the
        last log lines of the container that failed.
        """
        self.supervisor.start()
        await self._wait_until_ready(
            self.supervisor, f"{self.plan.probe_url}/live", SUPERVISOR_START_TIMEOUT_S
        )
        if self._engine is None:
            return
        self._engine.start()
        if self.plan.startup_timeout_s is not None:
            await self._wait_until_ready(
                self._engine,
                f"{self.plan.serving_url}/ready",
                self.plan.startup_timeout_s + READY_MARGIN_S,
            )

    async def stop(self) -> None:
        """Stop the engine, which first ends its requests, and then the supervisor."""
        if self._engine is not None:
            await self._engine.stop(self.plan.engine_stop_s)
        await self.supervisor.stop(SUPERVISOR_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill all processes of both containers."""
        for container in (self._engine, self.supervisor):
            if container is not None:
                container.kill()

    async def _wait_until_ready(self, container: Container, url: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            while time.monotonic() < deadline:
                container.raise_start_error()
                if container.last_exit is not None:
                    raise self._make_container_error(container, container.last_exit)
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(url)).status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(PROBE_PERIOD_S)
        raise self._make_container_error(container, f"was not ready within {timeout_s:g} s")

    def _make_container_error(self, container: Container, problem: str) -> RunError:
        return RunError(
            f"the {container.command.name} {problem}; the last lines of {container.command.log}"
            f" are:\n{container.read_log_tail() or '(it is empty)'}"
        )


@contextlib.asynccontextmanager
async def run_replica(plan: SupervisorPlan, print_line: PrintLine) -> AsyncIterator[LocalReplica]:
    """Return a context in which a replica is ready, and at whose end it is stopped.

    If the stop is cancelled, all processes are killed.
    """
    replica = LocalReplica(plan, print_line)
    with _lock_run_dir(plan.root):
        _write_files(plan)
        try:
            await replica.start()
            yield replica
        finally:
            stopping = asyncio.ensure_future(replica.stop())
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                replica.kill()
                await stopping
                raise


# The lock is held until the returned file is closed. Raises UsageError.
def _lock_run_dir(root: Path) -> IO[str]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"--run-dir {root}: another plimsoll process uses this directory: stop that process,"
            " or use another directory"
        ) from None
    except OSError as error:
        raise _make_run_dir_error(root, error) from None
    return lock


# Files of earlier runs are deleted, except for the journal.
def _write_files(plan: SupervisorPlan) -> None:
    config = Path(plan.layout.config_file)
    try:
        for folder in (plan.run_dir, plan.state_dir, config.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Delete files that a pod would have in a memory volume.
        for name in (TOKEN_FILE, "engine.json"):
            (plan.run_dir / name).unlink(missing_ok=True)
        for command in (plan.engine, plan.supervisor):
            if command is not None:
                command.log.write_bytes(b"")
        config.write_bytes(supervisor_config.encode_config(plan.config))
    except OSError as error:
        raise _make_run_dir_error(plan.root, error) from None


def _make_run_dir_error(root: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--run-dir {error.filename or root}: {error.strerror}: use a writable directory"
    )


PORT_RANGE = range(20_000, 32_000)
"""Range of free ports to choose from, below Linux's ephemeral range (32768 to 60999, ip(7)), so
that no outgoing connection takes a chosen port."""
MAX_PORT_TRIES = 200


def choose_free_ports(requested_ports: Sequence[int | None]) -> list[int]:
    """Return a free port on the loopback address for each requested port, all different.

    A requested port is returned if it is free. Raises OSError if no port is free.
    """
    with contextlib.ExitStack() as reserved_ports:
        return [_bind_port(port, reserved_ports) for port in requested_ports]


def _bind_port(requested_port: int | None, listeners: contextlib.ExitStack) -> int:
    others = random.sample(PORT_RANGE, MAX_PORT_TRIES)
    for port in others if requested_port is None else [requested_port, *others]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Like the servers, ignore connections in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK_ADDRESS, port))
            listener.listen(1)
        except OSError:
            listener.close()
            continue
        listeners.enter_context(contextlib.closing(listener))
        return port
    raise OSError(
        f"no TCP port on {LOOPBACK_ADDRESS} is free for {requested_port or 'the replica'}: tried"
        f" {MAX_PORT_TRIES} ports; stop servers that you do not need"
    )
