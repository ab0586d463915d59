"""Frontend side of the zygote: start it, request forks, and report the exits of its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable

import msgspec

from plimsoll_api.admin import Role
from plimsoll_engine.frontend.workers.failures import ForkRefusedError, ZygoteLostError
from plimsoll_engine.messages import zygote_ipc
from plimsoll_engine.messages.framing import read_body
from plimsoll_engine.messages.zygote_ipc import (
    Exited,
    Forked,
    ForkFailed,
    WorkerConfig,
    ZygoteReady,
)

FORK_TIMEOUT_S = 10.0


# A fork copies only one thread, so OpenMP is limited to one. PASSIVE stops OpenMP's threads from
# spinning between small operations. Without it, 600 tokens took 27 s instead of 2 s on a busy
# machine (2 cores, load 4).
SINGLE_THREAD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


class ZygoteClient:
    """Client of one zygote process.

    ``on_exit`` is called for each child that exits, ``on_lost`` once if the zygote fails.
    """

    def __init__(
        self,
        config: WorkerConfig,
        weights: socket.socket | None,
        on_exit: Callable[[Exited], None],
        on_lost: Callable[[ZygoteClient, str], None],
    ) -> None:
        self._config = config
        self._weights = weights
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[ZygoteReady] | None = None
        self._forked: asyncio.Future[int] | None = None
        self._forks = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process ID of the zygote; None if it is not running."""
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> ZygoteReady:
        """Start the zygote, and return its Ready message. Raises ZygoteLostError or OSError."""
        self._ready = asyncio.get_running_loop().create_future()
        parent_end, child_end = socket.socketpair()
        try:
            await self._spawn(child_end)
        except BaseException:
            parent_end.close()
            raise
        reader, self._writer = await asyncio.open_connection(sock=parent_end)
        self._reading = asyncio.create_task(self._read_messages(reader), name="zygote reader")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ready
        except TimeoutError:
            await self.close()
            raise ZygoteLostError(f"the zygote was not ready within {timeout_s:g} s") from None

    async def _spawn(self, child_end: socket.socket) -> None:
        inherited = [child_end.fileno()]
        flags: list[str] = []
        if self._weights is not None:
            inherited.append(self._weights.fileno())
            flags = ["--weights-fd", str(self._weights.fileno())]
        with child_end:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "plimsoll_engine.worker.zygote",
                "--control-fd",
                str(child_end.fileno()),
                *flags,
                "--config",
                msgspec.json.encode(self._config).decode(),
                pass_fds=inherited,
                stdin=asyncio.subprocess.DEVNULL,
                env=os.environ | SINGLE_THREAD_ENVIRONMENT,
            )

    async def fork(self, number: int, role: Role = Role.WORKER, rank: int = 0) -> int:
        """Fork a process, and return its PID. Raises ForkRefusedError or ZygoteLostError.

        ``number`` is the worker's epoch or the weight server's number.
        """
        async with self._forks:  # a standby can be forked at any time
            return await self._fork(zygote_ipc.Fork(number, role, rank))

    async def _fork(self, request: zygote_ipc.Fork) -> int:
        if self._writer is None:
            raise ZygoteLostError("the zygote is not running")
        self._forked = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(zygote_ipc.encode_frame(request))
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await self._forked
        except TimeoutError:
            raise ZygoteLostError(f"the zygote did not fork within {FORK_TIMEOUT_S:g} s") from None
        finally:
            self._forked = None

    async def wait_until_exited(self) -> None:
        """Wait until the zygote has exited. Its children are then children of this process."""
        if self._process is not None:
            await self._process.wait()

    def kill(self) -> None:
        """Kill only the zygote. Its children continue as children of this process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """Stop the zygote and every process that it forked."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        if self._process is None:
            return
        try:
            async with asyncio.timeout(2.0):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._process = None

    async def _read_messages(self, reader: asyncio.StreamReader) -> None:
        reason = "the zygote exited"
        try:
            while (body := await read_body(reader)) is not None:
                self._handle_message(zygote_ipc.from_zygote_decoder.decode(body))
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            reason = f"the zygote sent an invalid message: {error}"
        for waiting in (self._ready, self._forked):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ZygoteLostError(reason))
                waiting.exception()  # mark as retrieved: the waiter may have been cancelled
        self._on_lost(self, reason)

    def _handle_message(self, message: zygote_ipc.FromZygote) -> None:
        match message:
            case ZygoteReady():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case Forked(pid=pid):
                if self._forked is not None and not self._forked.done():
                    self._forked.set_result(pid)
            case ForkFailed(message=reason):
                if self._forked is not None and not self._forked.done():
                    self._forked.set_exception(ForkRefusedError(reason))
            case Exited():
                self._on_exit(message)
