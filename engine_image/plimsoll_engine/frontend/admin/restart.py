"""A planned restart of the worker, in two phases.

The successor is forked and gets its context, the weights and its kernels while the old worker still
serves. Only then the old one stops, the successor takes the KV pool and goes on with what ran.
Whichever of the two dies on the way, one worker serves in the end, or the operation says why not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from plimsoll_api.admin import EngineState, RestartRequest
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.operations import OperationFailed, Recorder
from plimsoll_engine.frontend.requests.request_log import RequestFailed
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle, WorkerLost
from plimsoll_engine.frontend.workers.worker_manager import GaveUp
from plimsoll_engine.frontend.workers.worker_processes import STOP_GRACE_S

log = logging.getLogger(__name__)


async def restart_worker(engine: AsyncEngine, recorder: Recorder, request: RestartRequest) -> None:
    """End the worker, healthy or hung, start the next epoch and go on with what was running."""
    async with engine.manager.replacing:
        successor = await _prepare(engine, recorder) if request.keep_weights else None
        engine.lifecycle.move(EngineState.RESTARTING)
        for generation in engine.requests.unfinished():
            generation.parked = False
        try:
            if not request.carry:
                with recorder.step("finish_requests") as step:
                    step.detail = await _finish(engine, request.deadline_s)
            await _stop(engine, recorder, request)
            with recorder.step("start_worker"):
                await engine.manager.replace(successor)
        except GaveUp as error:
            raise OperationFailed(str(error)) from None
        except asyncio.CancelledError:
            if successor is not None:
                await engine.workers.abandon(successor)
            raise
        with recorder.step("resubmit"):
            recorder.operation.carried_requests = engine.resubmit()
        if engine.lifecycle.state is EngineState.RESTARTING:
            engine.lifecycle.move(EngineState.SERVING)


async def _prepare(engine: AsyncEngine, recorder: Recorder) -> WorkerHandle | None:
    """Return the successor.

    None where it can only be had once the old worker is gone, for example for lack of memory.
    Raises OperationFailed where no worker could be started: the old one serves on.
    """
    with recorder.step("prepare_worker") as step:
        try:
            return await engine.manager.prepare()
        except WorkerLost as error:
            step.detail = str(error)
            log.warning("no successor beside the worker", extra={"reason": str(error)})
            if error.permanent and engine.ready is not None:
                raise OperationFailed(f"{error}; the worker keeps serving") from None
            return None


async def _stop(engine: AsyncEngine, recorder: Recorder, request: RestartRequest) -> None:
    with recorder.step("stop_worker") as step:
        stop = await engine.workers.stop(min(STOP_GRACE_S, max(0.1, request.deadline_s)))
        engine.epoch_ended()
        step.detail = "stopped" if not stop.signals else f"killed by {stop.signals[-1]}"
        if stop.stacks is not None:
            step.detail += f", stacks in {stop.stacks}"
        if stop.stopped is not None:
            step.before_bytes = stop.stopped.device_baseline
            step.after_bytes = stop.stopped.device_allocated
    if not request.keep_weights:
        with recorder.step("drop_weights"):
            await engine.workers.drop_weights()


async def _finish(engine: AsyncEngine, deadline_s: float) -> str:
    """Let what the worker has run to its end; new requests wait for the next one."""
    with_worker = [g for g in engine.requests.unfinished() if g.with_worker]
    engine.hold()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            for generation in with_worker:
                await generation.ended.wait()
    left = [generation for generation in with_worker if not generation.done]
    for generation in left:
        generation.fail(RequestFailed("unavailable", "the worker is restarted: send it again"))
    return f"{len(with_worker) - len(left)} finished, {len(left)} aborted"
