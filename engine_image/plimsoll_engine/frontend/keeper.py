"""Keeps one worker serving: the first start, a successor for a planned restart, a crash."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from plimsoll_api.admin import EngineState
from plimsoll_engine import ipc
from plimsoll_engine.frontend.epochs import CrashBudget, Epochs
from plimsoll_engine.frontend.lifecycle import Lifecycle
from plimsoll_engine.frontend.worker import Worker, WorkerLost
from plimsoll_engine.frontend.workers import Workers

log = logging.getLogger(__name__)

# A successor that takes longer than this to prepare is not worth waiting for: what stands in its
# way (no device memory, above all) may be the worker that it is to replace.
PREPARE_TIMEOUT_S = 60.0


class GaveUp(Exception):
    """No worker can be had; the engine has failed."""


class Served(Protocol):
    """Whose requests the worker computes."""

    def epoch_begun(self, ready: ipc.Ready, reason: str) -> None: ...

    def resubmit(self) -> int: ...

    def fail(self, message: str) -> None: ...


class Keeper:
    """``replacing`` is held by whoever replaces the worker: a restart or a recovery."""

    def __init__(
        self,
        workers: Workers,
        epochs: Epochs,
        lifecycle: Lifecycle,
        served: Served,
        startup_timeout_s: float,
    ) -> None:
        self.replacing = asyncio.Lock()
        self._workers = workers
        self._epochs = epochs
        self._lifecycle = lifecycle
        self._served = served
        self._timeout_s = startup_timeout_s
        self._crashes = CrashBudget()

    async def first_start(self) -> None:
        """A worker that says itself that it cannot go on ends the engine here: it is the settings.
        Otherwise the engine serves, or has failed."""
        async with self.replacing:
            try:
                await self.start("initial")
            except GaveUp:
                return
            self._served.resubmit()
            if self._lifecycle.state is EngineState.WARMING:
                self._lifecycle.move(EngineState.SERVING)

    async def recover(self, reason: str) -> None:
        """Replace a worker that ended uninvited. A drained engine stays drained."""
        lost = self._epochs.current
        async with self.replacing:
            if self._epochs.current != lost:
                return  # a planned restart that had begun has replaced it
            if not self._crashes.spend(time.monotonic()):
                self._served.fail(f"the worker crashes again and again; the last time: {reason}")
                return
            if self._lifecycle.state is EngineState.SERVING:
                self._lifecycle.move(EngineState.RESTARTING)
            await self._workers.discard()
            try:
                await self.start("crash")
            except GaveUp:
                return
            log.info("requests carried over", extra={"count": self._served.resubmit()})
            if self._lifecycle.state is EngineState.RESTARTING:
                self._lifecycle.move(EngineState.SERVING)

    async def prepare(self) -> Worker:
        """A successor beside the serving worker. Raises :class:`WorkerLost`."""
        return await self._workers.prepare(min(PREPARE_TIMEOUT_S, self._timeout_s))

    async def replace(self, successor: Worker | None) -> None:
        """Let ``successor`` serve, or a new worker where there is none or it dies. No worker runs
        before. Raises :class:`GaveUp`."""
        if successor is not None:
            try:
                ready = await self._workers.take_over(successor, self._timeout_s, quick=True)
            except WorkerLost as error:
                self._bear(error)
            else:
                self._served.epoch_begun(ready, "restart")
                return
        await self.start("restart" if successor is None else "crash")

    async def start(self, reason: str) -> None:
        """A worker from the fork on, as often as the crash budget bears. Raises GaveUp."""
        while True:
            try:
                ready = await self._workers.start(self._timeout_s)
            except WorkerLost as error:
                self._bear(error)
                reason = "crash"
                continue
            self._served.epoch_begun(ready, reason)
            return

    def _bear(self, error: WorkerLost) -> None:
        log.error(
            "worker start failed",
            extra={"epoch": str(self._epochs.current), "reason": str(error)},
        )
        if not self._crashes.spend(time.monotonic()) or error.permanent:
            self._served.fail(f"no worker can be started: {error}")
            raise GaveUp(str(error)) from None
