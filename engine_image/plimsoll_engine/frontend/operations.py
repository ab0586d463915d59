"""Long-running admin operations. They are idempotent by ID, and run one at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from plimsoll_api.admin import Operation, OperationState, OperationStep
from plimsoll_engine.frontend.epochs import Epochs

log = logging.getLogger(__name__)

# A supervisor polls the operation that it has just started. Older operations are in its journal.
MAX_STORED_OPERATIONS = 64


class OperationConflictError(Exception):
    """Another operation is running, or the ID belongs to another kind of operation."""


class OperationFailedError(Exception):
    """The operation failed. The exception's message becomes the operation's error."""


class Recorder:
    """Recorder of the steps of one operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    @contextmanager
    def measure_step(self, name: str) -> Iterator[OperationStep]:
        """Record a step, which lasts until the context exits."""
        step = OperationStep(name=name, duration_s=0.0)
        began = time.monotonic()
        try:
            yield step
        finally:
            step.duration_s = round(time.monotonic() - began, 6)
            self.operation.steps.append(step)

    def add_steps(self, steps: list[OperationStep]) -> None:
        """Append the steps that the worker has recorded."""
        self.operation.steps.extend(steps)


Work = Callable[[Recorder], Awaitable[None]]


class Operations:
    """The latest operations of this engine process, at most :data:`MAX_STORED_OPERATIONS`."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._operations: dict[str, Operation] = {}
        self._task: asyncio.Task[None] | None = None
        self.current: Operation | None = None

    def get(self, operation_id: str) -> Operation | None:
        """Return the operation ``operation_id``; None if it is unknown or no longer stored."""
        return self._operations.get(operation_id)

    def begin(self, operation_id: str, kind: str, expected_epoch: str, work: Work) -> Operation:
        """Start an operation, or return the operation that already has this ID.

        Raises StaleEpochError, OperationConflictError, and ValueError if ``expected_epoch`` is
        malformed.
        """
        # Before the epoch is checked, so that a caller that lost the reply can repeat its call.
        known = self._operations.get(operation_id)
        if known is not None:
            if known.kind != kind:
                raise OperationConflictError(
                    f"the ID {operation_id} already belongs to an operation of kind {known.kind}: "
                    "use another ID"
                )
            return known
        self._epochs.check_current(expected_epoch)
        if self.current is not None:
            raise OperationConflictError(
                f"operation {self.current.id} ({self.current.kind}) is running: wait until "
                f"/admin/v1/operations/{self.current.id} reports its end"
            )
        operation = Operation(
            id=operation_id,
            kind=kind,
            state=OperationState.RUNNING,
            epoch_before=str(self._epochs.current),
            started_at=time.time(),
        )
        self._operations[operation_id] = operation
        while len(self._operations) > MAX_STORED_OPERATIONS:
            del self._operations[next(iter(self._operations))]
        self.current = operation
        log.info("operation started", extra={"operation": operation_id, "kind": kind})
        self._task = asyncio.create_task(
            _run_work(work, Recorder(operation)), name=f"operation {kind}"
        )
        # A callback, because a task that is cancelled before its first step runs no code.
        self._task.add_done_callback(lambda task: self._on_end(operation, task))
        return operation

    def _on_end(self, operation: Operation, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            operation.error = "a resume, or the engine's shutdown, cancelled the operation"
        elif isinstance(error, OperationFailedError):
            operation.error = str(error)
        elif error is not None:
            operation.error = f"{type(error).__name__}: {error}"
            log.error("operation failed", extra={"operation": operation.id}, exc_info=error)
        failed = operation.error is not None
        operation.state = OperationState.FAILED if failed else OperationState.SUCCEEDED
        operation.finished_at = time.time()
        operation.epoch_after = str(self._epochs.current)
        self.current = None
        log.info(
            "operation ended",
            extra={
                "operation": operation.id,
                "kind": operation.kind,
                "state": str(operation.state),
                "error": operation.error,
            },
        )

    async def cancel(self) -> None:
        """Cancel the running operation, if there is one."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=5)


async def _run_work(work: Work, recorder: Recorder) -> None:
    await work(recorder)
