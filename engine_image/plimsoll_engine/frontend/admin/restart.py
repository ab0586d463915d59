"""Planned restart of the worker.

A successor prepares itself while the old worker serves. The old worker then stops, and the
successor takes over its KV pool and its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Mapping

from plimsoll_api.admin import EngineState, RestartRequest
from plimsoll_engine.frontend.async_engine import AsyncEngine, NoAnswerError
from plimsoll_engine.frontend.operations import OperationFailedError, Recorder
from plimsoll_engine.frontend.requests.request_log import RequestFailedError
from plimsoll_engine.frontend.workers.failures import WorkerLostError, WorkerUnrecoverableError
from plimsoll_engine.frontend.workers.worker_handle import WorkerHandle
from plimsoll_engine.frontend.workers.worker_processes import STOP_GRACE_S
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.handover import HandoverOutcome, HandoverRefusal

log = logging.getLogger(__name__)

# The successor reports the adopted requests after its first step.
ADOPTION_TIMEOUT_S = 10.0
# Time for which a shutdown waits for a new worker, which finishes the requests.
CANCELLED_RESTART_GRACE_S = 10.0
MAX_DETAIL_CHARACTERS = 500
# Shorter stages are not listed.
MIN_SHOWN_DURATION_S = 0.0005


async def restart_worker(engine: AsyncEngine, recorder: Recorder, request: RestartRequest) -> None:
    """Replace the worker, even if it hangs. The running requests continue in the new epoch."""
    async with engine.manager.replacing:
        successor = await _prepare_successor(engine, recorder) if request.keep_weights else None
        if successor is None:
            await engine.manager.standby.end()
        engine.lifecycle.move_to(EngineState.RESTARTING)
        for generation in engine.requests.list_unfinished():
            generation.parked = False
        try:
            if not request.carry:
                with recorder.measure_step("finish_requests") as step:
                    step.detail = await _finish_requests(engine, request.deadline_s)
        except asyncio.CancelledError:
            if successor is not None:
                await engine.workers.kill_successor(successor)
            raise
        replacing = asyncio.create_task(
            _replace_worker(engine, recorder, request, successor), name="worker replacement"
        )
        try:
            await asyncio.shield(replacing)
        except asyncio.CancelledError:
            # The old worker is stopped, so requests need the next one to finish before the exit.
            await asyncio.wait({replacing}, timeout=CANCELLED_RESTART_GRACE_S)
            if not replacing.done():
                replacing.cancel()
                await asyncio.wait({replacing})
                if successor is not None:
                    await engine.workers.kill_successor(successor)
            elif not replacing.cancelled() and (failure := replacing.exception()) is not None:
                log.warning("cannot replace the worker", extra={"reason": str(failure)})
            raise
        except WorkerUnrecoverableError as error:
            raise OperationFailedError(str(error)) from None


async def _replace_worker(
    engine: AsyncEngine, recorder: Recorder, request: RestartRequest, successor: WorkerHandle | None
) -> None:
    handover = await _stop_worker(
        engine, recorder, request, request.carry and successor is not None
    )
    with recorder.measure_step("start_worker"):
        ready = await engine.manager.replace(
            successor, None if isinstance(handover, HandoverRefusal) else handover
        )
    if ready is None and not isinstance(handover, HandoverRefusal):
        handover = HandoverRefusal(
            HandoverOutcome.SUCCESSOR_LOST, "the successor exited before it served"
        )
    if ready is not None and ready.refusal is not None:
        handover = ready.refusal
    await _carry_over(engine, recorder, handover if isinstance(handover, HandoverRefusal) else None)


async def _carry_over(
    engine: AsyncEngine, recorder: Recorder, refusal: HandoverRefusal | None
) -> None:
    # The refusal is None if the KV pool was handed over.
    operation = recorder.operation
    with recorder.measure_step("resubmit") as step:
        computed = {g.request_id: g.computed_tokens for g in engine.requests.list_carried_over()}
        operation.carried_requests = engine.resubmit()
        if engine.lifecycle.state is EngineState.RESTARTING:
            engine.lifecycle.move_to(EngineState.SERVING)
        if refusal is None:
            try:
                # The query follows the submissions on the same socket, without a step between.
                query_id = f"carried-{secrets.token_hex(8)}"
                adopted = await engine.query_worker(
                    worker_ipc.CarryOverComplete(query_id),
                    query_id,
                    worker_ipc.AdoptionResult,
                    ADOPTION_TIMEOUT_S,
                )
            except NoAnswerError as error:
                refusal = HandoverRefusal(HandoverOutcome.SUCCESSOR_LOST, str(error))
            else:
                for request_id in adopted.request_ids:
                    computed.pop(request_id, None)
                operation.carried_kv_requests = len(adopted.request_ids)
                step.detail = (
                    "; ".join(sorted(set(adopted.refused.values())))[:MAX_DETAIL_CHARACTERS] or None
                )
        if refusal is not None:
            operation.carried_kv_requests = 0
            step.detail = f"{refusal.outcome}: {refusal.message}"
            log.log(
                logging.INFO if refusal.outcome is HandoverOutcome.NOT_ASKED else logging.WARNING,
                "keys and values of running requests are recomputed after the restart",
                extra={"outcome": str(refusal.outcome), "reason": refusal.message},
            )
        outcome = HandoverOutcome.HANDED_OVER if refusal is None else refusal.outcome
        operation.kv_handover = engine.kv_handover = str(outcome)
        operation.carried_prefill_tokens = sum(computed.values())
        engine.metrics.count_restart(outcome, operation.carried_prefill_tokens)


async def _prepare_successor(engine: AsyncEngine, recorder: Recorder) -> WorkerHandle | None:
    # Returns None if a second worker cannot be prepared, such as for lack of memory. The old worker
    # must stop first then. Raises OperationFailedError if every successor would fail.
    with recorder.measure_step("prepare_worker") as step:
        standby, error = engine.manager.standby, engine.manager.standby.error
        try:
            successor, waited = await engine.manager.prepare()
            if waited:
                step.detail = "used the standby worker"
            elif standby.is_wanted:
                step.detail = (
                    f"did not use a standby worker: {standby.error or error or 'not started yet'}"
                )
            return successor
        except WorkerLostError as error:
            step.detail = str(error)
            log.warning(
                "cannot run a second worker, so the old worker stops before its successor starts",
                extra={"reason": str(error)},
            )
            if error.permanent and engine.ready is not None:
                raise OperationFailedError(f"{error}; the old worker continues to serve") from None
            return None


async def _stop_worker(
    engine: AsyncEngine, recorder: Recorder, request: RestartRequest, should_hand_over: bool
) -> bytes | HandoverRefusal:
    # Returns the handover message, or the reason why there is none.
    with recorder.measure_step("stop_worker") as step:
        grace_s = min(STOP_GRACE_S, max(0.1, request.deadline_s))
        stop = await engine.workers.stop(grace_s, should_hand_over)
        engine.on_epoch_ended()
        step.detail = "stopped" if not stop.signals else f"killed by {stop.signals[-1]}"
        if stop.stopped is not None and (stages := format_stages(stop.stopped.stages_s)):
            step.detail += f" ({stages})"
        if stop.stacks is not None:
            step.detail += f", stacks in {stop.stacks}"
        if stop.stopped is not None:
            step.before_bytes = stop.stopped.device_baseline
            step.after_bytes = stop.stopped.device_allocated
    if not request.keep_weights:
        with recorder.measure_step("drop_weights"):
            await engine.workers.drop_weights()
    if not should_hand_over:
        return HandoverRefusal(
            HandoverOutcome.NOT_ASKED,
            "the restart carries over no requests, or has no prepared successor",
        )
    if stop.stopped is None:
        return HandoverRefusal(HandoverOutcome.WORKER_LOST, "the old worker sent no final message")
    if stop.stopped.handover is None:
        return stop.stopped.refusal or HandoverRefusal(
            HandoverOutcome.FAILED, "the old worker sent no handover and no reason"
        )
    return stop.stopped.handover


def format_stages(stages_s: Mapping[str, float]) -> str:
    """Return the duration of each stage of at least 0.5 ms as text."""
    return ", ".join(
        f"{name} {duration_s:.3f} s"
        for name, duration_s in stages_s.items()
        if duration_s >= MIN_SHOWN_DURATION_S
    )


async def _finish_requests(engine: AsyncEngine, deadline_s: float) -> str:
    # New requests wait for the next worker.
    with_worker = [g for g in engine.requests.list_unfinished() if g.with_worker]
    engine.hold_requests()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            for generation in with_worker:
                await generation.ended.wait()
    unfinished = [generation for generation in with_worker if not generation.is_done]
    for generation in unfinished:
        generation.fail(
            RequestFailedError("unavailable", "the worker was restarted: send the request again")
        )
    return f"{len(with_worker) - len(unfinished)} finished, {len(unfinished)} aborted"
