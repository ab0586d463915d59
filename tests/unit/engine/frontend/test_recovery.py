"""A worker ends while the one before it is being replaced: no request waits forever.

Tests ``frontend/workers/worker_manager.py``.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from plimsoll_api.admin import EngineState, Operation, OperationState, RestartRequest
from plimsoll_engine.frontend.admin.restart import restart_worker
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.operations import Recorder
from plimsoll_engine.frontend.requests.adapter_registry import RegisteredAdapter
from plimsoll_engine.frontend.requests.request_log import Admission, Generation
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.frontend.workers.failures import WorkerLostError
from plimsoll_engine.frontend.workers.worker_handle import StopOutcome, WorkerHandle
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.worker_ipc import Prepared, Ready, Sampling, Submit, ToWorker
from plimsoll_engine.messages.zygote_ipc import Exited, WorkerConfig
from plimsoll_engine.settings import Settings, StandbyPolicy
from plimsoll_faults.models import tiny
from tests.byte_text import bytes_text


class Workers:
    """Real handles of processes that are not there; ``dies`` are those that end when ready."""

    starts = 1
    ranks = 1
    has_stopped_worker = False

    def __init__(self, engine: AsyncEngine, dies: set[int]) -> None:
        self.engine, self.dies = engine, dies
        self.serving: WorkerHandle | None = None
        self.sent: dict[int, list[ToWorker]] = {}
        self.prepared: list[WorkerHandle] = []

    def send(self, message: ToWorker) -> None:
        assert self.serving is not None
        self.sent.setdefault(self.serving.epoch.number, []).append(message)
        if isinstance(message, worker_ipc.CarryOverComplete):
            self.engine._handle_message(worker_ipc.AdoptionResult(message.query_id, [], {}))

    def dismiss_stopped(self) -> None:
        """No worker here waits for its dismissal."""

    def create_successor(self) -> WorkerHandle:
        handle = WorkerHandle(
            self.engine.epochs.reserve(), "/nonexistent", 1 << 20, 1, lambda *_: None, self.lost
        )
        handle.pids.append(handle.epoch.number)
        return handle

    def lost(self, worker: WorkerHandle, reason: str) -> None:
        if worker is self.serving:
            self.engine._on_worker_lost(reason)

    async def prepare(self, handle: WorkerHandle, _timeout_s: float) -> None:
        handle._on_link_message(Prepared(handle.epoch.number))
        self.prepared.append(handle)

    async def start(self, timeout_s: float) -> Ready:
        return await self.take_over(self.create_successor(), timeout_s)

    async def take_over(
        self, handle: WorkerHandle, _timeout_s: float, _quick: bool = False, _: Any = None
    ) -> Ready:
        self.serving = handle
        self.engine.epochs.enter(handle.epoch)
        number = handle.epoch.number
        if handle.is_lost:
            raise WorkerLostError("it ended")
        handle._on_link_message(
            Ready(number, max_model_len=512, num_blocks=8, block_size=4, load_s=0.1)
        )
        if number in self.dies:  # before anybody has taken in that it is ready
            handle.on_rank_exit(Exited(number, number, -9))
        return await handle.ready

    async def stop(self, _grace_s: float = 5.0, _hand_over: bool = False) -> StopOutcome:
        return StopOutcome(worker_ipc.StopResult(handover=b"tables"))

    async def await_lost_worker(self) -> None:
        pass

    async def kill_successor(self, handle: WorkerHandle) -> None:
        handle.exited.set()

    def submitted(self) -> list[tuple[int, str]]:
        """Which worker was given which request, in the order of the workers."""
        return [
            (number, message.request_id)
            for number, messages in self.sent.items()
            for message in messages
            if isinstance(message, Submit)
        ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_checkpoint(folder)
    return folder


@pytest.fixture
def settings(checkpoint: Path, tmp_path: Path) -> Settings:
    worker = WorkerConfig(str(checkpoint), str(tmp_path), str(tmp_path / "w.sock"), device="cpu")
    return Settings(worker=worker, served_model_name="m")


async def engine_of(settings: Settings, *dies: int) -> tuple[AsyncEngine, Workers, Generation]:
    """An engine that serves one request with worker 1."""
    engine = AsyncEngine(settings, Tokenizer(settings.model))
    workers = Workers(engine, set(dies))
    engine.workers = engine.manager._workers = cast(Any, workers)
    engine.manager.standby._workers = cast(Any, workers)
    request = Generation("a", [1, 2], Sampling(max_tokens=9), bytes_text())
    engine.requests.admit(request)
    engine.lifecycle.move_to(EngineState.WARMING)
    await engine.manager.start_first()
    await recovered(engine)
    return engine, workers, request


async def recovered(engine: AsyncEngine) -> None:
    """Until the worker is not being replaced any more."""
    for _ in range(1000):
        await asyncio.sleep(0)
        recovery = engine._recovery
        if not engine.manager.replacing.locked() and (recovery is None or recovery.done()):
            return
    raise AssertionError("it is still being replaced")


def test_a_successor_that_ends_as_soon_as_it_is_ready_keeps_no_request(settings: Settings) -> None:
    """Its end is known before the restart takes in that it was ready, and gives it the requests."""

    async def run() -> None:
        engine, workers, request = await engine_of(settings, 2)
        restart = RestartRequest(operation_id="r", expected_epoch=str(engine.epochs.current))
        operation = Operation("r", "restart_worker", OperationState.RUNNING, "b:1", 0.0)
        await restart_worker(engine, Recorder(operation), restart)
        await recovered(engine)
        assert engine.epochs.current.number == 3
        assert workers.submitted()[-1] == (3, "a"), workers.submitted()
        assert request.with_worker
        assert engine.lifecycle.state is EngineState.SERVING

    asyncio.run(run())


def test_so_does_one_that_replaces_a_crashed_one(settings: Settings) -> None:
    async def run() -> None:
        engine, workers, request = await engine_of(settings, 2)
        assert workers.serving is not None
        workers.serving.on_rank_exit(Exited(1, 1, -9))
        await recovered(engine)
        assert engine.epochs.current.number == 3
        assert workers.submitted()[-1] == (3, "a"), workers.submitted()
        assert request.with_worker

    asyncio.run(run())


def test_the_context_stays_known_while_no_worker_serves(settings: Settings) -> None:
    """Without it, nothing bounds the answer to a request that comes in this moment."""

    async def run() -> None:
        engine, workers, _ = await engine_of(settings)
        assert engine.max_model_len == 512
        assert workers.serving is not None
        workers.serving.on_rank_exit(Exited(1, 1, -9))
        assert engine.ready is None
        assert engine.max_model_len == 512
        await recovered(engine)
        assert engine.max_model_len == 512

    asyncio.run(run())


def test_a_loss_is_of_the_epoch_in_which_it_happened(settings: Settings) -> None:
    """A recovery that runs only once the next worker serves replaces nothing."""

    async def run() -> None:
        engine, workers, _ = await engine_of(settings)
        assert workers.serving is not None
        workers.serving.on_rank_exit(Exited(1, 1, -9))
        await workers.take_over(workers.create_successor(), 5.0)  # before the recovery's first step
        await recovered(engine)
        assert engine.epochs.current.number == 2

    asyncio.run(run())


@pytest.mark.parametrize("standby_ends", [False, True])
def test_after_a_crash_the_standby_serves(settings: Settings, standby_ends: bool) -> None:
    async def run() -> None:
        engine, workers, _ = await engine_of(settings)
        engine.manager.standby.policy = StandbyPolicy.ALWAYS
        for _ in range(2):  # a worker's first report starts no standby
            engine.manager.standby.on_report([])
        for _ in range(5):
            await asyncio.sleep(0)
        (standby,) = workers.prepared
        if standby_ends:
            standby.mark_lost("the weights are lost")
        assert workers.serving is not None
        workers.serving.on_rank_exit(Exited(1, 1, -9))
        await recovered(engine)
        assert (workers.serving is standby) is not standby_ends
        assert engine.epochs.current.number == (3 if standby_ends else 2)
        assert workers.submitted()[-1] == (engine.epochs.current.number, "a")
        assert engine.lifecycle.state is EngineState.SERVING

    asyncio.run(run())


def test_a_shutdown_after_the_old_worker_stopped_waits_for_the_next_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to finish before the engine ends has a worker then."""

    async def run() -> None:
        engine, workers, request = await engine_of(settings)
        taking, ready = asyncio.Event(), asyncio.Event()
        take_over = workers.take_over

        async def slow(handle: WorkerHandle, *rest: Any) -> Ready:
            taking.set()
            await ready.wait()
            return await take_over(handle, *rest)

        monkeypatch.setattr(workers, "take_over", slow)
        asked = RestartRequest(operation_id="r", expected_epoch=str(engine.epochs.current))
        operation = Operation("r", "restart_worker", OperationState.RUNNING, "b:1", 0.0)
        restart = asyncio.create_task(restart_worker(engine, Recorder(operation), asked))
        await taking.wait()
        restart.cancel()
        await asyncio.sleep(0.01)
        assert not restart.done()
        ready.set()
        with pytest.raises(asyncio.CancelledError):
            await restart
        assert not engine.manager.replacing.locked()
        assert workers.submitted() == [(1, "a"), (2, "a")]
        assert request.with_worker

    asyncio.run(run())


def test_an_error_within_the_admission_leaves_no_request_behind(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        engine, workers, first = await engine_of(settings)
        engine._release(first)
        given = len(workers.submitted())
        adapter = RegisteredAdapter("x", Path("/x"), 1)
        admission = Admission(adapter=adapter, deadline_s=9.0)
        choices = [
            Generation(name, [1, 2], Sampling(max_tokens=9), bytes_text(), admission=admission)
            for name in "bc"
        ]
        for part, name in (
            (engine.idle, "clear"),
            (engine.adapters, "add_user"),
            (asyncio.get_running_loop(), "call_later"),
            (engine._counts, "count_admitted"),
            (engine.metrics, "count_admitted"),
        ):
            with monkeypatch.context() as broken:
                broken.setattr(type(part), name, _fails)
                with pytest.raises(ZeroDivisionError), engine.track_running(*choices):
                    raise AssertionError("it was not admitted")
            assert len(engine.requests) == 0, name
            assert engine.idle.is_set(), name
            assert adapter.users == 0, name
        assert len(workers.submitted()) == given

    asyncio.run(run())


def _fails(*_: Any) -> None:
    raise ZeroDivisionError
