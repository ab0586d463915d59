"""When there is a standby, and what it takes of host and devices.

Tests ``frontend/workers/standby.py`` and ``frontend/workers/standby_memory.py``.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

import pytest

from plimsoll_api.admin import (
    STANDBY_PROCESS_NAME,
    DeviceMemory,
    Epoch,
    MemoryKind,
    ProcessMemory,
    Role,
    StandbyState,
    StandbyStatus,
)
from plimsoll_engine.frontend.workers import standby as module
from plimsoll_engine.frontend.workers.failures import CrashBudget, WorkerLostError
from plimsoll_engine.frontend.workers.standby import Standby
from plimsoll_engine.frontend.workers.standby_memory import StandbyMemory, count_bytes_outside_torch
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle
from plimsoll_engine.messages.worker_ipc import Prepared
from plimsoll_engine.messages.zygote_ipc import Exited
from plimsoll_engine.settings import StandbyPolicy

GIB = 1 << 30


def devices(used: int | None, reserved: int | None = 2 * GIB) -> list[DeviceMemory]:
    return [DeviceMemory(0, used=used, torch_reserved=reserved)]


class Processes:
    """Makes handles without processes, or fails."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.made: list[WorkerHandle] = []
        self.abandoned: list[WorkerHandle] = []
        self.error: str | None = None
        self.has_stopped_worker = False
        self.dismissals = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    def create_successor(self) -> WorkerHandle:
        number = len(self.made) + 1
        epoch = Epoch("b", number)
        return WorkerHandle(epoch, "/nonexistent", 1 << 20, self.ranks, _ignore, _ignore)

    async def prepare(self, handle: WorkerHandle, _timeout_s: float) -> None:
        if self.error is not None:
            raise WorkerLostError(self.error)
        handle.pids.append(os.getpid())
        self.made.append(handle)
        await self.may_go_on.wait()
        memory, *others = (
            ProcessMemory(
                Role.WORKER, os.getpid(), name=STANDBY_PROCESS_NAME, private=(300 - rank) << 20
            )
            for rank in range(self.ranks)
        )
        handle.prepared.set_result(Prepared(handle.epoch.number, {}, memory, others))

    def dismiss_stopped(self) -> None:
        self.dismissals += self.has_stopped_worker

    async def kill_successor(self, handle: WorkerHandle) -> None:
        self.abandoned.append(handle)
        handle.exited.set()


def _ignore(*_: Any) -> None:
    pass


def standby(processes: Any, policy: StandbyPolicy = StandbyPolicy.ALWAYS) -> Standby:
    return Standby(processes, CrashBudget(), policy, 5.0, lambda: None)


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_used_memory_beyond_torch_is_unknown_where_a_part_is() -> None:
    assert count_bytes_outside_torch(devices(5 * GIB) + devices(3 * GIB)) == 4 * GIB
    assert count_bytes_outside_torch(devices(5 * GIB) + devices(None)) is None
    assert count_bytes_outside_torch(devices(5 * GIB, None)) is None
    assert count_bytes_outside_torch([]) is None


def test_the_ledger_has_what_the_devices_have_less() -> None:
    async def run() -> None:
        one = standby(Processes())
        one.on_report(devices(10 * GIB))
        assert (one.prepared, one.processes, one.list_ledger_entries()) == (None, [], [])
        await turn()
        assert len(one.processes) == 1
        assert [entry.kind for entry in one.list_ledger_entries()] == [MemoryKind.HOST]
        one.on_report(devices(10 * GIB + 5))  # may have been written before
        # The worker's own allocator grew by as much again, which is not the standby's.
        one.on_report(devices(12 * GIB, 3 * GIB))
        one.on_report(devices(20 * GIB, 3 * GIB))
        found = {
            entry.owner: (entry.kind, entry.bytes, entry.bound)
            for entry in one.list_ledger_entries()
        }
        assert found == {
            "standby_worker_host": (MemoryKind.HOST, 300 << 20, 300 << 20),
            "standby_worker_device": (MemoryKind.DEVICE, GIB, GIB),
        }
        await one.end()
        left = {entry.owner: (entry.bytes, entry.bound) for entry in one.list_ledger_entries()}
        assert left == {
            "standby_worker_host": (0, 300 << 20), "standby_worker_device": (0, GIB),
        }  # fmt: skip
        one.on_epoch_started()
        assert one.list_ledger_entries() == []

    asyncio.run(run())


