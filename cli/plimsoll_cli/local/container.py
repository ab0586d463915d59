"""Container of the local replica: a process that is restarted when it ends.

As in a PID namespace, its whole process group is killed when its first process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from plimsoll_cli.local.plan import Command

FIRST_BACK_OFF_S = 1.0
MAX_BACK_OFF_S = 10.0
BACK_OFF_RESET_S = 60.0
"""Time after which the next restart has no delay again, shorter than the kubelet's 10 min."""
MAX_LOG_TAIL_LINES = 20
MAX_LOG_TAIL_BYTES = 64 << 10


class Container:
    """Process that is restarted until :meth:`stop` is called.

    ``on_exit`` is called with a message after each unexpected exit.
    """

    def __init__(self, command: Command, on_exit: Callable[[str], None]) -> None:
        self.command = command
        self.starts = 0
        self.last_exit: str | None = None
        self.pid: int | None = None
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._run_task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """Start the process; it is restarted whenever it ends."""
        self._run_task = asyncio.create_task(self._run_forever(), name=self.command.name)

    def raise_start_error(self) -> None:
        """Raise the error that prevented the process from starting, if there was one."""
        if self._run_task is not None and self._run_task.done() and not self._run_task.cancelled():
            self._run_task.result()

    async def _run_forever(self) -> None:
        back_off = 0.0
        while not self._stopping.is_set():
            began = time.monotonic()
            process = self._process = await self._start_process()
            if self._stopping.is_set():  # set during the wait
                self._terminate()
            status = await process.wait()
            self._kill_process_group(process.pid)
            self.pid = None
            if self._stopping.is_set():
                return
            self.last_exit = describe_exit(status)
            steady = time.monotonic() - began > BACK_OFF_RESET_S
            self._on_exit(f"{self.command.name} {self.last_exit}, restarting")
            # Like the kubelet, restart without a delay after the first exit.
            await self._wait_or_stop(0.0 if steady else back_off)
            back_off = (
                FIRST_BACK_OFF_S
                if steady
                else min(max(FIRST_BACK_OFF_S, 2 * back_off), MAX_BACK_OFF_S)
            )

    async def _wait_or_stop(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _start_process(self) -> asyncio.subprocess.Process:
        dies_with_us = (sys.executable, "-m", "plimsoll_cli.local.parent_death", str(os.getpid()))
        with self.command.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *dies_with_us,
                *self.command.argv,
                env=dict(self.command.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1
        self.pid = process.pid
        return process

    def _kill_process_group(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after ``grace_s`` seconds; wait until the process has ended."""
        self._stopping.set()
        if self._run_task is None:
            return
        self._terminate()
        await asyncio.wait([self._run_task], timeout=grace_s)
        self.kill()
        await asyncio.gather(
            self._run_task, return_exceptions=True
        )  # raise_start_error() reports errors

    def _terminate(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Kill all processes of the container."""
        process = self._process
        if process is not None and process.returncode is None:
            self._kill_process_group(process.pid)

    def read_log_tail(self) -> str:
        """Return the last lines of the log; empty if it cannot be read."""
        try:
            with self.command.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-MAX_LOG_TAIL_LINES:])


def describe_exit(status: int) -> str:
    """Return an exit status in words: ``ended with status 2``, or ``was killed by SIGKILL``."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
