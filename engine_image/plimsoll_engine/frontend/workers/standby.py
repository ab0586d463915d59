"""A successor that is made before anybody asks for it, so that a restart need not wait for one.

It has its context, weights and kernels, like any successor, and waits for its turn. It writes to
nothing that the serving worker uses: not to the KV pool, which it only maps, and not to the
weights. There is one at most, always or while somebody holds a lease on it. It is begun with a
report of the serving worker, so that whatever that one carries over comes first, and only with
memory to spare. Where it ends by itself, another one is begun, as often as a worker that serves may
crash; the serving worker does not notice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from plimsoll_api.admin import (
    STANDBY,
    DeviceMemory,
    LedgerEntry,
    ProcessMemory,
    Role,
    StandbyState,
    StandbyStatus,
)
from plimsoll_engine.frontend.workers.failures import CrashBudget, WorkerLost
from plimsoll_engine.frontend.workers.standby_memory import StandbyMemory
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle
from plimsoll_engine.frontend.workers.worker_processes import WorkerProcesses
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.process.headroom import host_headroom
from plimsoll_engine.process.host_memory import private_anon
from plimsoll_engine.settings import StandbyPolicy

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""At least so long after its end the next one is begun: a replacement of the worker comes first."""
REFUSED_RETRY_S = 10.0
"""After so long it is looked again whether there is memory."""
HOST_SPARE_BYTES = 1 << 30
DEVICE_SPARE_BYTES = 2 << 30
"""What must be free for each rank, and on each device, before one is begun. It takes less than half
of it, so that the serving worker does not run out of memory for its sake."""