def test_the_memory_of_the_former_worker_hides_no_standby() -> None:
    """The driver frees it when the former worker exits, which may take several reports."""

    async def run() -> None:
        processes = Processes()
        one = standby(processes)
        one.on_epoch_started()
        processes.has_stopped_worker = True
        for _ in range(3):
            one.on_report(devices(12 * GIB))
            await turn()
            assert one.processes == []
        processes.has_stopped_worker = False
        one.on_report(devices(12 * GIB))  # may have been written before the exit
        await turn()
        assert one.processes == []
        one.on_report(devices(10 * GIB))
        await turn()
        one.on_report(devices(11 * GIB))
        assert {entry.owner: entry.bytes for entry in one.list_ledger_entries()} == {
            "standby_worker_host": 300 << 20, "standby_worker_device": GIB,
        }  # fmt: skip

    asyncio.run(run())


@pytest.mark.parametrize("policy", [StandbyPolicy.ALWAYS, StandbyPolicy.ON_SUSPICION])
def test_a_standby_that_is_due_does_not_wait_for_all_graphs(policy: StandbyPolicy) -> None:
    """The former worker otherwise stays until they are captured, which takes seconds under load."""

    async def run() -> None:
        processes = Processes()
        one = standby(processes, policy)
        one.on_epoch_started()
        processes.has_stopped_worker = True
        one.on_report(devices(12 * GIB))
        assert processes.dismissals == (policy is StandbyPolicy.ALWAYS), "nobody asked for one"

    asyncio.run(run())


def test_the_ledger_has_the_processes_of_all_ranks() -> None:
    async def run() -> None:
        one = standby(Processes(ranks=2))
        one.on_report(devices(10 * GIB) + devices(10 * GIB))
        await turn()
        one.on_report(devices(11 * GIB) + devices(12 * GIB))
        assert [process.private for process in one.processes] == [300 << 20, 299 << 20]
        found = {entry.owner: entry.bytes for entry in one.list_ledger_entries()}
        assert found == {"standby_worker_host": 599 << 20, "standby_worker_device": 3 * GIB}
        await one.end()

    asyncio.run(run())


def test_a_process_of_unknown_size_makes_the_sum_unknown() -> None:
    memory = StandbyMemory()
    known, unknown = (ProcessMemory(Role.WORKER, 7, private=size) for size in (5, None))
    assert [entry.bytes for entry in memory.list_ledger_entries([known])] == [5]
    assert memory.list_ledger_entries([known, unknown]) == []


def test_memory_of_one_that_prepares_itself_is_in_the_ledger_already() -> None:
    async def run() -> None:
        processes = Processes()
        processes.may_go_on.clear()
        one = standby(processes)
        one.on_report(devices(10 * GIB))
        await turn()
        one.on_report(devices(11 * GIB))
        assert one.prepared is None
        assert one.status == StandbyStatus(StandbyState.PREPARING)
        (process,) = one.processes
        assert (process.name, process.pid) == (STANDBY_PROCESS_NAME, os.getpid())
        host, device = one.list_ledger_entries()
        assert host.kind is MemoryKind.HOST
        assert host.bytes > 1 << 20
        assert (device.bytes, device.kind) == (GIB, MemoryKind.DEVICE)
        processes.may_go_on.set()
        await one.end()

    asyncio.run(run())


def test_with_a_lease_there_is_one_until_the_lease_is_over_or_given_back() -> None:
    async def run() -> None:
        processes = Processes()
        one = standby(processes, StandbyPolicy.ON_SUSPICION)
        one.on_report([])
        await turn()
        assert (processes.made, one.status) == ([], StandbyStatus(StandbyState.ABSENT))
        for _ in range(2):  # again renews it
            one.set_lease(60.0)
            one.on_report([])
            await turn()
        assert len(processes.made) == 1
        assert one.status == StandbyStatus(StandbyState.PREPARED)
        for _ in range(2):
            one.set_lease(0.0)
            await turn()
        assert processes.abandoned == processes.made
        assert (one.prepared, one.processes) == (None, [])
        one.on_report([])
        await turn()
        assert len(processes.made) == 1, "nobody wants another"

        one.set_lease(0.05)
        one.on_report([])
        await turn()
        taken = await one.take()
        assert taken is processes.made[1]
        await asyncio.sleep(0.1)
        assert processes.abandoned == processes.made[:1], "it serves, and the lease is over"
        one.set_lease(0.05)
        one.on_report([])
        await turn()
        assert one.prepared is not None
        await asyncio.sleep(0.1)
        assert processes.abandoned == [processes.made[0], processes.made[2]]
        one.set_lease(60.0)
        one.end_lease()
        assert not one.is_wanted

    asyncio.run(run())


