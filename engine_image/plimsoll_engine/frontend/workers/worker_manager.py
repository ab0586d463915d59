"""Keeps one worker serving: the first start, a successor for a planned restart, a crash."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from plimsoll_api.admin import EngineState, Epoch
from plimsoll_engine.frontend.epochs import Epochs
from plimsoll_engine.frontend.lifecycle import Lifecycle
from plimsoll_engine.frontend.workers.failures import Failures, GaveUp, WorkerLost
from plimsoll_engine.frontend.workers.standby import Standby
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle
from plimsoll_engine.frontend.workers.worker_processes import WorkerProcesses
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.settings import StandbyPolicy

log = logging.getLogger(__name__)

# A successor that takes longer than this to prepare is not worth waiting for: what stands in its
# way (no device memory, above all) may be the worker that it is to replace.
PREPARE_TIMEOUT_S = 60.0


class Served(Protocol):
    """Whose requests the worker computes."""

    def epoch_begun(self, ready: worker_ipc.Ready, reason: str) -> None:
        """Take in that a worker serves with the sizes of ``ready``; ``reason`` is why."""

    def epoch_ended(self) -> None:
        """Take in that no worker serves. Again does nothing more."""

    def resubmit(self) -> int:
        """Hand every running request to the new worker. Returns how many there are."""

    def fail(self, message: str) -> None:
        """No worker can be had: end every request with ``message``."""


class WorkerManager:
    """``replacing`` is held by whoever replaces the worker: a restart or a recovery."""

    def __init__(
        self,
        workers: WorkerProcesses,
        epochs: Epochs,
        lifecycle: Lifecycle,
        served: Served,
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
        self._served = served
        self._timeout_s = startup_timeout_s
        self._failures = failures

    async def first_start(self) -> None:
        """Start the first worker.

        One that says itself that it cannot go on ends the engine here: it is the settings.
        Otherwise the engine serves, or has failed.
        """
        async with self.replacing:
            try:
                await self.start("initial")
            except GaveUp:
                return
            self._served.resubmit()
            if self._lifecycle.state is EngineState.WARMING:
                self._lifecycle.move(EngineState.SERVING)

    async def recover(self, reason: str, lost: Epoch) -> None:
        """Replace the worker of the epoch ``lost``, which ended uninvited.

        A standby serves in its place where there is one. A drained engine stays drained.
        """
        async with self.replacing:
            if self._epochs.current != lost:
                return  # a planned restart that had begun has replaced it
            # A restart may have learnt that this worker was ready only after it had ended, and may
            # have given it the requests.
            self._served.epoch_ended()
            if self._lifecycle.state is EngineState.SERVING:
                self._lifecycle.move(EngineState.RESTARTING)
            try:
                await self._bear(WorkerLost(reason))
                await self._workers.discard()
                await self.replace(await self.standby.take(), reason="crash")
            except GaveUp:
                return
            log.info("requests carried over", extra={"count": self._served.resubmit()})
            if self._lifecycle.state is EngineState.RESTARTING:
                self._lifecycle.move(EngineState.SERVING)

    def reported(self, report: worker_ipc.Report) -> None:
        """See to a standby, unless the worker that reports is being replaced."""
        if not self.replacing.locked():
            self.standby.reported(report.devices)

    async def prepare(self) -> tuple[WorkerHandle, bool]:
        """Return a successor beside the serving worker, and whether it is the standby.

        Raises :class:`WorkerLost`.
        """
        if (standby := await self.standby.take()) is not None:
            return standby, True
        successor = self._workers.successor()
        await self._workers.prepare(successor, min(PREPARE_TIMEOUT_S, self._timeout_s))
        return successor, False

    async def replace(
        self,
        successor: WorkerHandle | None,
        handover: bytes | None = None,
        reason: str = "restart",
    ) -> worker_ipc.Ready | None:
        """Let ``successor`` serve, or a new worker where there is none or it dies.

        No worker runs before. Returns what ``successor``, which alone gets the ``handover``, says
        of itself; None where it does not serve. Raises :class:`GaveUp`.
        """
        if successor is not None:
            try:
                ready = await self._workers.take_over(successor, self._timeout_s, True, handover)
            except WorkerLost as error:
                self._start_failed(error)
                await self._bear(error)
            else:
                self._begin(ready, reason)
                return ready
        await self.start(reason if successor is None else "crash")
        return None

    async def start(self, reason: str) -> None:
        """Start a worker, as often as the crash budget bears; raise GaveUp after that."""
        while True:
            try:
                ready = await self._workers.start(self._timeout_s)
            except WorkerLost as error:
                self._start_failed(error)
                await self._bear(error)
                reason = "crash"
                continue
            self._begin(ready, reason)
            return

    def _begin(self, ready: worker_ipc.Ready, reason: str) -> None:
        self._failures.worker.serves()
        self.standby.epoch_begun()
        self._served.epoch_begun(ready, reason)

    async def _bear(self, error: WorkerLost) -> None:
        """Wait until the next worker may be started; raise GaveUp, once the engine has failed."""
        try:
            delay_s = self._failures.worker_ended(error)
        except GaveUp as gave_up:
            self._served.fail(str(gave_up))
            raise
        await asyncio.sleep(delay_s)

    def _start_failed(self, error: WorkerLost) -> None:
        log.error(
            "worker start failed",
            extra={"epoch": str(self._epochs.current), "reason": str(error)},
        )
