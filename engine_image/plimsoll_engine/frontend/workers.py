"""The worker of the present epoch: started, told, stopped, and noticed when it dies."""

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

from plimsoll_engine import ipc
from plimsoll_engine.frontend.epochs import Epochs
from plimsoll_engine.frontend.worker_link import WorkerLink
from plimsoll_engine.frontend.zygote import Zygote, ZygoteLost
from plimsoll_engine.zygote_ipc import Exited, WorkerConfig, stacks_path

log = logging.getLogger(__name__)

# A healthy worker stops after the step under way; one that does not within this is taken for hung.
STOP_GRACE_S = 5.0
TERM_GRACE_S = 1.0
KILL_GRACE_S = 5.0
# From a worker's last word to the end of its process.
LEAVE_GRACE_S = 15.0
STACKS_TIMEOUT_S = 1.0
# A worker whose socket closed is about to be reaped; beyond this it is killed.
REAP_TIMEOUT_S = 1.0


class WorkerLost(Exception):
    """A worker ended, or never became ready. ``final``: it said itself that it cannot go on."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass
class _Worker:
    epoch: int
    ready: asyncio.Future[ipc.Ready]
    stopped: asyncio.Future[ipc.Stopped]
    exited: asyncio.Event
    pid: int | None = None
    stopping: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Stop:
    """How a worker went. ``stopped`` is its last word, None where it gave none."""

    stopped: ipc.Stopped | None
    signals: tuple[str, ...] = ()
    stacks: Path | None = None


class Workers:
    """``on_message`` gets what the present worker says, ``on_lost`` why it ended uninvited."""

    def __init__(
        self,
        config: WorkerConfig,
        epochs: Epochs,
        on_message: Callable[[ipc.FromWorker], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._config = config
        self._epochs = epochs
        self._on_message = on_message
        self._on_lost = on_lost
        self._zygote: Zygote | None = None
        self._worker: _Worker | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._leaving: dict[int, tuple[_Worker, asyncio.Task[None]]] = {}
        self.link = WorkerLink(Path(config.socket), self._received, self._disconnected)
        self.starts = 0

    @property
    def pid(self) -> int | None:
        worker = self._worker
        gone = worker is None or worker.exited.is_set() or worker.epoch in self._leaving
        return None if gone or worker is None else worker.pid

    @property
    def zygote_pid(self) -> int | None:
        return None if self._zygote is None else self._zygote.pid

    async def start(self, timeout_s: float) -> ipc.Ready:
        """The next epoch's worker, ready. Raises :class:`WorkerLost`; no worker is left then."""
        loop = asyncio.get_running_loop()
        epoch = self._epochs.advance()
        worker = _Worker(epoch.number, loop.create_future(), loop.create_future(), asyncio.Event())
        # Its failure may come while something else is awaited: that is then what is raised.
        worker.ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._worker = worker
        self.starts += 1
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                zygote = await self._running_zygote(deadline)
                self.link.expect(epoch.number)
                worker.pid = await zygote.fork(epoch.number)
                log.info("worker forked", extra={"epoch": str(epoch), "pid": worker.pid})
                return await worker.ready
        except TimeoutError:
            await self._kill(worker)
            raise WorkerLost(
                f"the worker of epoch {epoch} was not ready within {timeout_s:g} s "
                "(--startup-timeout)"
            ) from None
        except (ZygoteLost, RuntimeError) as error:
            await self._lose_zygote()
            raise WorkerLost(str(error)) from None
        except WorkerLost:
            await self._kill(worker)
            raise

    async def stop(self, grace_s: float = STOP_GRACE_S) -> Stop:
        """End the worker: asked first, then with signals. Needs no cooperation of a hung one.

        Its last word is enough: everything is given back by then, and the next worker need not wait
        until the driver has taken the process's context down, which takes seconds on some machines.
        """
        worker = self._worker
        if worker is None or worker.exited.is_set():
            return Stop(None)
        if worker.epoch in self._leaving:
            return Stop(worker.stopped.result())
        worker.stopping = True
        self.link.send(ipc.Stop())
        if await _within(_either(worker.stopped, worker.exited), grace_s):
            if not worker.stopped.done():
                return Stop(None)
            self.link.drop()
            leaving = asyncio.create_task(self._see_off(worker), name="worker leaving")
            self._leaving[worker.epoch] = worker, leaving
            return Stop(worker.stopped.result())
        stacks = await self.dump_stacks()
        signals = await self._kill(worker)
        return Stop(None, signals, stacks)

    async def _see_off(self, worker: _Worker) -> None:
        """A worker that has said its last word is gone soon, or it is killed."""
        if not await _within(worker.exited.wait(), LEAVE_GRACE_S):
            log.warning("worker does not exit", extra={"pid": worker.pid})
            await self._kill(worker)
        del self._leaving[worker.epoch]

    async def discard(self) -> None:
        """See to it that a worker that was lost is gone: it may still be on its way out."""
        worker = self._worker
        if worker is not None and not await _within(worker.exited.wait(), REAP_TIMEOUT_S):
            await self._kill(worker)

    async def dump_stacks(self) -> Path | None:
        """The file with the worker's stacks as of now, also while it hangs; None where unknown."""
        pid = self.pid
        if pid is None:
            return None
        path = stacks_path(self._config.run_dir, "worker", pid)
        before = path.stat().st_size if path.exists() else 0
        if not path.exists() or not _signal(pid, signal.SIGUSR1):
            return None  # no handler is installed before the file exists: the signal would kill
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        while time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            if path.stat().st_size > before:
                return path
        return None

    async def close(self) -> None:
        """No process of ours is left after this."""
        if self._reaping is not None:
            self._reaping.cancel()
        for _, leaving in self._leaving.values():
            leaving.cancel()
        await self.link.close()
        if self._zygote is not None:
            await self._zygote.close()
            self._zygote = None

    async def _running_zygote(self, deadline: float) -> Zygote:
        if self._zygote is None:
            zygote = Zygote(self._config, self._exited, self._zygote_lost)
            self._zygote = zygote
            await self.link.listen()
            ready = await zygote.start(max(0.1, deadline - time.monotonic()))
            log.info("zygote ready", extra={"pid": ready.pid, "import_s": ready.import_s})
        return self._zygote

    async def _kill(self, worker: _Worker) -> tuple[str, ...]:
        worker.stopping = True
        sent: list[str] = []
        for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
            if worker.exited.is_set() or worker.pid is None:
                return tuple(sent)
            if _signal(worker.pid, number):
                sent.append(number.name)
            await _within(worker.exited.wait(), grace_s)
        if not worker.exited.is_set():
            log.error("worker not reaped: the zygote is replaced", extra={"pid": worker.pid})
            await self._lose_zygote()
        return tuple(sent)

    async def _lose_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        self.link.drop()
        if zygote is not None:
            await zygote.close()
        if self._worker is not None:
            self._worker.exited.set()
        for worker, _ in self._leaving.values():
            worker.exited.set()

    # ---- what happens to us

    def _received(self, message: ipc.FromWorker) -> None:
        worker = self._worker
        assert worker is not None
        if isinstance(message, ipc.Ready) and not worker.ready.done():
            worker.ready.set_result(message)
        elif isinstance(message, ipc.Stopped) and not worker.stopped.done():
            worker.stopped.set_result(message)
        elif isinstance(message, ipc.Failed):
            self._lose(worker, message.message, final=True)
        self._on_message(message)

    def _disconnected(self, reason: str) -> None:
        worker = self._worker
        if worker is not None and not worker.exited.is_set():
            self._reaping = asyncio.create_task(self._reap(worker), name="worker reaper")

    async def _reap(self, worker: _Worker) -> None:
        """A worker without a socket is of no use: see it end, and say why only then."""
        if worker.stopping:
            return
        if not await _within(worker.exited.wait(), REAP_TIMEOUT_S) and worker.pid is not None:
            _signal(worker.pid, signal.SIGKILL)

    def _exited(self, message: Exited) -> None:
        if message.epoch in self._leaving:
            self._leaving[message.epoch][0].exited.set()
            return
        worker = self._worker
        if worker is None or worker.epoch != message.epoch:
            return
        worker.exited.set()
        self._lose(worker, describe_exit(message))

    def _zygote_lost(self, reason: str) -> None:
        self._zygote = None
        for leaving, _ in self._leaving.values():
            leaving.exited.set()
        worker = self._worker
        if worker is not None and not worker.exited.is_set():
            worker.exited.set()
            self._lose(worker, reason)

    def _lose(self, worker: _Worker, reason: str, final: bool = False) -> None:
        if worker.lost:
            return
        worker.lost = True
        if not worker.ready.done():
            worker.ready.set_exception(WorkerLost(reason, final))
        elif not worker.stopping:
            self._on_lost(reason)


def describe_exit(message: Exited) -> str:
    """``worker 71 was killed by SIGKILL`` or ``worker 71 exited with status 1``."""
    if message.status < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-message.status).name
            return f"worker {message.pid} was killed by {name}"
    return f"worker {message.pid} exited with status {message.status}"


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


async def _either(future: asyncio.Future[ipc.Stopped], event: asyncio.Event) -> None:
    """Returns when one of both is there; ``future`` itself is left as it is."""
    waiting = asyncio.ensure_future(event.wait())
    either: set[asyncio.Future[Any]] = {future, waiting}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _within(waiting: object, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await waiting  # type: ignore[misc]
    except TimeoutError:
        return False
    return True