@pytest.mark.parametrize(
    ("spare", "device", "lack"),
    [
        (
            module.MIN_FREE_HOST_BYTES_PER_RANK - 1,
            None,
            "less than 1024 MiB of host memory is free",
        ),
        (None, 79 * GIB, "less than 2048 MiB of memory is free on device 0"),
    ],
)
def test_it_is_refused_where_it_would_take_the_last_memory(
    monkeypatch: pytest.MonkeyPatch, spare: int | None, device: int | None, lack: str
) -> None:
    monkeypatch.setattr(module, "MEMORY_CHECK_INTERVAL_S", 0.0)

    async def run() -> None:
        processes, free = Processes(), [spare]
        lease = StandbyPolicy.ON_SUSPICION
        one = Standby(cast(Any, processes), CrashBudget(), lease, 5.0, lambda: free[0])
        one.set_lease(60.0)
        one.on_report([DeviceMemory(0, used=device, total=80 * GIB, torch_reserved=GIB)])
        await turn()
        assert (processes.made, one.error) == ([], lack)
        assert one.status == StandbyStatus(StandbyState.ABSENT, lack)
        free[0] = module.MIN_FREE_HOST_BYTES_PER_RANK
        one.on_report([DeviceMemory(0, used=GIB, total=80 * GIB, torch_reserved=GIB)])
        await turn()
        assert len(processes.made) == 1
        assert one.status == StandbyStatus(StandbyState.PREPARED)
        one.end_lease()
        await one.end()

    asyncio.run(run())


def test_one_that_is_lost_is_not_taken() -> None:
    """The weights' holder ended, and everything that maps them is killed but not reaped yet."""

    async def run() -> None:
        processes = Processes()
        one = standby(processes)
        one.on_report([])
        await turn()
        processes.made[0].mark_lost("the weights are lost")
        assert one.prepared is None
        assert await one.take() is None

    asyncio.run(run())


def test_it_is_taken_once_and_the_next_report_makes_another() -> None:
    async def run() -> None:
        processes = Processes()
        one = standby(processes)
        assert await one.take() is None
        processes.may_go_on.clear()
        one.on_report([])
        one.on_report([])
        await turn()
        taking = asyncio.create_task(one.take())
        await turn()
        assert not taking.done(), "it waits for one that prepares itself"
        processes.may_go_on.set()
        assert await taking is processes.made[0]
        assert await one.take() is None
        one.on_report([])
        await turn()
        assert one.prepared is not None
        assert len(processes.made) == 2
        processes.made[1].exited.set()
        assert one.prepared is None
        await one.end()
        assert processes.abandoned == [processes.made[1]]

    asyncio.run(run())


def test_without_the_flag_there_is_none() -> None:
    async def run() -> None:
        processes = Processes()
        one = standby(processes, StandbyPolicy.NEVER)
        one.on_report([])
        await turn()
        assert (processes.made, await one.take(), one.status) == ([], None, None)
        await one.end()

    asyncio.run(run())


def test_one_that_ends_again_and_again_is_made_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_START_DELAY_S", 0.0)

    async def run() -> None:
        processes = Processes()
        one = standby(processes)
        one._crashes._delays_s = (0.0, 0.0)
        for number in range(5):
            one.on_report([])
            await turn()
            for handle in processes.made[number:]:
                handle.on_rank_exit(Exited(handle.epoch.number, handle.epoch.number, 1))
            await turn()
        assert len(processes.made) == 3
        assert one.prepared is None
        # Whatever replaces the worker begins anew.
        assert await one.take() is None
        one.on_report([])
        await turn()
        assert len(processes.made) == 4
        await one.end()

    asyncio.run(run())


def test_one_that_cannot_be_prepared_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_START_DELAY_S", 0.0)

    async def run() -> None:
        processes = Processes()
        processes.error = "no device memory"
        one = standby(processes)
        one.on_report([])
        await turn()
        assert await one.take() is None
        assert one.error == "no device memory"
        processes.error = None
        one.on_report([])
        await turn()
        assert one.prepared is not None
        await one.end()

    asyncio.run(run())


def test_no_successor_is_made_beside_a_standby_that_is_being_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes seconds to end where the driver is busy, and three workers are one too many."""

    async def run() -> None:
        processes = Processes()
        one = standby(processes, StandbyPolicy.ON_SUSPICION)
        one.set_lease(60.0)
        one.on_report([])
        await turn()
        gone = asyncio.Event()
        kill_successor = processes.kill_successor

        async def slow(handle: WorkerHandle) -> None:
            await gone.wait()
            await kill_successor(handle)

        monkeypatch.setattr(processes, "kill_successor", slow)
        one.set_lease(0.0)
        taking = asyncio.create_task(one.take())
        await turn()
        assert not taking.done(), "the caller forks a successor next"
        gone.set()
        assert await taking is None
        assert processes.abandoned == processes.made

    asyncio.run(run())