class Standby:
    """``policy``: when there is one. ``timeout_s`` is for its preparation."""

    def __init__(
        self,
        workers: WorkerProcesses,
        crashes: CrashBudget,
        policy: StandbyPolicy,
        timeout_s: float,
        headroom: Callable[[], int | None] = host_headroom,
    ) -> None:
        self.policy = policy
        self.error: str | None = None
        """Why there is none although one is wanted."""
        self._workers = workers
        self._timeout_s = timeout_s
        self._headroom = headroom
        self._crashes = crashes
        self._not_before: float | None = 0.0
        """When the next one may be begun (CLOCK_MONOTONIC); None while too many have ended."""
        self._leased_until = 0.0
        self._lease: asyncio.TimerHandle | None = None
        self._giving_back: asyncio.Task[None] | None = None
        self._handle: WorkerHandle | None = None
        self._preparing: asyncio.Task[WorkerHandle] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._memory = StandbyMemory()

    @property
    def wanted(self) -> bool:
        """Whether there should be one now."""
        if self.policy is StandbyPolicy.ON_SUSPICION:
            return time.monotonic() < self._leased_until
        return self.policy is StandbyPolicy.ALWAYS

    @property
    def prepared(self) -> worker_ipc.Prepared | None:
        """What the standby said of itself; None while there is none that could serve."""
        preparing = self._preparing
        if preparing is None or not preparing.done() or preparing.cancelled():
            return None
        if preparing.exception() is not None or preparing.result().gone_or_lost:
            return None
        return preparing.result().prepared.result()

    @property
    def status(self) -> StandbyStatus | None:
        """What the engine says of it; None where the policy is to have none."""
        if self.policy is StandbyPolicy.NEVER:
            return None
        if self.prepared is not None:
            return StandbyStatus(StandbyState.PREPARED)
        state = StandbyState.ABSENT if self._preparing is None else StandbyState.PREPARING
        return StandbyStatus(state, self.error if self.wanted else None)

    @property
    def processes(self) -> list[ProcessMemory]:
        """The processes of its ranks from their fork on; none where there is no standby."""
        handle = self._handle
        if self._preparing is None or handle is None or handle.gone_or_lost:
            return []
        if (prepared := self.prepared) is not None and prepared.memory is not None:
            return [prepared.memory, *prepared.others]  # they do nothing since
        return [
            ProcessMemory(Role.WORKER, pid, name=STANDBY, private=private_anon(pid))
            for pid in handle.living
        ]

    def ledger(self) -> list[LedgerEntry]:
        """Return what the standby holds."""
        return self._memory.entries(self.processes)

    def lease(self, lease_s: float) -> None:
        """Want one for so many seconds from now on; with 0, or when they are over, none any more.

        Again renews the lease.
        """
        if not self.wanted:  # what went wrong before may be over
            self._crashes.reset()
            self._not_before, self.error = 0.0, None
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        self._leased_until = time.monotonic() + lease_s
        if lease_s > 0:
            loop = asyncio.get_running_loop()
            self._lease = loop.call_later(lease_s, self._give_back, "its lease is over")
        else:
            self._give_back("it is no longer wanted")

    def epoch_begun(self) -> None:
        """Forget what an earlier epoch's standby held, and its lease."""
        self._memory = StandbyMemory()
        self.close()

    def reported(self, devices: Sequence[DeviceMemory]) -> None:
        """Begin a standby where none is, beside the worker that reports its ``devices``."""
        if self._preparing is None:
            due = self._not_before is not None and time.monotonic() >= self._not_before
            if self.wanted and due:
                self._begin(devices)
        else:
            self._memory.seen(devices, self.prepared is not None)

    async def take(self) -> WorkerHandle | None:
        """Return the standby, which is none any more; waits where it still prepares itself.

        None where there is none, or where it failed.
        """
        if self._giving_back is not None:  # a successor beside it would be one worker too many
            await asyncio.wait({self._giving_back})
        preparing = self._leave()
        if preparing is None:
            return None
        try:
            handle = await preparing
        except WorkerLost as error:
            self.error = str(error)
            return None
        return None if handle.gone_or_lost else handle

    async def end(self) -> None:
        """End the standby, also one that still prepares itself. Again does nothing more."""
        preparing = self._leave()
        if preparing is None:
            return
        preparing.cancel()
        await asyncio.wait({preparing})
        if not preparing.cancelled() and preparing.exception() is None:
            await self._workers.abandon(preparing.result())

    def close(self) -> None:
        """End a lease. A standby that was taken for a restart stays with that restart."""
        self._leased_until = 0.0
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _give_back(self, reason: str) -> None:
        if self._preparing is not None:
            log.info("standby worker given back", extra={"reason": reason})
            self._giving_back = asyncio.create_task(self.end(), name="standby worker's end")

    def _begin(self, devices: Sequence[DeviceMemory]) -> None:
        if (lack := self._lack(devices)) is not None:
            if lack != self.error:
                log.warning("no standby worker", extra={"reason": lack})
            self.error, self._not_before = lack, time.monotonic() + REFUSED_RETRY_S
            return
        self._memory.begin(devices)
        self._handle = self._workers.successor()
        self._preparing = asyncio.create_task(self._prepared(self._handle), name="standby worker")
        self._watching = asyncio.create_task(
            self._watch(self._preparing), name="standby worker's watch"
        )

    async def _prepared(self, handle: WorkerHandle) -> WorkerHandle:
        await self._workers.prepare(handle, self._timeout_s)
        return handle

    def _lack(self, devices: Sequence[DeviceMemory]) -> str | None:
        """Return which memory is too short for a standby; None where none is known to be."""
        spare, needed = self._headroom(), HOST_SPARE_BYTES * self._workers.ranks
        if spare is not None and spare < needed:
            return f"less than {needed >> 20} MiB of host memory are free"
        for device in devices:
            if device.total is None or device.used is None:
                continue
            if device.total - device.used < DEVICE_SPARE_BYTES:
                return f"less than {DEVICE_SPARE_BYTES >> 20} MiB of device {device.index} are free"
        return None

    def _leave(self) -> asyncio.Task[WorkerHandle] | None:
        preparing, self._preparing = self._preparing, None
        self._handle = None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._not_before = 0.0
        return preparing

    async def _watch(self, preparing: asyncio.Task[WorkerHandle]) -> None:
        """Let another one be begun where it ends before it is taken."""
        self._crashes.serves()
        try:
            handle = await asyncio.shield(preparing)
            self.error = None
            log.info("standby worker prepared", extra={"epoch": str(handle.epoch)})
            await handle.exited.wait()
            reason = "it ended"
        except WorkerLost as error:
            reason = str(error)
        delay_s = self._crashes.spend()
        log.warning("no standby worker", extra={"reason": reason, "next_in_s": delay_s})
        self.error = reason
        self._preparing = self._handle = None
        self._not_before = None if delay_s is None else time.monotonic() + max(delay_s, RETRY_S)
