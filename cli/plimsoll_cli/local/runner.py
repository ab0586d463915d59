"""Runs one replica on this machine, in the order in which a kubelet runs its pod.

The supervisor is a native sidecar: it starts before the engine, which waits for its admin token,
and it stops after the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import httpx

from plimsoll_api import supervisor_config
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import TOKEN_FILE
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local import model, plan
from plimsoll_cli.local.container import Container
from plimsoll_cli.local.plan import LOOPBACK, Plan, Watch

LIVE_TIMEOUT_S = 60.0
SUPERVISOR_STOP_S = 10.0
"""More than the launcher gives its own child."""
READY_MARGIN_S = 30.0
"""An engine gives up by itself, with a message, before we do (as in the rendered startup probe)."""
PROBE_PERIOD_S = 0.2
PROBE_TIMEOUT_S = 2.0

Say = Callable[[str], None]


async def prepare(
    service: InferenceService, root: Path, say: Say, environ: Mapping[str, str] | None = None
) -> Plan:
    """Plan ``service`` below ``root``, an absolute path: choose ports, provide the checkpoint."""
    folder, missing = model.resolve(service, root)
    if missing:
        await model.make(service, folder, say)
    chosen = free_ports(plan.wanted_ports(service))
    return plan.make(service, root, chosen, folder, os.environ if environ is None else environ)


class LocalReplica:
    """Engine and supervisor of one plan. ``engine`` and ``supervisor`` are its containers.

    Beside an engine that runs already there is only the supervisor.
    """

    def __init__(self, its_plan: Watch, say: Say) -> None:
        self.plan = its_plan
        self._engine = Container(its_plan.engine, say) if its_plan.engine else None
        self.supervisor = Container(its_plan.supervisor, say)

    @property
    def engine(self) -> Container:
        """Return the engine's container, of a plan that starts one."""
        assert self._engine is not None
        return self._engine

    async def start(self) -> None:
        """Start the replica and return when its engine is ready, if the plan waits for it.

        Raises :class:`RunError` with the last lines of the log of the container that does not get
        there.
        """
        self.supervisor.start()
        await self._reach(self.supervisor, f"{self.plan.probe_url}/live", LIVE_TIMEOUT_S)
        if self._engine is None:
            return
        self._engine.start()
        if self.plan.startup_timeout_s is not None:
            await self._reach(
                self._engine,
                f"{self.plan.serving_url}/ready",
                self.plan.startup_timeout_s + READY_MARGIN_S,
            )

    async def stop(self) -> None:
        """Stop the engine, with the time that its requests may take; then the supervisor."""
        if self._engine is not None:
            await self._engine.stop(self.plan.engine_stop_s)
        await self.supervisor.stop(SUPERVISOR_STOP_S)

    def kill(self) -> None:
        """End all processes of both containers at once."""
        for container in (self._engine, self.supervisor):
            if container is not None:
                container.kill()

    async def _reach(self, container: Container, url: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
            while time.monotonic() < deadline:
                container.check()
                if container.last_exit is not None:
                    raise self._error(container, container.last_exit)
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(url)).status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(PROBE_PERIOD_S)
        raise self._error(container, f"was not ready within {timeout_s:g} s")

    def _error(self, container: Container, what: str) -> RunError:
        return RunError(
            f"the {container.command.name} {what}; last lines of {container.command.log}:\n"
            f"{container.tail() or '(it is empty)'}"
        )


@contextlib.asynccontextmanager
async def running(its_plan: Watch, say: Say) -> AsyncIterator[LocalReplica]:
    """Run a replica during the block, ready at its beginning; end every process of it afterwards.

    If the block is canceled while it stops, it kills the processes instead of waiting for them.
    """
    replica = LocalReplica(its_plan, say)
    with _own(its_plan.root):
        _write_files(its_plan)
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


def _own(root: Path) -> IO[str]:
    """Make the run directory and lock it; closing the returned file unlocks it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"--run-dir {root}: another plimsoll runs there: stop it or use another directory"
        ) from None
    except OSError as error:
        raise _unusable(root, error) from None
    return lock


def _write_files(its_plan: Watch) -> None:
    """Write the directories and files of a new pod; the journal of earlier runs stays."""
    config = Path(its_plan.places.config_file)
    try:
        for folder in (its_plan.run_dir, its_plan.state_dir, config.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # What a memory volume would have lost with the pod.
        for name in (TOKEN_FILE, "engine.json"):
            (its_plan.run_dir / name).unlink(missing_ok=True)
        for command in (its_plan.engine, its_plan.supervisor):
            if command is not None:
                command.log.write_bytes(b"")
        config.write_bytes(supervisor_config.encode(its_plan.config))
    except OSError as error:
        raise _unusable(its_plan.root, error) from None


def _unusable(root: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--run-dir {error.filename or root}: {error.strerror}: use a writable directory"
    )


PORT_RANGE = range(20_000, 32_000)
"""Below Linux's default ephemeral range (32768 to 60999, ip(7)), so that no outgoing connection
takes a port between its choice and its use."""
PORT_TRIES = 200


def free_ports(wanted: Sequence[int | None]) -> list[int]:
    """Return each wanted port that is free on the loopback, and another free one for the rest.

    None stands for any port. All of them differ. Raises OSError if none is free.
    """
    with contextlib.ExitStack() as held:
        return [_hold(port, held) for port in wanted]


def _hold(wanted: int | None, held: contextlib.ExitStack) -> int:
    others = random.sample(PORT_RANGE, PORT_TRIES)
    for port in others if wanted is None else [wanted, *others]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # As the servers do: connections of an earlier run that linger do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen(1)
        except OSError:
            listener.close()
            continue
        held.enter_context(contextlib.closing(listener))
        return port
    raise OSError(
        f"no free TCP port for {wanted or 'a replica'} on {LOOPBACK}, tried {PORT_TRIES} others"
    )
