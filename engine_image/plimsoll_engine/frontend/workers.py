"""The processes behind the frontend: the zygote, the weight holder, the worker that serves and, for
a moment, its successor."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from plimsoll_api.admin import Role
from plimsoll_engine import ipc
from plimsoll_engine.caches.sender import Sender
from plimsoll_engine.frontend.epochs import Epochs
from plimsoll_engine.frontend.worker import (
    REAP_TIMEOUT_S,
    Stop,
    Worker,
    WorkerLost,
    describe_exit,
    send_signal,
    within,
)
from plimsoll_engine.frontend.worker_link import WorkerSocket
from plimsoll_engine.frontend.zygote import Zygote, ZygoteLost
from plimsoll_engine.zygote_ipc import Exited, WorkerConfig

log = logging.getLogger(__name__)

Stage = TypeVar("Stage")

# A healthy worker stops after the step under way; one that does not within this is taken for hung.
STOP_GRACE_S = 5.0
# From a worker's last word to the end of its process.
LEAVE_GRACE_S = 15.0
# The weight holder frees tens of GiB in milliseconds; it waits for nobody but its workers.
HOLDER_GRACE_S = 5.0


@dataclass
class _Holder:
    number: int
    pid: int
    stopping: bool = False
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class Workers:
    """``on_message`` gets what the serving worker says, ``on_lost`` why it ended uninvited."""

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
        self._holder: _Holder | None = None
        self._holders = 0
        self._living: dict[int, Worker] = {}
        """Every worker that was not reaped yet, by the number of its epoch."""
        self._serving: Worker | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._socket = WorkerSocket(Path(config.socket))
        self.starts = 0

    @property
    def pid(self) -> int | None:
        worker = self._serving
        return None if worker is None or worker.gone else worker.pid

    @property
    def pids(self) -> list[int]:
        """Of the serving worker's ranks."""
        worker = self._serving
        return [] if worker is None or worker.gone else worker.living

    @property
    def zygote_pid(self) -> int | None:
        return None if self._zygote is None else self._zygote.pid

    @property
    def holder_pid(self) -> int | None:
        return None if self._holder is None else self._holder.pid

    @property
    def unsent(self) -> int:
        """Messages that the serving worker has not taken yet."""
        return 0 if self._serving is None else len(self._serving.link.outbox)

    def send(self, message: ipc.ToWorker) -> None:
        """To the serving worker."""
        if self._serving is not None:
            self._serving.link.send(message)

    def media_lost(self, keys: list[bytes]) -> None:
        """The serving worker lacks these media: the next submission brings them."""
        if self._serving is not None:
            self._serving.link.sender.lost(keys)

    @property
    def sender(self) -> Sender | None:
        """What the serving worker's receiver cache is known to hold."""
        return None if self._serving is None else self._serving.link.sender

    async def start(self, timeout_s: float) -> ipc.Ready:
        """The next epoch's worker, serving. Raises :class:`WorkerLost`; nothing is left of it."""
        worker = self._next()
        self._enter(worker)
        deadline = time.monotonic() + timeout_s
        await self._prepare(worker, timeout_s)
        return await self.take_over(worker, max(0.1, deadline - time.monotonic()))

    async def prepare(self, timeout_s: float) -> Worker:
        """A successor with context, weights and kernels, beside the worker that goes on serving.

        Raises :class:`WorkerLost`; nothing is left of the successor then.
        """
        worker = self._next()
        await self._prepare(worker, timeout_s)
        return worker

    async def take_over(self, worker: Worker, timeout_s: float, quick: bool = False) -> ipc.Ready:
        """Let a prepared worker serve; its predecessor is stopped, and goes when this one is ready.
        Raises :class:`WorkerLost`."""
        self._enter(worker)
        worker.link.send(ipc.TakeOver(quick))
        try:
            return await self._reached(worker, worker.ready, timeout_s)
        finally:
            self._dismiss()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> Stop:
        """End the serving worker: asked first, then with signals. One that gave its last word goes
        when its successor is ready, or with :meth:`close`."""
        worker = self._serving
        return Stop(None) if worker is None else await worker.stop(grace_s)

    def _dismiss(self) -> None:
        """Every worker that has said its last word may go."""
        for worker in self._living.values():
            if worker.stopped.done() and not worker.exited.is_set():
                worker.dismiss()
                leaving = asyncio.create_task(self._see_off(worker), name="worker leaving")
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)

    async def abandon(self, worker: Worker) -> None:
        """A successor is not wanted after all."""
        await self._kill(worker)

    async def discard(self) -> None:
        """See to it that a worker that was lost is gone: it may still be on its way out."""
        worker = self._serving
        if worker is not None and not await within(worker.exited.wait(), REAP_TIMEOUT_S):
            await self._kill(worker)

    async def drop_weights(self) -> None:
        """End the weight holder; the next worker's weights are loaded from the checkpoint. Every
        worker was stopped before."""
        for worker in list(self._living.values()):
            worker.dismiss()
            if not await within(worker.exited.wait(), LEAVE_GRACE_S):
                await self._kill(worker)
        holder = self._holder
        if holder is None:
            return
        holder.stopping = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            send_signal(holder.pid, number)
            if await within(holder.exited.wait(), HOLDER_GRACE_S):
                return
        log.error("weight holder not reaped: the zygote is replaced", extra={"pid": holder.pid})
        await self._lose_zygote()

    async def dump_stacks(self) -> Path | None:
        """The file with the serving worker's stacks as of now; None where unknown."""
        return None if self._serving is None else await self._serving.dump_stacks()

    async def close(self) -> None:
        """No process of ours is left after this."""
        for leaving in self._leaving:
            leaving.cancel()
        await self._socket.close()
        if self._zygote is not None:
            await self._zygote.close()
            self._zygote = None
        for worker in self._living.values():
            worker.clear()

    # ---- steps

    def _next(self) -> Worker:
        return Worker(
            self._epochs.reserve(),
            self._config.run_dir,
            self._config.media_cache_bytes,
            self._config.tensor_parallel_size,
            self._received,
            self._lost,
        )

    def _enter(self, worker: Worker) -> None:
        if self._serving is not worker:
            self._serving = worker
            self._epochs.enter(worker.epoch)
            self.starts += 1

    async def _prepare(self, worker: Worker, timeout_s: float) -> None:
        number = worker.epoch.number
        self._living[number] = worker
        deadline = time.monotonic() + timeout_s
        try:
            zygote = await self._running_zygote(deadline)
            await self._running_holder(zygote)
            self._socket.expect(worker.link)
            for rank in range(self._config.tensor_parallel_size):
                worker.pids.append(await zygote.fork(number, rank=rank))
        except (ZygoteLost, RuntimeError) as error:
            await self._lose_zygote()
            raise WorkerLost(str(error)) from None
        log.info("worker forked", extra={"epoch": str(worker.epoch), "pids": worker.pids})
        prepared = await self._reached(
            worker, worker.prepared, max(0.1, deadline - time.monotonic())
        )
        log.info(
            "worker prepared",
            extra={"epoch": str(worker.epoch), "pid": worker.pid, "stages_s": prepared.stages_s},
        )

    async def _reached(
        self, worker: Worker, stage: asyncio.Future[Stage], timeout_s: float
    ) -> Stage:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(stage)
        except TimeoutError:
            await self._kill(worker)
            if worker is self._serving:
                await self.drop_weights()  # it may be the holder that hangs; nobody else uses it
            raise WorkerLost(
                f"the worker of epoch {worker.epoch} was not ready within {timeout_s:g} s "
                "(--startup-timeout)"
            ) from None
        except (WorkerLost, asyncio.CancelledError):
            await self._kill(worker)
            raise

    async def _running_zygote(self, deadline: float) -> Zygote:
        if self._zygote is None:
            zygote = Zygote(self._config, self._exited, self._zygote_lost)
            self._zygote = zygote
            await self._socket.listen()
            ready = await zygote.start(max(0.1, deadline - time.monotonic()))
            log.info("zygote ready", extra={"pid": ready.pid, "import_s": ready.import_s})
        return self._zygote

    async def _running_holder(self, zygote: Zygote) -> None:
        if self._config.weights and self._holder is None:
            self._holders += 1
            pid = await zygote.fork(self._holders, Role.HOLDER)
            self._holder = _Holder(self._holders, pid)
            log.info("weight holder forked", extra={"pid": pid})

    async def _see_off(self, worker: Worker) -> None:
        """A worker that has said its last word is gone soon, or it is killed."""
        if not await within(worker.exited.wait(), LEAVE_GRACE_S):
            log.warning("worker does not exit", extra={"pid": worker.pid})
            await self._kill(worker)

    async def _kill(self, worker: Worker) -> None:
        await worker.kill()
        self._socket.forget(worker.link)
        if worker.pid is not None and not worker.exited.is_set():
            log.error("worker not reaped: the zygote is replaced", extra={"pid": worker.pid})
            await self._lose_zygote()

    async def _lose_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()
        self._all_gone("the zygote was ended")

    # ---- what happens to us

    def _received(self, worker: Worker, message: ipc.FromWorker) -> None:
        if worker is self._serving:
            self._on_message(message)

    def _lost(self, worker: Worker, reason: str) -> None:
        if worker is self._serving:
            self._on_lost(reason)

    def _exited(self, message: Exited) -> None:
        if message.role is Role.HOLDER:
            self._holder_exited(message)
            return
        worker = self._living.get(message.number)
        if worker is None:
            return
        worker.reaped(message)
        if worker.exited.is_set():
            del self._living[message.number]
            self._socket.forget(worker.link)

    def _holder_exited(self, message: Exited) -> None:
        holder = self._holder
        if holder is None or holder.number != message.number:
            return
        self._holder = None
        holder.exited.set()
        if not holder.stopping:
            reason = f"the weights are lost: {describe_exit(message)}"
            log.error("weight holder lost", extra={"reason": reason})
            for worker in list(self._living.values()):
                worker.cut(reason)

    def _zygote_lost(self, reason: str) -> None:
        self._zygote = None
        self._all_gone(reason)

    def _all_gone(self, reason: str) -> None:
        """Everything that the zygote forked has died with it."""
        if self._holder is not None:
            self._holder.exited.set()
            self._holder = None
        living, self._living = self._living, {}
        for worker in living.values():
            worker.all_reaped(reason)
            self._socket.forget(worker.link)
