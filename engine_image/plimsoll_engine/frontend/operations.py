"""Long admin operations: idempotent by ID, bound to an epoch, one at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from plimsoll_api.admin import Operation, OperationState, OperationStep
from plimsoll_engine.frontend.epochs import Epochs

log = logging.getLogger(__name__)

# A supervisor polls the operation that it just started; older ones are in its journal.
MAX_OPERATIONS = 64


class OperationConflict(Exception):
    """Another operation is running, or an operation of another kind has this ID."""


class OperationFailed(Exception):
    """The operation failed. The exception's message becomes the operation's error."""


class Recorder:
    """Recorder of the steps of one operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    @contextmanager
    def step(self, name: str) -> Iterator[OperationStep]:
        """Time a step and record it, even if it fails."""
        step = OperationStep(name=name, duration_s=0.0)
        began = time.monotonic()
        try:
            yield step
        finally:
            step.duration_s = round(time.monotonic() - began, 6)
            self.operation.steps.append(step)

    def add(self, steps: list[OperationStep]) -> None:
        """Append steps that the worker has timed."""
        self.operation.steps.extend(steps)


Work = Callable[[Recorder], Awaitable[None]]


class Operations:
    """The last :data:`MAX_OPERATIONS` operations of this engine process."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._known: dict[str, Operation] = {}
        self._task: asyncio.Task[None] | None = None
        self.current: Operation | None = None

    def get(self, operation_id: str) -> Operation | None:
        """Return the operation with that ID; None if the ID is unknown or too old."""
        return self._known.get(operation_id)

    def begin(self, operation_id: str, kind: str, expected_epoch: str, work: Work) -> Operation:
        """Start ``work``, or return the operation that was started with this ID before.

        Raises StaleEpoch, OperationConflict, and ValueError for a malformed epoch. The ID is
        checked first: a caller that repeats its call after a lost reply must find its operation,
        which may have changed the epoch.
        """
        known = self._known.get(operation_id)
        if known is not None:
            if known.kind != kind:
                raise OperationConflict(
                    f"operation {operation_id} is already a {known.kind}: choose another id"
                )
            return known
        self._epochs.check(expected_epoch)
        if self.current is not None:
            raise OperationConflict(
                f"operation {self.current.id} ({self.current.kind}) is running: "
                f"wait for its end at /admin/v1/operations/{self.current.id}"
            )
        operation = Operation(
            id=operation_id,
            kind=kind,
            state=OperationState.RUNNING,
            epoch_before=str(self._epochs.current),
            started_at=time.time(),
        )
        self._known[operation_id] = operation
        while len(self._known) > MAX_OPERATIONS:
            del self._known[next(iter(self._known))]
        self.current = operation
        log.info("operation started", extra={"operation": operation_id, "kind": kind})
        self._task = asyncio.create_task(_run(work, Recorder(operation)), name=f"operation {kind}")
        # Not in the task itself: a task that is cancelled before its first step runs no code.
        self._task.add_done_callback(lambda task: self._on_end(operation, task))
        return operation

    def _on_end(self, operation: Operation, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            operation.error = "cancelled by a resume or by the engine's shutdown"
        elif isinstance(error, OperationFailed):
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
        """Cancel the running operation, if any."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=5)


async def _run(work: Work, recorder: Recorder) -> None:
    await work(recorder)
