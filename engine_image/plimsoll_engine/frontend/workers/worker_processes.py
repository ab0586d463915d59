"""Processes of the engine: zygote, weight server, serving worker and successor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from plimsoll_api.admin import Role
from plimsoll_engine.caches.sender import MediaCacheSender
from plimsoll_engine.frontend.epochs import Epochs
from plimsoll_engine.frontend.workers.adopted import OrphanWatcher, reap_unknown_children
from plimsoll_engine.frontend.workers.failures import (
    Failures,
    FailureScope,
    ForkRefusedError,
    WorkerLostError,
    ZygoteLostError,
)
from plimsoll_engine.frontend.workers.worker_handle import (
    REAP_TIMEOUT_S,
    StopOutcome,
    WorkerHandle,
    describe_exit,
    send_signal,
    wait_with_timeout,
)
from plimsoll_engine.frontend.workers.worker_link import WorkerSocket
from plimsoll_engine.frontend.workers.zygote_client import ZygoteClient
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.zygote_ipc import Exited, WorkerConfig, listen

log = logging.getLogger(__name__)

Stage = TypeVar("Stage")

# A healthy worker stops after its current step. A worker that takes longer is considered hung.
STOP_GRACE_S = 5.0
# Time from a worker's final message to its exit.
EXIT_GRACE_S = 15.0
# The weight server frees tens of GiB in milliseconds. It waits only for its workers.
WEIGHT_SERVER_GRACE_S = 5.0
# After this time, the engine no longer waits for the zygote. The next worker's start starts it.
ZYGOTE_RESTART_TIMEOUT_S = 120.0


@dataclass
class _WeightServer:
    number: int
    pid: int
    stopping: bool = False
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerProcesses:
    """Manager of the engine's processes, which starts, stops and watches them.

    ``on_lost`` receives the reason if the serving worker exits unexpectedly.
    """

    def __init__(
        self,
        config: WorkerConfig,
        epochs: Epochs,
        failures: Failures,
        on_message: Callable[[worker_ipc.FromWorker], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._config = config
        self._epochs = epochs
        self._on_message = on_message
        self._on_lost = on_lost
        self._zygote: ZygoteClient | None = None
        self._zygote_starts = asyncio.Lock()
        self._failures = failures
        self._renewing: asyncio.Task[None] | None = None
        self._orphans = OrphanWatcher(self._on_process_exit)
        self._weights = listen(config.weights) if config.weights else None
        self._weight_server: _WeightServer | None = None
        self._weight_servers = 0
        # Workers that have not been reaped, by epoch number.
        self._live: dict[int, WorkerHandle] = {}
        self._serving: WorkerHandle | None = None
        # Dismissed workers that have not exited yet, with the tasks that wait for the exit.
        self._dismissed: dict[WorkerHandle, asyncio.Task[None]] = {}
        self._socket = WorkerSocket(Path(config.socket))
        self.starts = 0

    @property
    def ranks(self) -> int:
        """Number of processes per worker."""
        return self._config.tensor_parallel_size

    @property
    def pid(self) -> int | None:
        """Process ID of the serving worker's rank 0; None if no worker serves."""
        worker = self._serving
        return None if worker is None or worker.is_gone else worker.pid

    @property
    def pids(self) -> list[int]:
        """Process IDs of the serving worker's ranks."""
        worker = self._serving
        return [] if worker is None or worker.is_gone else worker.live_pids

    @property
    def zygote_pid(self) -> int | None:
        """Process ID of the zygote; None if it is not running."""
        return None if self._zygote is None else self._zygote.pid

    @property
    def weight_server_pid(self) -> int | None:
        """Process ID of the weight server; None if it is not running."""
        return None if self._weight_server is None else self._weight_server.pid

    @property
    def num_unsent_messages(self) -> int:
        """Number of messages to the serving worker that have not been sent yet."""
        return 0 if self._serving is None else len(self._serving.link.outbox)

    def send(self, message: worker_ipc.ToWorker) -> None:
        """Send ``message`` to the serving worker, if a worker serves."""
        if self._serving is not None:
            self._serving.link.send(message)

    def mark_media_missing(self, keys: list[bytes]) -> None:
        """Record that the serving worker lacks the media ``keys``, so that they are sent again."""
        if self._serving is not None:
            self._serving.link.media_sender.mark_missing(keys)

    @property
    def media_sender(self) -> MediaCacheSender | None:
        """Record of the media in the serving worker's cache; None if no worker serves."""
        return None if self._serving is None else self._serving.link.media_sender

    async def start(self, timeout_s: float) -> worker_ipc.Ready:
        """Start a worker in a new epoch, and return its Ready message. Raises WorkerLostError."""
        worker = self.create_successor()
        self._set_serving(worker)
        deadline = time.monotonic() + timeout_s
        await self.prepare(worker, timeout_s)
        return await self.take_over(worker, max(0.1, deadline - time.monotonic()))

    def create_successor(self) -> WorkerHandle:
        """Return a worker with a new epoch number. It is not forked yet."""
        return WorkerHandle(
            self._epochs.reserve(),
            self._config.run_dir,
            self._config.media_cache_bytes,
            self.ranks,
            self._on_worker_message,
            self._on_worker_lost,
        )

    async def prepare(self, worker: WorkerHandle, timeout_s: float) -> None:
        """Fork ``worker``, and wait until it has its CUDA context, weights and kernels.

        Kill ``worker`` if it fails, and raise WorkerLostError.
        """
        self.dismiss_stopped()  # no more than two workers have contexts on the devices
        number = worker.epoch.number
        self._live[number] = worker
        deadline = time.monotonic() + timeout_s
        try:
            zygote = await self._ensure_zygote(deadline)
            await self._ensure_weight_server(zygote)
            self._socket.expect(worker.link)
            for rank in range(self.ranks):
                await self._fork(zygote, worker, rank)
        except asyncio.CancelledError:
            await self._discard_unstarted(worker)
            raise
        except Exception as error:  # noqa: BLE001 - any error ends only this worker
            failed, serving = self._zygote, self._serving
            await self._discard_unstarted(worker)
            scope = self._failures.choose_scope_of_failed_start(
                error, serving is not None and not serving.is_lost
            )
            if scope is FailureScope.ZYGOTE and failed is not None and failed is self._zygote:
                failed.kill()
            raise WorkerLostError(
                f"cannot start the worker: {str(error) or type(error).__name__}"
            ) from None
        log.info("worker forked", extra={"epoch": str(worker.epoch), "pids": worker.pids})
        prepared = await self._await_stage(
            worker, worker.prepared, max(0.1, deadline - time.monotonic())
        )
        log.info(
            "worker prepared",
            extra={"epoch": str(worker.epoch), "pid": worker.pid, "stages_s": prepared.stages_s},
        )

    async def _discard_unstarted(self, worker: WorkerHandle) -> None:
        worker.finish_forking()
        await self._kill(worker)
        if not worker.live_pids:
            self._live.pop(worker.epoch.number, None)

    async def take_over(
        self,
        worker: WorkerHandle,
        timeout_s: float,
        skip_warm_up: bool = False,
        handover: bytes | None = None,
    ) -> worker_ipc.Ready:
        """Make a prepared worker serve. Raises WorkerLostError.

        ``skip_warm_up`` skips the warm-up of the largest step. It must be True with a ``handover``.
        """
        self._set_serving(worker)
        worker.link.send(worker_ipc.TakeOver(skip_warm_up, handover))
        try:
            return await self._await_stage(worker, worker.ready, timeout_s)
        except BaseException:
            self.dismiss_stopped()
            raise

    async def stop(
        self, grace_s: float = STOP_GRACE_S, should_hand_over: bool = False
    ) -> StopOutcome:
        """Stop the serving worker. Kill it if it has not stopped after ``grace_s`` seconds.

        A stopped worker exits after :meth:`dismiss_stopped` or :meth:`close`.
        """
        worker = self._serving
        return StopOutcome(None) if worker is None else await worker.stop(grace_s, should_hand_over)

    def dismiss_stopped(self) -> None:
        """Let every worker that has sent its final message exit. Idempotent.

        Driver calls of other processes wait while the driver destroys the CUDA contexts.
        """
        for worker in self._live.values():
            is_exiting = worker in self._dismissed or worker.exited.is_set()
            if worker.stopped.done() and not is_exiting:
                worker.dismiss()
                exit_task = asyncio.create_task(self._await_exit(worker), name="worker exit")
                self._dismissed[worker] = exit_task
                exit_task.add_done_callback(partial(self._forget_dismissed, worker))

    @property
    def has_stopped_worker(self) -> bool:
        """Whether a worker that has sent its final message has not exited yet."""
        return any(worker.stopped.done() for worker in self._live.values())

    def _forget_dismissed(self, worker: WorkerHandle, _: asyncio.Task[None]) -> None:
        del self._dismissed[worker]

    async def kill_successor(self, worker: WorkerHandle) -> None:
        """Kill a successor that is no longer needed."""
        await self._kill(worker)

    async def await_lost_worker(self) -> None:
        """Wait until the lost worker has exited. Kill it after a timeout."""
        worker = self._serving
        if worker is not None and not await wait_with_timeout(worker.exited.wait(), REAP_TIMEOUT_S):
            await self._kill(worker)

    async def drop_weights(self) -> None:
        """Stop the weight server after all workers, so that the next worker reads the checkpoint.

        The caller must have asked the workers to stop.
        """
        for worker in list(self._live.values()):
            worker.dismiss()
            if not await wait_with_timeout(worker.exited.wait(), EXIT_GRACE_S):
                await self._kill(worker)
        server = self._weight_server
        if server is None:
            return
        server.stopping = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            send_signal(server.pid, number)
            if await wait_with_timeout(server.exited.wait(), WEIGHT_SERVER_GRACE_S):
                return
        await self._handle_unkillable("weight server", server.pid, is_memory_needed=True)

    async def dump_stacks(self) -> Path | None:
        """Make the serving worker write its stack traces, even if it hangs.

        Return the file of rank 0; None if no worker serves or rank 0 wrote none.
        """
        return None if self._serving is None else await self._serving.dump_stacks()

    async def close(self) -> None:
        """End all processes of the engine."""
        for exit_task in self._dismissed.values():
            exit_task.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
        await self._socket.close()
        self._orphans.kill()
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        if self._zygote is not None:
            await self._zygote.close()
            self._zygote = None
        for worker in self._live.values():
            worker.remove_files()

    # ---- steps

    def _set_serving(self, worker: WorkerHandle) -> None:
        if self._serving is not worker:
            self._serving = worker
            self._epochs.enter(worker.epoch)
            self.starts += 1

    async def _fork(self, zygote: ZygoteClient, worker: WorkerHandle, rank: int) -> None:
        # Records the PID even if the caller is cancelled.
        forking = asyncio.ensure_future(zygote.fork(worker.epoch.number, rank=rank))
        try:
            worker.pids.append(await asyncio.shield(forking))
        except asyncio.CancelledError:
            with contextlib.suppress(ZygoteLostError, ForkRefusedError):
                worker.pids.append(await forking)
            raise

    async def _await_stage(
        self, worker: WorkerHandle, stage: asyncio.Future[Stage], timeout_s: float
    ) -> Stage:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(stage)
        except TimeoutError:
            await self._kill(worker)
            if worker is self._serving:
                # The weight server may hang as well, and no other worker uses it.
                await self.drop_weights()
            raise WorkerLostError(
                f"the worker of epoch {worker.epoch} was not ready within {timeout_s:g} s "
                "(--startup-timeout)"
            ) from None
        except (WorkerLostError, asyncio.CancelledError):
            await self._kill(worker)
            raise

    async def _ensure_zygote(self, deadline: float) -> ZygoteClient:
        async with self._zygote_starts:
            if self._zygote is None:
                zygote = ZygoteClient(
                    self._config, self._weights, self._on_process_exit, self._on_zygote_lost
                )
                await self._socket.listen()
                try:
                    ready = await zygote.start(max(0.1, deadline - time.monotonic()))
                except BaseException:
                    await zygote.close()
                    raise
                self._zygote = zygote
                self._failures.zygote.mark_serving()
                log.info("zygote ready", extra={"pid": ready.pid, "import_s": ready.import_s})
            return self._zygote

    async def _ensure_weight_server(self, zygote: ZygoteClient) -> None:
        if self._config.weights and self._weight_server is None:
            self._weight_servers += 1
            pid = await zygote.fork(self._weight_servers, Role.WEIGHT_SERVER)
            self._weight_server = _WeightServer(self._weight_servers, pid)
            log.info("weight server forked", extra={"pid": pid})

    async def _await_exit(self, worker: WorkerHandle) -> None:
        if not await wait_with_timeout(worker.exited.wait(), EXIT_GRACE_S):
            log.warning(
                "the worker did not exit after its final message", extra={"pid": worker.pid}
            )
            await self._kill(worker)

    async def _kill(self, worker: WorkerHandle) -> None:
        await worker.kill()
        self._socket.forget(worker.link)
        if worker.pid is None or worker.exited.is_set():
            return
        await self._handle_unkillable(
            "worker", worker.pid, is_memory_needed=worker is self._serving
        )

    async def _handle_unkillable(self, name: str, pid: int, is_memory_needed: bool) -> None:
        scope = self._failures.choose_scope_of_unkillable_process(is_memory_needed)
        log.error(f"cannot kill the {name}", extra={"pid": pid, "ends": scope.name.lower()})
        if scope is FailureScope.PROCESSES:
            await self._kill_zygote()

    async def _kill_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        self._orphans.kill()
        if zygote is not None:
            await zygote.close()
        self._mark_all_exited("the zygote was killed")

    # ---- events

    def _on_worker_message(self, worker: WorkerHandle, message: worker_ipc.FromWorker) -> None:
        if worker is self._serving:
            self._on_message(message)

    def _on_worker_lost(self, worker: WorkerHandle, reason: str) -> None:
        if worker is self._serving:
            self._on_lost(reason)

    def _on_process_exit(self, message: Exited) -> None:
        if message.role is Role.WEIGHT_SERVER:
            self._on_weight_server_exit(message)
            return
        worker = self._live.get(message.number)
        if worker is None:
            return
        worker.on_rank_exit(message)
        if worker.exited.is_set():
            self._live.pop(message.number, None)
            self._socket.forget(worker.link)
            asyncio.get_running_loop().call_later(REAP_TIMEOUT_S, self._reap_unknown_children)

    def _on_weight_server_exit(self, message: Exited) -> None:
        server = self._weight_server
        if server is None or server.number != message.number:
            return
        self._weight_server = None
        server.exited.set()
        if not server.stopping:
            reason = f"the weights are lost: {describe_exit(message)}"
            log.error(
                "the weight server exited unexpectedly: killing all workers, because their "
                "weights are lost",
                extra={"reason": describe_exit(message)},
            )
            for worker in list(self._live.values()):
                worker.kill_without_grace(reason)

    def _on_zygote_lost(self, zygote: ZygoteClient, reason: str) -> None:
        # The processes that the lost zygote forked continue.
        if self._zygote is not zygote:
            return  # the zygote was still starting, and its start raises the error
        log.error(
            "the zygote, which forks all workers, exited unexpectedly: starting another one",
            extra={"reason": reason},
        )
        self._zygote = None
        self._renewing = asyncio.create_task(self._restart_zygote(zygote), name="zygote renewal")

    async def _restart_zygote(self, lost_zygote: ZygoteClient) -> None:
        await lost_zygote.wait_until_exited()
        self._watch_orphans()
        while (delay_s := self._failures.zygote.count_crash()) is not None:
            await asyncio.sleep(delay_s)
            try:
                await self._ensure_zygote(time.monotonic() + ZYGOTE_RESTART_TIMEOUT_S)
            except (ZygoteLostError, OSError) as error:
                log.error("cannot start another zygote", extra={"reason": str(error)})
            else:
                return

    def _watch_orphans(self) -> None:
        if (server := self._weight_server) is not None:
            self._orphans.watch(server.number, server.pid, Role.WEIGHT_SERVER)
        for number, worker in list(self._live.items()):
            for rank, pid in enumerate(worker.pids):
                if pid in worker.live_pids:
                    self._orphans.watch(number, pid, Role.WORKER, rank)

    def _reap_unknown_children(self) -> None:
        if self._zygote_starts.locked():  # the PID of a starting zygote is not known here yet
            asyncio.get_running_loop().call_later(REAP_TIMEOUT_S, self._reap_unknown_children)
            return
        known = {pid for worker in self._live.values() for pid in worker.live_pids}
        known |= {pid for pid in (self.weight_server_pid, self.zygote_pid) if pid is not None}
        reap_unknown_children(known)

    def _mark_all_exited(self, reason: str) -> None:
        if self._weight_server is not None:
            self._weight_server.exited.set()
            self._weight_server = None
        living, self._live = self._live, {}
        for worker in living.values():
            worker.on_exit(reason)
            self._socket.forget(worker.link)
