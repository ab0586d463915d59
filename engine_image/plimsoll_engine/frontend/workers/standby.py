"""Standby worker: a successor that is prepared in advance, to shorten the next restart.

It maps the weights and the KV pool, but does not write to memory that the serving worker uses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from plimsoll_api.admin import (
    STANDBY_PROCESS_NAME,
    DeviceMemory,
    LedgerEntry,
    ProcessMemory,
    Role,
    StandbyState,
    StandbyStatus,
)
from plimsoll_engine.frontend.workers.failures import CrashBudget, WorkerLostError
from plimsoll_engine.frontend.workers.standby_memory import StandbyMemory
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle
from plimsoll_engine.frontend.workers.worker_processes import WorkerProcesses
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.process.headroom import measure_host_headroom
from plimsoll_engine.process.host_memory import read_private_dirty_bytes
from plimsoll_engine.settings import StandbyPolicy

log = logging.getLogger(__name__)

# Replacing the serving worker has priority over a new standby.
MIN_START_DELAY_S = 1.0
# Delay before free memory is checked again, after there was too little for a standby.
MEMORY_CHECK_INTERVAL_S = 10.0
MIN_FREE_HOST_BYTES_PER_RANK = 1 << 30
# A standby uses less than half of this free memory, so the serving worker does not run out of it.
MIN_FREE_DEVICE_BYTES = 2 << 30


class Standby:
    """Manager of the standby worker. ``policy`` decides when a standby should exist."""

    def __init__(
        self,
        workers: WorkerProcesses,
        crash_budget: CrashBudget,
        policy: StandbyPolicy,
        timeout_s: float,
        measure_headroom: Callable[[], int | None] = measure_host_headroom,
    ) -> None:
        self.policy = policy
        # Reason why there is no standby although there should be one.
        self.error: str | None = None
        self._workers = workers
        self._timeout_s = timeout_s
        self._headroom = measure_headroom
        self._crashes = crash_budget
        # Earliest start of the next standby in CLOCK_MONOTONIC seconds; None if the crash budget is
        # exhausted.
        self._not_before: float | None = 0.0
        self._leased_until = 0.0
        self._lease: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._handle: WorkerHandle | None = None
        self._preparing: asyncio.Task[WorkerHandle] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._memory = StandbyMemory()
        # Whether the next report may count device memory of the former worker. The memory of a
        # standby that starts then would be underestimated.
        self._includes_former_worker = False

    @property
    def is_wanted(self) -> bool:
        """Whether a standby should exist now."""
        if self.policy is StandbyPolicy.ON_SUSPICION:
            return time.monotonic() < self._leased_until
        return self.policy is StandbyPolicy.ALWAYS

    @property
    def prepared(self) -> worker_ipc.Prepared | None:
        """Prepared message of the standby; None if no standby is ready to serve."""
        preparing = self._preparing
        if preparing is None or not preparing.done() or preparing.cancelled():
            return None
        if preparing.exception() is not None or preparing.result().is_lost:
            return None
        return preparing.result().prepared.result()

    @property
    def status(self) -> StandbyStatus | None:
        """Status for the admin API; None if the policy is ``never``."""
        if self.policy is StandbyPolicy.NEVER:
            return None
        if self.prepared is not None:
            return StandbyStatus(StandbyState.PREPARED)
        state = StandbyState.ABSENT if self._preparing is None else StandbyState.PREPARING
        return StandbyStatus(state, self.error if self.is_wanted else None)

    @property
    def processes(self) -> list[ProcessMemory]:
        """Memory of the standby's processes, one per rank; empty if no standby exists."""
        handle = self._handle
        if self._preparing is None or handle is None or handle.is_lost:
            return []
        if (prepared := self.prepared) is not None and prepared.memory is not None:
            return [prepared.memory, *prepared.others]  # unchanged while they wait
        return [
            ProcessMemory(
                Role.WORKER, pid, name=STANDBY_PROCESS_NAME, private=read_private_dirty_bytes(pid)
            )
            for pid in handle.live_pids
        ]

    def list_ledger_entries(self) -> list[LedgerEntry]:
        """Return the ledger entries of the standby's memory."""
        return self._memory.list_ledger_entries(self.processes)

    def set_lease(self, lease_s: float) -> None:
        """Request a standby for the next ``lease_s`` seconds; 0 ends the lease."""
        if not self.is_wanted:  # what caused earlier failures may be gone
            self._crashes.reset()
            self._not_before, self.error = 0.0, None
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        self._leased_until = time.monotonic() + lease_s
        if lease_s > 0:
            loop = asyncio.get_running_loop()
            self._lease = loop.call_later(lease_s, self._stop_in_background, "its lease expired")
        else:
            self._stop_in_background("it is no longer needed")

    def on_epoch_started(self) -> None:
        """Discard the memory record of the previous epoch's standby, and end the lease."""
        self._memory = StandbyMemory()
        self._includes_former_worker = True
        self.end_lease()

    def on_report(self, devices: Sequence[DeviceMemory]) -> None:
        """Start a standby if one should exist, or update the memory of the existing one."""
        may_start = self._not_before is not None and time.monotonic() >= self._not_before
        is_due = self.is_wanted and may_start
        if self._includes_former_worker:
            if is_due:
                self._workers.dismiss_stopped()
            self._includes_former_worker = self._workers.has_stopped_worker
        elif self._preparing is None:
            if is_due:
                self._start(devices)
        else:
            self._memory.update(devices, self.prepared is not None)

    async def take(self) -> WorkerHandle | None:
        """Wait until the standby is prepared, and pass it to the caller.

        Return None if there is no standby or its preparation fails.
        """
        if self._stopping is not None:  # memory may not suffice for two successors
            await asyncio.wait({self._stopping})
        preparing = self._detach()
        if preparing is None:
            return None
        try:
            handle = await preparing
        except WorkerLostError as error:
            self.error = str(error)
            return None
        return None if handle.is_lost else handle

    async def end(self) -> None:
        """Stop the standby, even if it is not prepared yet. Idempotent."""
        preparing = self._detach()
        if preparing is None:
            return
        preparing.cancel()
        await asyncio.wait({preparing})
        if not preparing.cancelled() and preparing.exception() is None:
            await self._workers.kill_successor(preparing.result())

    def end_lease(self) -> None:
        """End the lease. A standby that :meth:`take` has returned is not affected."""
        self._leased_until = 0.0
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _stop_in_background(self, reason: str) -> None:
        if self._preparing is not None:
            log.info("standby worker stopped", extra={"reason": reason})
            self._stopping = asyncio.create_task(self.end(), name="standby worker stop")

    def _start(self, devices: Sequence[DeviceMemory]) -> None:
        if (shortage := self._find_memory_shortage(devices)) is not None:
            if shortage != self.error:
                log.warning(
                    "cannot start a standby worker, so a restart would take longer",
                    extra={"reason": shortage, "next_in_s": MEMORY_CHECK_INTERVAL_S},
                )
            self.error, self._not_before = shortage, time.monotonic() + MEMORY_CHECK_INTERVAL_S
            return
        self._memory.begin(devices)
        self._handle = self._workers.create_successor()
        self._preparing = asyncio.create_task(self._prepare(self._handle), name="standby worker")
        self._watching = asyncio.create_task(
            self._watch(self._preparing), name="standby worker watch"
        )

    async def _prepare(self, handle: WorkerHandle) -> WorkerHandle:
        await self._workers.prepare(handle, self._timeout_s)
        return handle

    def _find_memory_shortage(self, devices: Sequence[DeviceMemory]) -> str | None:
        # Memory of unknown size counts as sufficient.
        spare, needed = self._headroom(), MIN_FREE_HOST_BYTES_PER_RANK * self._workers.ranks
        if spare is not None and spare < needed:
            return f"less than {needed >> 20} MiB of host memory is free"
        for device in devices:
            if device.total is None or device.used is None:
                continue
            if device.total - device.used < MIN_FREE_DEVICE_BYTES:
                spare_mib = MIN_FREE_DEVICE_BYTES >> 20
                return f"less than {spare_mib} MiB of memory is free on device {device.index}"
        return None

    def _detach(self) -> asyncio.Task[WorkerHandle] | None:
        preparing, self._preparing = self._preparing, None
        self._handle = None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._not_before = 0.0
        return preparing

    async def _watch(self, preparation: asyncio.Task[WorkerHandle]) -> None:
        # Waits for the exit, and decides when the next standby may start.
        self._crashes.mark_serving()
        try:
            handle = await asyncio.shield(preparation)
            self.error = None
            log.info("standby worker prepared", extra={"epoch": str(handle.epoch)})
            await handle.exited.wait()
            reason = "it exited"
        except WorkerLostError as error:
            reason = str(error)
        delay_s = self._crashes.count_crash()
        log.warning(
            "the standby worker failed, so a restart would take longer",
            extra={"reason": reason, "next_in_s": delay_s},
        )
        self.error = reason
        self._preparing = self._handle = None
        self._not_before = (
            None if delay_s is None else time.monotonic() + max(delay_s, MIN_START_DELAY_S)
        )
