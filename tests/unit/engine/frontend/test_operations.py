"""Operations: idempotent by id, fenced by epoch, one at a time, a bounded history."""

from __future__ import annotations

import asyncio

import pytest

from plimsoll_api.admin import OperationState
from plimsoll_engine.frontend.epochs import Epochs, StaleEpochError
from plimsoll_engine.frontend.operations import (
    MAX_STORED_OPERATIONS,
    OperationConflictError,
    OperationFailedError,
    Operations,
    Recorder,
)


async def nothing(recorder: Recorder) -> None:
    with recorder.measure_step("one"):
        await asyncio.sleep(0)


async def ended(operations: Operations) -> None:
    for _ in range(1000):
        if operations.current is None:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{operations.current} goes on")


def test_the_same_id_is_the_same_operation_also_in_a_later_epoch() -> None:
    async def run() -> None:
        epochs = Epochs("boot")
        operations = Operations(epochs)

        async def restart(recorder: Recorder) -> None:
            epochs.enter(epochs.reserve())

        first = operations.begin("a", "restart", "boot:0", restart)
        assert operations.begin("a", "restart", "boot:0", restart) is first
        await ended(operations)
        assert first.state is OperationState.SUCCEEDED
        assert (first.epoch_before, first.epoch_after) == ("boot:0", "boot:1")
        assert operations.begin("a", "restart", "boot:0", restart) is first
        assert str(epochs.current) == "boot:1"
        with pytest.raises(StaleEpochError):
            operations.begin("b", "restart", "boot:0", restart)
        with pytest.raises(OperationConflictError, match="use another ID"):
            operations.begin("a", "trim", "boot:1", nothing)

    asyncio.run(run())


def test_one_at_a_time() -> None:
    async def run() -> None:
        operations = Operations(Epochs("boot"))
        gate = asyncio.Event()

        async def wait(recorder: Recorder) -> None:
            await gate.wait()

        first = operations.begin("a", "drain", "boot:0", wait)
        with pytest.raises(OperationConflictError, match="a \\(drain\\) is running"):
            operations.begin("b", "trim", "boot:0", nothing)
        await operations.cancel()
        assert first.state is OperationState.FAILED
        assert operations.begin("b", "trim", "boot:0", nothing).state is OperationState.RUNNING
        await ended(operations)

    asyncio.run(run())


def test_a_failure_is_the_operations_own() -> None:
    async def run() -> None:
        operations = Operations(Epochs("boot"))

        async def fails(recorder: Recorder) -> None:
            with recorder.measure_step("tries"):
                raise OperationFailedError("no worker")

        operation = operations.begin("a", "trim", "boot:0", fails)
        await ended(operations)
        assert (operation.state, operation.error) == (OperationState.FAILED, "no worker")
        assert [step.name for step in operation.steps] == ["tries"]
        assert operations.current is None

    asyncio.run(run())


def test_history_is_bounded() -> None:
    async def run() -> None:
        operations = Operations(Epochs("boot"))
        for number in range(MAX_STORED_OPERATIONS + 5):
            operations.begin(f"op-{number}", "trim", "boot:0", nothing)
            await ended(operations)
        assert operations.get("op-4") is None
        assert operations.get("op-5") is not None

    asyncio.run(run())
