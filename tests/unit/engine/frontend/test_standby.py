"""What a standby takes of the devices, by the serving worker's reports.

Tests ``frontend/workers/standby.py``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plimsoll_api.admin import DeviceMemory, Epoch, MemoryKind, ProcessMemory, Role
from plimsoll_engine.frontend.workers import standby as module
from plimsoll_engine.frontend.workers.standby import Standby, beyond_torch
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle, WorkerLost
from plimsoll_engine.messages.worker_ipc import Prepared
from plimsoll_engine.messages.zygote_ipc import Exited

GIB = 1 << 30


def devices(used: int | None, reserved: int | None = 2 * GIB) -> list[DeviceMemory]:
    return [DeviceMemory(0, used=used, torch_reserved=reserved)]


class Processes:
    """Makes handles without processes, or fails."""

    def __init__(self) -> None:
        self.made: list[WorkerHandle] = []
        self.abandoned: list[WorkerHandle] = []
        self.error: str | None = None
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def prepare(self, _timeout_s: float) -> WorkerHandle:
        if self.error is not None:
            raise WorkerLost(self.error)
        number = len(self.made) + 1
        handle = WorkerHandle(Epoch("b", number), "/nonexistent", 1 << 20, 1, _ignore, _ignore)
        handle.pids.append(number)
        self.made.append(handle)
        await self.may_go_on.wait()
        memory = ProcessMemory(Role.WORKER, number, name="standby")
        handle.prepared.set_result(Prepared(number, {}, memory, 300 << 20))
        return handle

    async def abandon(self, handle: WorkerHandle) -> None:
        self.abandoned.append(handle)
        handle.exited.set()


def _ignore(*_: Any) -> None:
    pass


def standby(processes: Any, wanted: bool = True) -> Standby:
    return Standby(processes, wanted, 5.0)


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_used_memory_beyond_torch_is_unknown_where_a_part_is() -> None:
    assert beyond_torch(devices(5 * GIB) + devices(3 * GIB)) == 4 * GIB
    assert beyond_torch(devices(5 * GIB) + devices(None)) is None
    assert beyond_torch(devices(5 * GIB, None)) is None
    assert beyond_torch([]) is None


def test_the_ledger_has_what_the_devices_have_less() -> None:
    async def run() -> None:
        one = standby(Processes())
        one.reported(devices(10 * GIB))
        assert (one.prepared, one.process, one.ledger()) == (None, None, [])
        await turn()
        assert one.process is not None
        one.reported(devices(10 * GIB + 5))  # may have been written before
        assert [entry.kind for entry in one.ledger()] == [MemoryKind.HOST]
        # The worker's own allocator grew by as much again, which is not the standby's.
        one.reported(devices(12 * GIB, 3 * GIB))
        one.reported(devices(20 * GIB, 3 * GIB))
        found = {entry.owner: (entry.kind, entry.bytes, entry.bound) for entry in one.ledger()}
        assert found == {
            "standby_worker_host": (MemoryKind.HOST, 300 << 20, 300 << 20),
            "standby_worker_device": (MemoryKind.DEVICE, GIB, GIB),
        }
        await one.end()
        assert one.ledger() == []

    asyncio.run(run())


def test_it_is_taken_once_and_the_next_report_makes_another() -> None:
    async def run() -> None:
        processes = Processes()
        one = standby(processes)
        assert await one.take() is None
        processes.may_go_on.clear()
        one.reported([])
        one.reported([])
        await turn()
        taking = asyncio.create_task(one.take())
        await turn()
        assert not taking.done(), "it waits for one that prepares itself"
        processes.may_go_on.set()
        assert await taking is processes.made[0]
        assert await one.take() is None
        one.reported([])
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
        one = standby(processes, wanted=False)
        one.reported([])
        await turn()
        assert (processes.made, await one.take()) == ([], None)
        await one.end()

    asyncio.run(run())


def test_one_that_ends_again_and_again_is_made_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    async def run() -> None:
        processes = Processes()
        one = standby(processes)
        one._crashes._delays_s = (0.0, 0.0)
        for number in range(5):
            one.reported([])
            await turn()
            for handle in processes.made[number:]:
                handle.reaped(Exited(handle.epoch.number, handle.epoch.number, 1))
            await turn()
        assert len(processes.made) == 3
        assert one.prepared is None
        # Whatever replaces the worker begins anew.
        assert await one.take() is None
        one.reported([])
        await turn()
        assert len(processes.made) == 4
        await one.end()

    asyncio.run(run())


def test_one_that_cannot_be_prepared_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    async def run() -> None:
        processes = Processes()
        processes.error = "no device memory"
        one = standby(processes)
        one.reported([])
        await turn()
        assert await one.take() is None
        processes.error = None
        one.reported([])
        await turn()
        assert one.prepared is not None
        await one.end()

    asyncio.run(run())
