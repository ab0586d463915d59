"""Drain the engine, and resume it.

If a drain misses its deadline, the engine becomes drained when its last request ends.
"""

from __future__ import annotations

import asyncio

from plimsoll_api.admin import DrainMode, DrainRequest, EngineState
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.operations import OperationFailedError, Recorder

# Time to send the error responses of aborted requests.
ERROR_RESPONSE_TIMEOUT_S = 5.0


async def drain(engine: AsyncEngine, recorder: Recorder, request: DrainRequest) -> None:
    """Stop admitting requests, and finish, fail or park the running ones.

    If the deadline passes, the requests continue. Raises OperationFailedError.
    """
    engine.lifecycle.move_to(EngineState.DRAINING)
    unfinished = engine.requests.list_unfinished()
    if request.mode is DrainMode.CARRY:
        with recorder.measure_step("park"):
            for generation in unfinished:
                engine.abort_in_worker(generation)
                generation.parked = True
        recorder.operation.carried_requests = len(unfinished)
    else:
        if request.mode is DrainMode.ABORT:
            with recorder.measure_step("abort"):
                engine.requests.fail_all(
                    "unavailable", "the engine is draining: send the request again"
                )
        deadline_s = request.deadline_s
        if request.mode is DrainMode.ABORT:
            deadline_s = max(deadline_s, ERROR_RESPONSE_TIMEOUT_S)
        with recorder.measure_step("finish"):
            await _wait_until_idle(engine, deadline_s)
    engine.lifecycle.move_to(EngineState.DRAINED)


async def _wait_until_idle(engine: AsyncEngine, deadline_s: float) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            await engine.idle.wait()
    except TimeoutError:
        raise OperationFailedError(
            f"{len(engine.requests)} requests are still running after {deadline_s:g} s: wait for "
            "them, resume, restart with carry, or drain with mode abort"
        ) from None


def resume(engine: AsyncEngine) -> None:
    """Admit requests again, and continue the parked requests."""
    engine.lifecycle.move_to(EngineState.SERVING)
    for generation in engine.requests.list_unfinished():
        generation.parked = False
    engine.resubmit()
