"""What a failure may end: a request, a worker, the zygote, the engine.

Tests ``frontend/workers/failures.py`` and ``frontend/workers/worker_processes.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from plimsoll_api.admin import EngineState, Role
from plimsoll_engine.frontend.epochs import Epochs
from plimsoll_engine.frontend.requests.request_log import Generation, RequestFailedError
from plimsoll_engine.frontend.workers import worker_handle
from plimsoll_engine.frontend.workers.failures import (
    CrashBudget,
    Failures,
    FailureScope,
    ForkRefusedError,
    WorkerLostError,
    WorkerUnrecoverableError,
    ZygoteLostError,
)
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle
from plimsoll_engine.frontend.workers.worker_processes import WorkerProcesses
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.worker_ipc import Sampling
from plimsoll_engine.messages.zygote_ipc import Exited, WorkerConfig
from plimsoll_engine.settings import Settings
from tests.byte_text import bytes_text
from tests.unit.engine.frontend.test_recovery import checkpoint, engine_of, recovered, settings

__all__ = ["checkpoint", "settings"]

PID = 1 << 30
"""Of no process."""


class Zygote:
    """Forks processes that are not there; ``failure`` comes with the fork of that rank."""

    pid = PID

    def __init__(self) -> None:
        self.failure: dict[int, Exception] = {}
        self.finish_forking: list[tuple[Role, int]] = []
        self.killed = self.closed = False

    async def fork(self, number: int, role: Role = Role.WORKER, rank: int = 0) -> int:
        if role is Role.WORKER and rank in self.failure:
            raise self.failure[rank]
        self.finish_forking.append((role, number))
        return PID + len(self.finish_forking)

    def kill(self) -> None:
        self.killed = True

    async def close(self) -> None:
        self.closed = True


class Rig:
    """Processes of a stub zygote, and one worker that serves."""

    def __init__(self, folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        config = WorkerConfig(
            "m", str(folder), str(folder / "w.sock"), "float32", "cpu", tensor_parallel_size=ranks
        )
        self.lost: list[str] = []
        self.processes = WorkerProcesses(
            config, Epochs("b"), Failures(), lambda _: None, self.lost.append
        )
        self.zygote = Zygote()
        self.dies = True
        """Whether a signal ends a worker."""
        self.processes._zygote = cast(Any, self.zygote)
        monkeypatch.setattr(worker_handle, "send_signal", self._signal)
        monkeypatch.setattr(worker_handle, "SIGTERM_GRACE_S", 0.01)
        monkeypatch.setattr(worker_handle, "SIGKILL_GRACE_S", 0.01)

    def _signal(self, pid: int, _number: int) -> bool:
        for number, worker in list(self.processes._live.items()):
            if self.dies and pid in worker.live_pids:
                self.processes._on_process_exit(Exited(number, pid, -9))
        return True

    async def serve(self) -> WorkerHandle:
        worker = self.processes.create_successor()
        self.processes._live[worker.epoch.number] = worker
        worker.pids += [PID + 90 + rank for rank in range(self.processes.ranks)]
        self.processes._set_serving(worker)
        worker.ready.set_result(
            worker_ipc.Ready(
                worker.epoch.number, max_model_len=9, num_blocks=8, block_size=4, load_s=0
            )
        )
        return worker


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "error", [ForkRefusedError("EAGAIN"), ZygoteLostError("no fork within 10 s"), OSError(24, "x")]
)
def test_a_standby_that_cannot_be_forked_costs_the_standby(
    ranks: int, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        rig = Rig(tmp_path, ranks, monkeypatch)
        serving = await rig.serve()
        rig.zygote.failure = {ranks - 1: error}
        standby = rig.processes.create_successor()
        with pytest.raises(WorkerLostError, match="cannot start the worker"):
            await rig.processes.prepare(standby, 5.0)
        assert not serving.is_lost
        assert rig.lost == []
        assert list(rig.processes._live.values()) == [serving]
        assert not rig.zygote.closed
        assert rig.zygote.killed == isinstance(error, ZygoteLostError), (
            "one that hangs is replaced alone"
        )

    asyncio.run(run())


def test_a_worker_that_cannot_be_forked_has_another_zygote_but_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        rig = Rig(tmp_path, 1, monkeypatch)
        rig.zygote.failure = {0: ForkRefusedError("several threads")}
        with pytest.raises(WorkerLostError):
            await rig.processes.start(5.0)
        assert rig.zygote.killed
        assert not rig.zygote.closed

    asyncio.run(run())


def test_a_zygote_that_cannot_be_started_is_a_worker_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def run() -> None:
        rig = Rig(tmp_path, 1, monkeypatch)
        rig.processes._zygote = None
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
        with pytest.raises(WorkerLostError, match="temporarily unavailable"):
            await rig.processes.start(5.0)
        await rig.processes._socket.close()

    asyncio.run(run())


def test_a_successor_that_cannot_be_reaped_leaves_the_serving_worker_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        rig = Rig(tmp_path, 1, monkeypatch)
        serving = await rig.serve()
        stuck = rig.processes.create_successor()
        rig.processes._live[stuck.epoch.number] = stuck
        stuck.pids.append(PID + 5)
        rig.dies = False
        await rig.processes.kill_successor(stuck)
        assert not rig.zygote.closed
        assert not serving.is_lost
        rig.processes._on_process_exit(Exited(stuck.epoch.number, PID + 5, -9))
        assert list(rig.processes._live.values()) == [serving]

    asyncio.run(run())


def test_a_recovery_that_fails_ends_the_engine_and_does_not_leave_it_waiting(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        engine, workers, request = await engine_of(settings)

        async def fails() -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(workers, "await_lost_worker", fails)
        assert workers.serving is not None
        workers.serving.on_rank_exit(Exited(1, 1, -9))
        await recovered(engine)
        await asyncio.sleep(0)
        assert engine.lifecycle.state is EngineState.FAILED
        with pytest.raises(RequestFailedError, match="Too many open files"):
            request.take()

    asyncio.run(run())


def test_a_request_that_ends_its_workers_ends_alone(settings: Settings) -> None:
    """Each worker dies while it computes ``a``; ``b`` and ``c`` run beside it."""

    async def run() -> None:
        engine, workers, guilty = await engine_of(settings)
        engine.failures.worker = CrashBudget((0.0, 0.0, 0.0))
        others = [Generation(n, [1, 2], Sampling(max_tokens=2), bytes_text()) for n in "bc"]
        engine.requests.admit(*others)
        engine.resubmit()

        async def crash() -> None:
            assert workers.serving is not None
            number = workers.serving.epoch.number
            workers.serving.on_rank_exit(Exited(number, number, -9))
            await recovered(engine)

        await crash()
        await crash()
        assert [name for _, name in workers.submitted()] == [*"abc", *"abc", "a"]
        assert not others[0].with_worker, "they wait for their turn"
        await crash()
        with pytest.raises(RequestFailedError, match="3 workers exited"):
            guilty.take()
        for other in others:
            assert other.with_worker
            token = worker_ipc.Token(other.request_id, 65, None, None, None, other.attempt)
            engine._handle_tokens([token])
            assert other.losses == 0
        assert engine.lifecycle.state is EngineState.SERVING
        assert all(other.with_worker for other in others)

    asyncio.run(run())


def test_a_worker_that_serves_gives_the_next_ones_their_budget_back(settings: Settings) -> None:
    """A budget of one crash, and a worker counts as healthy as soon as it serves."""

    async def run() -> None:
        engine, workers, _ = await engine_of(settings)
        engine.failures.worker = CrashBudget((0.0,), reset_after_s=0.0)
        for _ in range(3):
            assert workers.serving is not None
            number = workers.serving.epoch.number
            workers.serving.on_rank_exit(Exited(number, number, -9))
            await recovered(engine)
            assert engine.lifecycle.state is EngineState.SERVING, number

    asyncio.run(run())


def test_a_suspect_that_leaves_makes_way(settings: Settings) -> None:
    async def run() -> None:
        engine, workers, first = await engine_of(settings)
        second = Generation("b", [1, 2], Sampling(max_tokens=2), bytes_text())
        engine.requests.admit(second)
        engine.resubmit()
        for _ in range(2):
            assert workers.serving is not None
            number = workers.serving.epoch.number
            workers.serving.on_rank_exit(Exited(number, number, -9))
            await recovered(engine)
        assert (first.with_worker, second.with_worker) == (True, False)
        engine._release(first)
        assert second.with_worker

    asyncio.run(run())


def test_six_crashes_in_a_row_are_too_many_and_the_later_ones_are_waited_for() -> None:
    now = 0.0
    budget = CrashBudget(clock=lambda: now)
    assert [budget.count_crash() for _ in range(6)] == [0.0, 0.0, 1.0, 2.0, 4.0, None]
    planned = CrashBudget(clock=lambda: now)
    for _ in range(9):  # days apart; each successor fails, and a worker started after it serves
        now += 86_400
        assert planned.count_crash() == 0.0
        planned.mark_serving()
    slow_start = CrashBudget(clock=lambda: now)
    slow_start.mark_serving()
    found = []
    for _ in range(7):  # however long a start takes that fails
        now += 100
        found.append(slow_start.count_crash())
    assert found == [0.0, 0.0, 1.0, 2.0, 4.0, None, None]


def test_a_worker_that_served_long_resets_the_count_if_a_planned_restart_ends_it() -> None:
    now = 0.0
    budget = CrashBudget(clock=lambda: now)

    def serve(seconds: float) -> None:
        nonlocal now
        budget.mark_serving()
        now += seconds

    for served_s, delays in ((60.0, [0.0] * 9), (59.0, [0.0, 0.0, 1.0, 2.0, 4.0, None])):
        budget.reset()
        found = []
        for _ in delays:
            serve(served_s)  # and then a planned restart
            serve(5)  # and then a crash
            found.append(budget.count_crash())
        assert found == delays


def test_what_an_end_of_a_worker_ends() -> None:
    failures = Failures()
    assert [failures.count_worker_loss(WorkerLostError("x")) for _ in range(5)] == [
        0.0,
        0.0,
        1.0,
        2.0,
        4.0,
    ]
    with pytest.raises(WorkerUnrecoverableError, match="keeps crashing; the last reason is: x"):
        failures.count_worker_loss(WorkerLostError("x"))
    with pytest.raises(WorkerUnrecoverableError, match="cannot start a worker: no such file"):
        Failures().count_worker_loss(WorkerLostError("no such file", is_permanent=True))
    assert failures.standby.count_crash() == failures.zygote.count_crash() == 0.0, (
        "each has its own budget"
    )


@pytest.mark.parametrize(
    ("error", "another_serves", "ends"),
    [
        (ForkRefusedError("EAGAIN"), True, FailureScope.WORKER),
        (ForkRefusedError("EAGAIN"), False, FailureScope.ZYGOTE),
        (ZygoteLostError("no answer"), True, FailureScope.ZYGOTE),
        (ZygoteLostError("no answer"), False, FailureScope.ZYGOTE),
        (OSError(24, "Too many open files"), False, FailureScope.WORKER),
    ],
)
def test_what_a_fork_that_fails_ends(
    error: Exception, another_serves: bool, ends: FailureScope
) -> None:
    assert Failures.choose_scope_of_failed_start(error, another_serves) is ends
