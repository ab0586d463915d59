"""Long calls of the admin API: idempotent by their id, fenced by epoch, one at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from plimsoll_api.admin import Operation, OperationState, OperationStep
from plimsoll_engine.frontend.epochs import Epochs

log = logging.getLogger(__name__)

# A supervisor asks for the operation it began a moment ago; older ones are in its journal.
HISTORY = 64


class Busy(Exception):
    """Another operation is under way, or the id was used for something else."""


class OperationFailed(Exception):
    """The operation ended without its purpose; the message becomes the operation's error."""


class Recorder:
    """Writes an operation's steps while it runs."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    @contextmanager
    def step(self, name: str) -> Iterator[OperationStep]:
        """Time a step. It is recorded also when it fails."""
        step = OperationStep(name=name, duration_s=0.0)
        began = time.monotonic()
        try:
            yield step
        finally:
            step.duration_s = round(time.monotonic() - began, 6)
            self.operation.steps.append(step)

    def add(self, steps: list[OperationStep]) -> None:
        """Append steps that the worker has timed itself."""
        self.operation.steps.extend(steps)


Work = Callable[[Recorder], Awaitable[None]]


class Operations:
    """The operations of this engine process, the last :data:`HISTORY` of them."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._known: dict[str, Operation] = {}
        self._task: asyncio.Task[None] | None = None
        self.current: Operation | None = None

    def get(self, operation_id: str) -> Operation | None:
        """Return the operation of that id; None where it is unknown or forgotten."""
        return self._known.get(operation_id)

    def begin(self, operation_id: str, kind: str, expected_epoch: str, work: Work) -> Operation:
        """Start ``work``, or return what this id already started.

        Raises StaleEpoch, ValueError (no epoch at all) and :class:`Busy`. The id comes before the
        fence: a caller that repeats its call after a lost answer must find its own operation,
        although that operation has moved the epoch on.
        """
        known = self._known.get(operation_id)
        if known is not None:
            if known.kind != kind:
                raise Busy(f"operation {operation_id} is a {known.kind}: choose another id")
            return known
        self._epochs.check(expected_epoch)
        if self.current is not None:
            raise Busy(
                f"operation {self.current.id} ({self.current.kind}) is under way: "
                f"wait for it at /admin/v1/operations/{self.current.id}"
            )
        operation = Operation(
            id=operation_id,
            kind=kind,
            state=OperationState.RUNNING,
            epoch_before=str(self._epochs.current),
            started_at=time.time(),
        )
        self._known[operation_id] = operation
        while len(self._known) > HISTORY:
            del self._known[next(iter(self._known))]
        self.current = operation
        log.info("operation begun", extra={"operation": operation_id, "kind": kind})
        self._task = asyncio.create_task(_run(work, Recorder(operation)), name=f"operation {kind}")
        # Not in the task itself: one that is cancelled before its first step runs none of its code.
        self._task.add_done_callback(lambda task: self._ended(operation, task))
        return operation

    def _ended(self, operation: Operation, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            operation.error = "cancelled: a resume or the engine's end came first"
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
        """End the operation under way, if any."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=5)


async def _run(work: Work, recorder: Recorder) -> None:
    await work(recorder)
