"""One worker as the frontend sees it: forked, prepared, ready, stopped, reaped.

It may be several processes, one a rank: rank 0 speaks for all, and they live and end together.
Each of these is a future or an event that is set once; what ends a worker early is raised from the
first future that was not reached.
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
from plimsoll_engine.frontend.workers.failures import WorkerLost
from plimsoll_engine.frontend.workers.worker_link import WorkerLink
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.zygote_ipc import Exited, rendezvous_paths
from plimsoll_engine.process.stacks import bounded_size, stacks_path

log = logging.getLogger(__name__)

TERM_GRACE_S = 1.0
KILL_GRACE_S = 5.0
STACKS_TIMEOUT_S = 1.0
# A worker whose socket closed is about to be reaped; beyond this it is killed.
REAP_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class StopOutcome:
    """How a worker went. ``stopped`` is its last word, None where it gave none."""

    stopped: worker_ipc.Stopped | None
    signals: tuple[str, ...] = ()
    stacks: Path | None = None


class WorkerHandle:
    """``on_message`` gets what it says; ``on_lost`` why a ready one ended uninvited."""

    def __init__(
        self,
        epoch: Epoch,
        run_dir: str,
        media_cache_bytes: int,
        ranks: int,
        on_message: Callable[[WorkerHandle, worker_ipc.FromWorker], None],
        on_lost: Callable[[WorkerHandle, str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.epoch = epoch
        self.pids: list[int] = []
        """The process IDs of the forked ranks, in their order."""
        self._ranks = ranks
        self._reaped: set[int] = set()
        self.link = WorkerLink(epoch.number, media_cache_bytes, self._received, self._disconnected)
        self.prepared: asyncio.Future[worker_ipc.Prepared] = loop.create_future()
        self.ready: asyncio.Future[worker_ipc.Ready] = loop.create_future()
        self.stopped: asyncio.Future[worker_ipc.Stopped] = loop.create_future()
        self.exited = asyncio.Event()
        self._run_dir = run_dir
        self._on_message = on_message
        self._on_lost = on_lost
        self._stopping = False
        self._lost = False
        self._reaping: asyncio.Task[None] | None = None
        for reached in (self.prepared, self.ready):
            # Its failure may come while something else is awaited: that is then what is raised.
            reached.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def pid(self) -> int | None:
        """Return the process ID of rank 0."""
        return self.pids[0] if self.pids else None

    @property
    def living(self) -> list[int]:
        """Process ids of the worker's ranks that nobody has reaped."""
        return [pid for pid in self.pids if pid not in self._reaped]

    @property
    def gone(self) -> bool:
        """It serves nobody any more: reaped, or it said its last word."""
        return self.exited.is_set() or self.stopped.done()

    @property
    def gone_or_lost(self) -> bool:
        """It will never serve: reaped, or on its way there."""
        return self.exited.is_set() or self._lost

    async def stop(self, grace_s: float, hand_over: bool = False) -> StopOutcome:
        """Ask it to end, then make it. Needs no cooperation of a hung one.

        With ``hand_over`` a successor may go on with what it leaves in the KV pool.

        Its last word is enough: everything is given back by then. It stays until it is dismissed,
        so that the next worker need not wait while the driver takes the process's context down.
        """
        if self.stopped.done():
            return StopOutcome(self.stopped.result())
        if self.exited.is_set() or not self.pids:  # it may not have been forked yet
            return StopOutcome(None)
        self._stopping = True
        self.link.send(worker_ipc.Stop(hand_over, time.monotonic()))
        if await within(either(self.stopped, self.exited), grace_s):
            return StopOutcome(self.stopped.result() if self.stopped.done() else None)
        stacks = await self.dump_stacks()
        signals = await self.kill()
        return StopOutcome(None, signals, stacks)

    def forked(self) -> None:
        """Note that no further rank of it is forked."""
        self._ranks = len(self.pids)
        if len(self._reaped) == self._ranks:
            self.all_reaped("not all of its ranks could be started")

    def dismiss(self) -> None:
        """Let a worker exit that has said its last word."""
        self.link.drop()

    async def kill(self) -> tuple[str, ...]:
        """SIGTERM, then SIGKILL; which of them were sent. ``exited`` says whether it helped."""
        self._stopping = True
        sent: list[str] = []
        for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
            if self.exited.is_set() or not self.pids:
                break
            if self._signal(number):
                sent.append(number.name)
            await within(self.exited.wait(), grace_s)
        self.link.drop()
        return tuple(sent)

    async def dump_stacks(self) -> Path | None:
        """Return the file with rank 0's stacks as of now, also while it hangs; None where unknown.

        The other ranks write theirs beside it.
        """
        if self.pid is None or self.exited.is_set():
            return None
        for pid in self.living[1:]:
            if stacks_path(self._run_dir, "worker", pid).exists():
                send_signal(pid, signal.SIGUSR1)
        path = stacks_path(self._run_dir, "worker", self.pid)
        before = bounded_size(path)
        if not path.exists() or not send_signal(self.pid, signal.SIGUSR1):
            return None  # no handler is installed before the file exists: the signal would kill
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        while time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            if path.exists() and path.stat().st_size > before:
                return path
        return None

    def cut(self, reason: str) -> None:
        """End a worker at once that cannot go on, for a reason that it does not know."""
        self.lose(reason)
        self._signal(signal.SIGKILL)

    def reaped(self, message: Exited) -> None:
        """Take in that a rank has ended.

        Where that was not its turn the others are of no use any more.
        """
        self._reaped.add(message.pid)
        if len(self._reaped) == self._ranks:
            self.all_reaped(describe_exit(message))
        elif not self.stopped.done():
            self.cut(describe_exit(message))

    def all_reaped(self, reason: str) -> None:
        """No process of the worker is left: nothing more will come from it."""
        self.exited.set()
        self.lose(reason)
        self.link.drop()
        self.clear()

    def clear(self) -> None:
        """Remove the files that killed ranks leave behind."""
        for path in rendezvous_paths(self._run_dir, self.epoch.number):
            with contextlib.suppress(OSError):  # read-only: also where there is no such file
                path.unlink()

    def _signal(self, number: signal.Signals) -> bool:
        """To every rank that lives; False where none does."""
        return sum(send_signal(pid, number) for pid in self.living) > 0

    def lose(self, reason: str, permanent: bool = False) -> None:
        """Once; a worker that was told to stop is not lost."""
        if self._lost:
            return
        self._lost = True
        if not self.ready.done():
            for reached in (self.prepared, self.ready):
                if not reached.done():
                    reached.set_exception(WorkerLost(reason, permanent))
        elif not self._stopping:
            self._on_lost(self, reason)

    def _received(self, message: worker_ipc.FromWorker) -> None:
        match message:
            case worker_ipc.Prepared() if not self.prepared.done():
                self.prepared.set_result(message)
            case worker_ipc.Ready() if not self.ready.done():
                self.ready.set_result(message)
            case worker_ipc.Stopped() if not self.stopped.done():
                message.stages_s["answered"] = max(0.0, time.monotonic() - message.sent)
                self.stopped.set_result(message)
            case worker_ipc.Failed():
                self.lose(message.message, message.permanent)
        self._on_message(self, message)

    def _disconnected(self) -> None:
        if not self.exited.is_set() and not self._stopping:
            self._reaping = asyncio.create_task(self._reap(), name="worker reaper")

    async def _reap(self) -> None:
        """See a worker without a socket end, and say why only then: it is of no use."""
        if not await within(self.exited.wait(), REAP_TIMEOUT_S):
            self._signal(signal.SIGKILL)


def describe_exit(message: Exited) -> str:
    """``worker 71 was killed by SIGKILL`` or ``worker 71 exited with status 1``."""
    who = f"{message.role} {message.pid}" + (f", rank {message.rank}," if message.rank else "")
    if message.status < 0:
        with contextlib.suppress(ValueError):
            return f"{who} was killed by {signal.Signals(-message.status).name}"
    return f"{who} exited with status {message.status}"


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Return False where there is no such process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


async def either(future: asyncio.Future[Any], event: asyncio.Event) -> None:
    """Wait for one of both; ``future`` itself is left as it is."""
    waiting = asyncio.ensure_future(event.wait())
    both: set[asyncio.Future[Any]] = {future, waiting}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def within(waiting: Any, timeout_s: float) -> bool:
    """Whether ``waiting`` was over in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await waiting
    except TimeoutError:
        return False
    return True
