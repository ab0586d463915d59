"""A successor that is made before anybody asks for it, so that a restart need not wait for one.

It has its context, weights and kernels, like any successor, and waits for its turn. It writes to
nothing that the serving worker uses: not to the KV pool, which it only maps, and not to the
weights. There is one at most. It is begun with a report of the serving worker, so that whatever
that one carries over comes first. Where it ends by itself, another one is begun, as often as a
worker that serves may crash; the serving worker does not notice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from plimsoll_api.admin import DeviceMemory, LedgerEntry, MemoryKind, ProcessMemory, Role
from plimsoll_engine.frontend.epochs import CrashBudget
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle, WorkerLost
from plimsoll_engine.frontend.workers.worker_processes import WorkerProcesses
from plimsoll_engine.messages import worker_ipc

log = logging.getLogger(__name__)

OWNER = "standby_worker"
RETRY_S = 1.0
"""At least so long after its end the next one is begun: a replacement of the worker comes first."""
SETTLED_REPORTS = 2
"""The serving worker's report that counts what a standby takes of the devices: the first one may
have been written before the standby was there."""


class Standby:
    """``wanted``: whether there is one at all. ``timeout_s`` is for its preparation."""

    def __init__(self, workers: WorkerProcesses, wanted: bool, timeout_s: float) -> None:
        self._workers = workers
        self._wanted = wanted
        self._timeout_s = timeout_s
        self._crashes = CrashBudget()
        self._not_before: float | None = 0.0
        """When the next one may be begun (CLOCK_MONOTONIC); None while too many have ended."""
        self._preparing: asyncio.Task[WorkerHandle] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._without: int | None = None
        self._taken: int | None = None
        self._reports = 0

    @property
    def prepared(self) -> worker_ipc.Prepared | None:
        """What the standby said of itself; None while there is none that could serve."""
        preparing = self._preparing
        if preparing is None or not preparing.done() or preparing.cancelled():
            return None
        if preparing.exception() is not None or preparing.result().exited.is_set():
            return None
        return preparing.result().prepared.result()

    @property
    def process(self) -> ProcessMemory | None:
        """The process that waits, as of when it was prepared: it does nothing since."""
        return None if (prepared := self.prepared) is None else prepared.memory

    def ledger(self) -> list[LedgerEntry]:
        """Return what the standby holds; on devices once the serving worker has seen it there."""
        if (prepared := self.prepared) is None:
            return []
        held = [(MemoryKind.HOST, prepared.host_bytes), (MemoryKind.DEVICE, self._taken)]
        return [
            LedgerEntry(f"{OWNER}_{kind}", kind, size, size, Role.WORKER)
            for kind, size in held
            if size is not None
        ]

    def reported(self, devices: Sequence[DeviceMemory]) -> None:
        """Begin a standby where none is, beside the worker that reports its ``devices``."""
        if self._preparing is None:
            due = self._not_before is not None and time.monotonic() >= self._not_before
            if self._wanted and due:
                self._begin(beyond_torch(devices))
        elif self.prepared is not None:
            self._reports += 1
            after = beyond_torch(devices)
            if self._reports == SETTLED_REPORTS and None not in (self._without, after):
                self._taken = max(0, (after or 0) - (self._without or 0))

    async def take(self) -> WorkerHandle | None:
        """Return the standby, which is none any more; waits where it still prepares itself.

        None where there is none, or where it failed.
        """
        preparing = self._leave()
        if preparing is None:
            return None
        try:
            handle = await preparing
        except WorkerLost:
            return None
        return None if handle.exited.is_set() else handle

    async def end(self) -> None:
        """End the standby, also one that still prepares itself. Again does nothing more."""
        preparing = self._leave()
        if preparing is None:
            return
        preparing.cancel()
        await asyncio.wait({preparing})
        if not preparing.cancelled() and preparing.exception() is None:
            await self._workers.abandon(preparing.result())

    def _begin(self, without: int | None) -> None:
        self._without, self._taken, self._reports = without, None, 0
        self._preparing = asyncio.create_task(
            self._workers.prepare(self._timeout_s), name="standby worker"
        )
        self._watching = asyncio.create_task(
            self._watch(self._preparing), name="standby worker's watch"
        )

    def _leave(self) -> asyncio.Task[WorkerHandle] | None:
        preparing, self._preparing = self._preparing, None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._not_before = 0.0
        return preparing

    async def _watch(self, preparing: asyncio.Task[WorkerHandle]) -> None:
        """Let another one be begun where it ends before it is taken."""
        began = time.monotonic()
        try:
            handle = await asyncio.shield(preparing)
            log.info("standby worker prepared", extra={"epoch": str(handle.epoch)})
            await handle.exited.wait()
            reason = "it ended"
        except WorkerLost as error:
            reason = str(error)
        delay_s = self._crashes.spend(time.monotonic() - began)
        log.warning("no standby worker", extra={"reason": reason, "next_in_s": delay_s})
        self._preparing = None
        self._not_before = None if delay_s is None else time.monotonic() + max(delay_s, RETRY_S)


def beyond_torch(devices: Sequence[DeviceMemory]) -> int | None:
    """Return the used bytes of all devices that are not the serving worker's allocator's.

    None where one is unknown, and without a device.
    """
    found = 0
    for device in devices:
        if device.used is None or device.torch_reserved is None:
            return None
        found += device.used - device.torch_reserved
    return found if devices else None
