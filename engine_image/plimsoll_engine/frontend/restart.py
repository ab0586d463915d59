"""One worker for another: the first start, a planned restart, the recovery from a crash."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from plimsoll_api.admin import EngineState, RestartRequest
from plimsoll_engine.frontend.operations import OperationFailed, Recorder
from plimsoll_engine.frontend.requests import RequestFailed
from plimsoll_engine.frontend.workers import STOP_GRACE_S, WorkerLost

if TYPE_CHECKING:
    from plimsoll_engine.frontend.engine import Engine

log = logging.getLogger(__name__)


class GaveUp(Exception):
    """No worker can be had; the engine has failed."""


async def first_start(engine: Engine) -> None:
    """A worker that says itself that it cannot go on ends the engine here: it is the settings."""
    async with engine.replacing:
        try:
            await _start(engine, "initial", bear_final=False)
        except GaveUp:
            return
        engine.resubmit()
        if engine.lifecycle.state is EngineState.WARMING:
            engine.lifecycle.move(EngineState.SERVING)


async def restart_worker(engine: Engine, recorder: Recorder, request: RestartRequest) -> None:
    """End the worker, healthy or hung, start the next epoch and go on with what was running."""
    async with engine.replacing:
        engine.lifecycle.move(EngineState.RESTARTING)
        for generation in engine.requests.unfinished():
            generation.parked = False
        if not request.carry:
            with recorder.step("finish_requests") as step:
                step.detail = await _finish(engine, request.deadline_s)
        with recorder.step("stop_worker") as step:
            stop = await engine.workers.stop(min(STOP_GRACE_S, max(0.1, request.deadline_s)))
            step.detail = "stopped" if not stop.signals else f"killed by {stop.signals[-1]}"
            if stop.stacks is not None:
                step.detail += f", stacks in {stop.stacks}"
            if stop.stopped is not None:
                step.before_bytes = stop.stopped.device_baseline
                step.after_bytes = stop.stopped.device_allocated
        engine.epoch_ended()
        with recorder.step("start_worker"):
            try:
                await _start(engine, "restart")
            except GaveUp as error:
                raise OperationFailed(str(error)) from None
        with recorder.step("resubmit"):
            recorder.operation.carried_requests = engine.resubmit()
        if engine.lifecycle.state is EngineState.RESTARTING:
            engine.lifecycle.move(EngineState.SERVING)


async def recover(engine: Engine, reason: str) -> None:
    """Replace a worker that ended uninvited. A drained engine stays drained."""
    lost = engine.epochs.current
    async with engine.replacing:
        if engine.epochs.current != lost:
            return  # a planned restart that was about to begin has replaced it
        if not engine.crashes.spend(time.monotonic()):
            engine.fail(f"the worker crashes again and again; the last time: {reason}")
            return
        if engine.lifecycle.state is EngineState.SERVING:
            engine.lifecycle.move(EngineState.RESTARTING)
        await engine.workers.discard()
        try:
            await _start(engine, "crash")
        except GaveUp:
            return
        log.info("requests carried over", extra={"count": engine.resubmit()})
        if engine.lifecycle.state is EngineState.RESTARTING:
            engine.lifecycle.move(EngineState.SERVING)


async def _start(engine: Engine, reason: str, bear_final: bool = True) -> None:
    while True:
        try:
            ready = await engine.workers.start(engine.settings.startup_timeout_s)
        except WorkerLost as error:
            log.error(
                "worker start failed",
                extra={"epoch": str(engine.epochs.current), "reason": str(error)},
            )
            borne = engine.crashes.spend(time.monotonic())
            if not borne or (error.final and not bear_final):
                engine.fail(f"no worker can be started: {error}")
                raise GaveUp(str(error)) from None
            reason = "crash"
            continue
        engine.epoch_begun(ready, reason)
        return


async def _finish(engine: Engine, deadline_s: float) -> str:
    """Let what the worker has run to its end; new requests wait for the next one."""
    with_worker = [g for g in engine.requests.unfinished() if g.with_worker]
    engine.holding = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            for generation in with_worker:
                await generation.ended.wait()
    left = [generation for generation in with_worker if not generation.done]
    for generation in left:
        generation.fail(RequestFailed("unavailable", "the worker is restarted: send it again"))
    return f"{len(with_worker) - len(left)} finished, {len(left)} aborted"
