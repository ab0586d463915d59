"""Keep one worker serving: start it, replace it in a planned restart, restart it after a crash."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from plimsoll_api.admin import EngineState, Epoch
from plimsoll_engine.frontend.epochs import Epochs
from plimsoll_engine.frontend.lifecycle import Lifecycle
from plimsoll_engine.frontend.workers.failures import (
    Failures,
    WorkerLostError,
    WorkerUnrecoverableError,
)
from plimsoll_engine.frontend.workers.standby import Standby
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle
from plimsoll_engine.frontend.workers.worker_processes import WorkerProcesses
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.settings import StandbyPolicy

log = logging.getLogger(__name__)

# A successor that is not prepared within this time is abandoned. It may be blocked by the worker
# that it should replace, most often because that worker occupies the device memory.
PREPARE_TIMEOUT_S = 60.0


class RequestOwner(Protocol):
    """Owner of the requests that the worker runs."""

    def on_epoch_started(self, ready: worker_ipc.Ready, reason: str) -> None:
        """Record that a worker serves. ``reason`` is why the worker was started."""

    def on_epoch_ended(self) -> None:
        """Record that no worker serves. Idempotent."""

    def resubmit(self) -> int:
        """Submit all running requests to the new worker, and return their number."""

    def fail(self, message: str) -> None:
        """Fail all requests with ``message``, because no worker can be started."""


class WorkerManager:
    """Manager of the serving worker and the standby.

    The lock ``replacing`` is held while the worker is replaced.
    """

    def __init__(
        self,
        workers: WorkerProcesses,
        epochs: Epochs,
        lifecycle: Lifecycle,
        request_owner: RequestOwner,
        failures: Failures,
        startup_timeout_s: float,
        standby: StandbyPolicy = StandbyPolicy.NEVER,
    ) -> None:
        self.replacing = asyncio.Lock()
        self.standby = Standby(
            workers, failures.standby, standby, min(PREPARE_TIMEOUT_S, startup_timeout_s)
        )
        self._workers = workers
        self._epochs = epochs
        self._lifecycle = lifecycle
        self._served = request_owner
        self._timeout_s = startup_timeout_s
        self._failures = failures

    async def start_first(self) -> None:
        """Start the first worker. Return when the worker serves or the engine has failed."""
        async with self.replacing:
            try:
                await self.start("initial")
            except WorkerUnrecoverableError:
                return
            self._served.resubmit()
            if self._lifecycle.state is EngineState.WARMING:
                self._lifecycle.move_to(EngineState.SERVING)

    async def recover(self, reason: str, lost_epoch: Epoch) -> None:
        """Replace the worker of ``lost_epoch``, which exited unexpectedly.

        A drained engine stays drained.
        """
        async with self.replacing:
            if self._epochs.current != lost_epoch:
                return  # a planned restart has replaced it already
            # A restart may have submitted requests to this worker after it had exited.
            self._served.on_epoch_ended()
            if self._lifecycle.state is EngineState.SERVING:
                self._lifecycle.move_to(EngineState.RESTARTING)
            try:
                await self._wait_after_loss(WorkerLostError(reason))
                await self._workers.await_lost_worker()
                await self.replace(await self.standby.take(), reason="crash")
            except WorkerUnrecoverableError:
                return
            log.info("requests carried over", extra={"count": self._served.resubmit()})
            if self._lifecycle.state is EngineState.RESTARTING:
                self._lifecycle.move_to(EngineState.SERVING)

    def on_report(self, report: worker_ipc.Report) -> None:
        """Handle a report of the serving worker, unless a replacement is in progress."""
        if not self.replacing.locked():
            if not report.capturing:
                self._workers.dismiss_stopped()
            self.standby.on_report(report.devices)

    async def prepare(self) -> tuple[WorkerHandle, bool]:
        """Return a prepared successor, and whether it was the standby. Raises WorkerLostError."""
        if (standby := await self.standby.take()) is not None:
            return standby, True
        successor = self._workers.create_successor()
        await self._workers.prepare(successor, min(PREPARE_TIMEOUT_S, self._timeout_s))
        return successor, False

    async def replace(
        self,
        successor: WorkerHandle | None,
        handover: bytes | None = None,
        reason: str = "restart",
    ) -> worker_ipc.Ready | None:
        """Make ``successor`` serve after the former worker has stopped.

        If it is None or fails, start a new worker instead and return None. Raises
        WorkerUnrecoverableError if no worker can be started.
        """
        if successor is not None:
            try:
                ready = await self._workers.take_over(successor, self._timeout_s, True, handover)
            except WorkerLostError as error:
                self._fail_start(error)
                await self._wait_after_loss(error)
            else:
                self._begin_epoch(ready, reason)
                return ready
        await self.start(reason if successor is None else "crash")
        return None

    async def start(self, reason: str) -> None:
        """Start a worker. Try again after a failure, within the crash budget.

        Raises WorkerUnrecoverableError if the budget is exhausted.
        """
        while True:
            try:
                ready = await self._workers.start(self._timeout_s)
            except WorkerLostError as error:
                self._fail_start(error)
                await self._wait_after_loss(error)
                reason = "crash"
                continue
            self._begin_epoch(ready, reason)
            return

    def _begin_epoch(self, ready: worker_ipc.Ready, reason: str) -> None:
        self._failures.worker.mark_serving()
        self.standby.on_epoch_started()
        self._served.on_epoch_started(ready, reason)

    async def _wait_after_loss(self, error: WorkerLostError) -> None:
        # Raises WorkerUnrecoverableError if the crash budget is exhausted.
        try:
            delay_s = self._failures.count_worker_loss(error)
        except WorkerUnrecoverableError as unrecoverable:
            self._served.fail(str(unrecoverable))
            raise
        await asyncio.sleep(delay_s)

    def _fail_start(self, error: WorkerLostError) -> None:
        log.error(
            "cannot start a worker",
            extra={"epoch": str(self._epochs.current), "reason": str(error)},
        )
