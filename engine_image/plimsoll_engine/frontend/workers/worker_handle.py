"""State of one worker, as the frontend sees it: forked, prepared, ready, stopped, reaped.

A worker has one process per rank. They start and exit together, and only rank 0 exchanges messages
with the frontend.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll_api.admin import Epoch
from plimsoll_engine.frontend.workers.failures import WorkerLostError
from plimsoll_engine.frontend.workers.worker_link import WorkerLink
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.zygote_ipc import Exited, make_rendezvous_paths
from plimsoll_engine.process.stacks import make_stacks_path, truncate_if_large

log = logging.getLogger(__name__)

SIGTERM_GRACE_S = 1.0
SIGKILL_GRACE_S = 5.0
STACKS_TIMEOUT_S = 1.0
# A worker whose socket has closed is killed if it does not exit within this time.
REAP_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class StopOutcome:
    """Outcome of a request to stop a worker.

    Attributes:
        stopped: Final message of the worker; None if it sent none.
        signals: Names of the signals that were sent to the worker.
        stacks: File with the stack traces of a hung worker; None without one.

    """

    stopped: worker_ipc.StopResult | None
    signals: tuple[str, ...] = ()
    stacks: Path | None = None


class WorkerHandle:
    """One worker and its processes.

    ``on_lost`` receives the reason if a ready worker exits unexpectedly.
    """

    def __init__(
        self,
        epoch: Epoch,
        run_dir: str,
        media_cache_bytes: int,
        num_ranks: int,
        on_message: Callable[[WorkerHandle, worker_ipc.FromWorker], None],
        on_lost: Callable[[WorkerHandle, str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = epoch
        # Process IDs of the ranks, by rank.
        self.pids: list[int] = []
        self._ranks = num_ranks
        self._reaped: set[int] = set()
        self.link = WorkerLink(
            epoch.number, media_cache_bytes, self._on_link_message, self._on_disconnect
        )
        self.prepared: asyncio.Future[worker_ipc.Prepared] = loop.create_future()
        self.ready: asyncio.Future[worker_ipc.Ready] = loop.create_future()
        self.stopped: asyncio.Future[worker_ipc.StopResult] = loop.create_future()
        self.exited = asyncio.Event()
        self._run_dir = run_dir
        self._on_message = on_message
        self._on_lost = on_lost
        self._stopping = False
        self._lost = False
        self._reaping: asyncio.Task[None] | None = None
        for stage in (self.prepared, self.ready):
            # Mark the exception as retrieved, because the task may be awaiting another future.
            stage.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def pid(self) -> int | None:
        """Process ID of rank 0; None before its fork."""
        return self.pids[0] if self.pids else None

    @property
    def live_pids(self) -> list[int]:
        """Process IDs of the ranks that have not been reaped yet."""
        return [pid for pid in self.pids if pid not in self._reaped]

    @property
    def is_gone(self) -> bool:
        """Whether the worker has exited or sent its final message."""
        return self.exited.is_set() or self.stopped.done()

    @property
    def is_lost(self) -> bool:
        """Whether the worker has exited or is about to exit."""
        return self.exited.is_set() or self._lost

    async def stop(self, grace_s: float, should_hand_over: bool = False) -> StopOutcome:
        """Ask the worker to stop. Kill it if it has not stopped after ``grace_s`` seconds.

        Return when the worker has released all memory. It exits after :meth:`dismiss`.
        """
        if self.stopped.done():
            return StopOutcome(self.stopped.result())
        if self.exited.is_set() or not self.pids:  # it may not be forked yet
            return StopOutcome(None)
        self._stopping = True
        self.link.send(worker_ipc.Stop(should_hand_over, time.monotonic()))
        if await wait_with_timeout(wait_for_future_or_event(self.stopped, self.exited), grace_s):
            return StopOutcome(self.stopped.result() if self.stopped.done() else None)
        stacks = await self.dump_stacks()
        signals = await self.kill()
        return StopOutcome(None, signals, stacks)

    def finish_forking(self) -> None:
        """Record that no further rank will be forked."""
        self._ranks = len(self.pids)
        if len(self._reaped) == self._ranks:
            self.on_exit("not all ranks of the worker could be started")

    def dismiss(self) -> None:
        """Let the worker exit after its final message."""
        self.link.drop()

    async def kill(self) -> tuple[str, ...]:
        """Send SIGTERM, then SIGKILL if needed. Return the names of the signals that were sent.

        The event ``exited`` is not set if a process survives SIGKILL.
        """
        self._stopping = True
        sent: list[str] = []
        for number, grace_s in (
            (signal.SIGTERM, SIGTERM_GRACE_S),
            (signal.SIGKILL, SIGKILL_GRACE_S),
        ):
            if self.exited.is_set() or not self.pids:
                break
            if self._send_signal(number):
                sent.append(number.name)
            await wait_with_timeout(self.exited.wait(), grace_s)
        self.link.drop()
        return tuple(sent)

    async def dump_stacks(self) -> Path | None:
        """Make all ranks write their stack traces to files, even if they hang.

        Return the file of rank 0; None if rank 0 wrote none.
        """
        if self.pid is None or self.exited.is_set():
            return None
        for pid in self.live_pids[1:]:
            if make_stacks_path(self._run_dir, "worker", pid).exists():
                send_signal(pid, signal.SIGUSR1)
        path = make_stacks_path(self._run_dir, "worker", self.pid)
        before = truncate_if_large(path)
        if not path.exists() or not send_signal(self.pid, signal.SIGUSR1):
            return None  # without the file, there is no handler, and the signal would be fatal
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        while time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            if path.exists() and path.stat().st_size > before:
                return path
        return None

    def kill_without_grace(self, reason: str) -> None:
        """Kill the worker for ``reason`` without a grace period."""
        self.mark_lost(reason)
        self._send_signal(signal.SIGKILL)

    def on_rank_exit(self, message: Exited) -> None:
        """Record that a rank exited. If its exit was unexpected, kill the other ranks."""
        self._reaped.add(message.pid)
        if len(self._reaped) == self._ranks:
            self.on_exit(describe_exit(message))
        elif not self.stopped.done():
            self.kill_without_grace(describe_exit(message))

    def on_exit(self, reason: str) -> None:
        """Record that all processes of the worker have exited."""
        self.exited.set()
        self.mark_lost(reason)
        self.link.drop()
        self.remove_files()

    def remove_files(self) -> None:
        """Remove the files that killed ranks left behind."""
        for path in make_rendezvous_paths(self._run_dir, self.epoch.number):
            with contextlib.suppress(OSError):  # no such file, or a read-only directory
                path.unlink()

    def _send_signal(self, signal_number: signal.Signals) -> bool:
        return sum(send_signal(pid, signal_number) for pid in self.live_pids) > 0

    def mark_lost(self, reason: str, is_permanent: bool = False) -> None:
        """Record that the worker is lost. Call ``on_lost`` unless the worker was asked to stop."""
        if self._lost:
            return
        self._lost = True
        if not self.ready.done():
            for stage in (self.prepared, self.ready):
                if not stage.done():
                    stage.set_exception(WorkerLostError(reason, is_permanent))
        elif not self._stopping:
            self._on_lost(self, reason)

    def _on_link_message(self, message: worker_ipc.FromWorker) -> None:
        match message:
            case worker_ipc.Prepared() if not self.prepared.done():
                self.prepared.set_result(message)
            case worker_ipc.Ready() if not self.ready.done():
                self.ready.set_result(message)
            case worker_ipc.StopResult() if not self.stopped.done():
                message.stages_s["answered"] = max(0.0, time.monotonic() - message.sent)
                self.stopped.set_result(message)
            case worker_ipc.WorkerFailure():
                self.mark_lost(message.message, message.permanent)
        self._on_message(self, message)

    def _on_disconnect(self) -> None:
        if not self.exited.is_set() and not self._stopping:
            self._reaping = asyncio.create_task(self._reap(), name="worker reaper")

    async def _reap(self) -> None:
        if not await wait_with_timeout(self.exited.wait(), REAP_TIMEOUT_S):
            self._send_signal(signal.SIGKILL)


def describe_exit(message: Exited) -> str:
    """Return a description of a process's exit, such as ``worker 71 was killed by SIGKILL``."""
    process = f"{message.role} {message.pid}" + (f", rank {message.rank}," if message.rank else "")
    if message.status < 0:
        with contextlib.suppress(ValueError):
            return f"{process} was killed by {signal.Signals(-message.status).name}"
    return f"{process} exited with status {message.status}"


def send_signal(pid: int, signal_number: signal.Signals) -> bool:
    """Send a signal to the process ``pid``. Return False if the process does not exist."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return False
    return True


async def wait_for_future_or_event(future: asyncio.Future[Any], event: asyncio.Event) -> None:
    """Wait for ``future`` or ``event``, without cancelling ``future``."""
    waiting = asyncio.ensure_future(event.wait())
    both: set[asyncio.Future[Any]] = {future, waiting}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def wait_with_timeout(awaitable: Any, timeout_s: float) -> bool:
    """Wait for ``awaitable`` for up to ``timeout_s`` seconds. Return True if it has finished."""
    try:
        async with asyncio.timeout(timeout_s):
            await awaitable
    except TimeoutError:
        return False
    return True
