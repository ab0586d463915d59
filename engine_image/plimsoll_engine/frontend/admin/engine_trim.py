"""Trim: free memory in the frontend and the worker without disturbing requests."""

from __future__ import annotations

import gc

from plimsoll_engine.frontend.async_engine import AsyncEngine, NoAnswerError
from plimsoll_engine.frontend.operations import OperationFailedError, Recorder
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.process import host_memory

# malloc_trim of a heap of tens of GiB takes seconds, as does a full garbage collection.
WORKER_REPLY_TIMEOUT_S = 30.0


async def trim(engine: AsyncEngine, recorder: Recorder) -> None:
    """Free the caches and the unused heap of the frontend, then of the worker.

    Raises OperationFailedError if the worker does not answer.
    """
    with recorder.measure_step("processor_cache_flush") as step:
        step.before_bytes = engine.media.cache.nbytes
        step.detail = f"{engine.media.cache.clear()} processed images and audio clips discarded"
        step.after_bytes = engine.media.cache.nbytes
    with recorder.measure_step("frontend_gc_collect") as step:
        step.before_bytes = host_memory.read_rss_anon_bytes()
        step.detail = f"{gc.collect()} objects collected"
        step.after_bytes = host_memory.read_rss_anon_bytes()
    with recorder.measure_step("frontend_malloc_trim") as step:
        step.before_bytes = host_memory.read_rss_anon_bytes()
        if not host_memory.trim_malloc():
            step.detail = "this libc has no malloc_trim"
        step.after_bytes = host_memory.read_rss_anon_bytes()
    operation_id = recorder.operation.id
    try:
        trimmed = await engine.query_worker(
            worker_ipc.Trim(operation_id),
            operation_id,
            worker_ipc.TrimResult,
            WORKER_REPLY_TIMEOUT_S,
        )
    except NoAnswerError as error:
        raise OperationFailedError(
            f"the frontend was trimmed, but the worker failed to trim: {error}"
        ) from None
    recorder.add_steps(trimmed.steps)
