"""Facade of the engine for both APIs: admit requests, return their text and release them.

Callers do not see the worker. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import TypeVar

from plimsoll_api.admin import EngineState, LedgerEntry, Load
from plimsoll_engine.frontend.epochs import Epochs
from plimsoll_engine.frontend.hooks import create_frontend_hooks
from plimsoll_engine.frontend.lifecycle import Lifecycle
from plimsoll_engine.frontend.observability import load
from plimsoll_engine.frontend.observability.abandoned import AbandonedTracker
from plimsoll_engine.frontend.observability.frontend_ledger import FrontendLedger
from plimsoll_engine.frontend.observability.metrics import Metrics
from plimsoll_engine.frontend.operations import Operations
from plimsoll_engine.frontend.requests import media_reader
from plimsoll_engine.frontend.requests.adapter_registry import AdapterRegistry, RegisteredAdapter
from plimsoll_engine.frontend.requests.request_log import Generation, RequestFailedError, RequestLog
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.frontend.workers.failures import Failures
from plimsoll_engine.frontend.workers.worker_manager import WorkerManager
from plimsoll_engine.frontend.workers.worker_processes import WorkerProcesses
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.process.allocations import AllocationReporter
from plimsoll_engine.process.collector import FullCollectionCounter
from plimsoll_engine.process.rules import freeze_counter
from plimsoll_engine.settings import Settings

log = logging.getLogger(__name__)

Reply = TypeVar(
    "Reply",
    worker_ipc.TrimResult,
    worker_ipc.AuditReport,
    worker_ipc.DiagnosticReport,
    worker_ipc.AdapterLoadResult,
    worker_ipc.AdoptionResult,
)


# The worker notices a passed deadline after at most 50 ms and one step.
DEADLINE_GRACE_S = 0.5


class NotServingError(Exception):
    """The engine accepts no new requests, but another replica may."""


class NoAnswerError(Exception):
    """The worker did not answer in time, or is not running."""


class AsyncEngine:
    """Frontend of one engine.

    The process must exit when the future ``exit_code`` is set.
    """

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.hooks = create_frontend_hooks(settings.worker.inject)
        self.tokenizer = tokenizer = self.hooks.create_tokenizer(tokenizer)
        self.started_at = time.monotonic()
        self.epochs = Epochs()
        self.lifecycle = Lifecycle(self._on_state_change)
        self._on_draining: Callable[[], None] = lambda: None
        self.requests = self.hooks.create_request_log(RequestLog(settings.max_queued))
        self.failures = Failures()
        self.adapters = AdapterRegistry(settings.worker.max_loras, settings.lora_modules)
        self.adapter_changes = asyncio.Lock()
        self.operations = Operations(self.epochs)
        self.media = media_reader.create_reader(settings)
        self.ledger = FrontendLedger(self.requests, tokenizer, self.media.cache)
        self.workers = WorkerProcesses(
            settings.worker, self.epochs, self.failures, self._handle_message, self._on_worker_lost
        )
        self.manager = WorkerManager(
            self.workers,
            self.epochs,
            self.lifecycle,
            self,
            self.failures,
            settings.startup_timeout_s,
            settings.standby_worker,
        )
        self.metrics = self.hooks.create_metrics(
            Metrics(
                settings.served_model_name,
                lambda: self.lifecycle.state,
                self.compute_load,
                self.list_injections,
                self.list_ledger_entries,
                self.compute_kv_usage,
                lambda: (self.ready.block_size, self.ready.num_blocks) if self.ready else None,
                lambda: [one.name for one in self.adapters.list_visible()],
                settings.worker.max_loras,
            )
        )
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()
        self.idle.set()
        self._holding = False
        self.ready: worker_ipc.Ready | None = None
        self._max_model_len = settings.worker.max_model_len
        # Startup stage of the newest worker: ``processes``, or a key of ``Ready.stages_s``.
        self.stage = "processes"
        # Outcome of the KV handover in the last planned restart.
        self.kv_handover: str | None = None
        self.report: worker_ipc.Report | None = None
        self._counts = self._create_epoch_counts()
        self._abandoned = AbandonedTracker(self._has_client)
        self._report_at: float | None = None
        self._replies: dict[str, asyncio.Future[worker_ipc.FromWorker]] = {}
        self.collections = FullCollectionCounter()
        self.allocations = AllocationReporter()
        self._first_start: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[None] | None = None

    # ---- requests

    @contextmanager
    def track_running(self, *generations: Generation) -> Iterator[None]:
        """Admit the choices of a request, and release them when the context exits.

        Raises NotServingError or QueueFullError; no choice is admitted then.
        """
        if not self.lifecycle.is_admitting:
            raise NotServingError(
                f"the engine is {self.lifecycle.state} and accepts no new requests: retry later"
            )
        deadline_s = min(
            (d for g in generations if (d := g.admission.deadline_s) is not None), default=None
        )
        with ExitStack() as undo:  # undoes the admission and all that follows it
            self.requests.admit(*generations)
            for generation in generations:
                undo.callback(self._release, generation)
            self.idle.clear()
            for adapter in (generation.admission.adapter for generation in generations):
                self.adapters.add_user(adapter)
                undo.callback(self._release_adapter, adapter)
            if deadline_s is not None:
                timer = asyncio.get_running_loop().call_later(
                    deadline_s + DEADLINE_GRACE_S, self._fail_overdue, generations
                )
                undo.callback(timer.cancel)
            for _, group in groupby(generations, lambda generation: id(generation.prompt_ids)):
                # Hash each prompt only once, because a long one blocks the event loop.
                choices = list(group)
                self._counts.count_admitted(choices[0].prompt_ids, choices[0].media, len(choices))
            for generation in generations:
                self.metrics.count_admitted(generation)
            if self.ready is not None and not self._holding:
                for generation in generations:
                    self._submit(generation)
            yield

    def _fail_overdue(self, generations: tuple[Generation, ...]) -> None:
        # The worker itself fails requests at their deadline, unless it hangs.
        for generation in generations:
            generation.fail(RequestFailedError("deadline", "the request's deadline passed"))

    def _submit(self, generation: Generation) -> None:
        generation.with_worker = True
        self.workers.send(generation.create_submission())

    def abort_in_worker(self, generation: Generation) -> None:
        """Abort ``generation`` in the worker if the worker runs it."""
        if generation.with_worker and self.ready is not None:
            self.workers.send(worker_ipc.Abort(generation.request_id))
        generation.with_worker = False

    def _release(self, generation: Generation) -> None:
        self.requests.release(generation.request_id)
        self.abort_in_worker(generation)
        self.failures.requests.release(generation)
        self._submit_next_suspect()
        if generation.has_failed:
            reason = "error"
            self._counts.errors += 1
        elif generation.finish_reason is None:
            reason = "abort"
            self._counts.aborted += 1
        else:
            reason = generation.finish_reason
        self.metrics.count_finished(generation, reason)
        if not len(self.requests):
            self.idle.set()
            if self.lifecycle.state is EngineState.DRAINING and self.operations.current is None:
                # This ends a drain whose deadline had passed.
                self.lifecycle.move_to(EngineState.DRAINED)

    def _release_adapter(self, adapter: RegisteredAdapter | None) -> None:
        self.send_unload(self.adapters.remove_user(adapter))

    def send_unload(self, message: worker_ipc.UnloadAdapter | None) -> None:
        """Send ``message`` to the serving worker. Do nothing without a message or a worker."""
        if message is not None and self.ready is not None:
            self.workers.send(message)

    def resubmit(self) -> int:
        """Submit all carried-over requests to the serving worker, and return their number."""
        if self.ready is None:
            return 0
        carried_over = [g for g in self.requests.list_carried_over() if not g.with_worker]
        for generation in self.failures.requests.queue_suspects(carried_over):
            self._submit(generation)
        self._submit_next_suspect()
        return len(carried_over)

    def _submit_next_suspect(self) -> None:
        if (
            self.ready is not None
            and (generation := self.failures.requests.get_next_suspect()) is not None
        ):
            self._submit(generation)

    # ---- the worker

    def hold_requests(self) -> None:
        """Keep new requests in the request log until the next worker serves."""
        self._holding = True

    def set_drain_callback(self, callback: Callable[[], None]) -> None:
        """Set the function that is called whenever the engine starts to drain."""
        self._on_draining = callback

    def on_epoch_started(self, ready: worker_ipc.Ready, reason: str) -> None:
        """Reset the counts for the new epoch, and load the adapters into the new worker."""
        self.ready = ready
        self._max_model_len = ready.max_model_len
        self._holding = False
        self.report = None
        self._report_at = None
        self._counts = self._create_epoch_counts()
        self._abandoned = AbandonedTracker(self._has_client)
        self.metrics.count_worker_start(reason)
        for adapter in self.adapters.list_for_worker():  # before any request that uses it
            self.workers.send(adapter.make_load_message())
        log.info(
            "worker ready",
            extra={
                "epoch": str(self.epochs.current),
                "reason": reason,
                "load_s": ready.load_s,
                "stages_s": ready.stages_s,
                "max_model_len": ready.max_model_len,
                "num_blocks": ready.num_blocks,
            },
        )

    def _create_epoch_counts(self) -> load.EpochCounts:
        return load.EpochCounts(adapters=0 if self.settings.worker.max_loras else None)

    def on_epoch_ended(self) -> None:
        """Keep requests in the request log until the next worker serves."""
        self.ready = None
        for generation in self.requests.list_unfinished():
            generation.with_worker = False
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(NoAnswerError("the worker exited before it answered"))

    async def query_worker(
        self, message: worker_ipc.ToWorker, reply_id: str, reply_type: type[Reply], timeout_s: float
    ) -> Reply:
        """Send ``message`` to the worker, and return the reply with the ID ``reply_id``.

        Raises NoAnswerError, also for a reply of another type.
        """
        if self.ready is None:
            raise NoAnswerError("no worker is serving: retry later")
        waiting: asyncio.Future[worker_ipc.FromWorker] = asyncio.get_running_loop().create_future()
        self._replies[reply_id] = waiting
        self.workers.send(message)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await waiting
        except TimeoutError:
            raise NoAnswerError(f"the worker did not answer within {timeout_s:g} s") from None
        finally:
            del self._replies[reply_id]
        if not isinstance(reply, reply_type):
            raise NoAnswerError(
                f"the worker replied with {type(reply).__name__} instead of {reply_type.__name__}"
            )
        return reply

    def _handle_message(self, message: worker_ipc.FromWorker) -> None:
        match message:
            case worker_ipc.StartupStage(stage=stage):
                self.stage = stage
            case worker_ipc.Tokens(tokens=tokens):
                self._handle_tokens(tokens)
            case worker_ipc.PromptScores():
                if (generation := self._find_current_request(message)) is not None:
                    generation.add_scores(message)
            case worker_ipc.RequestFailure(reason=reason, message=why, param=param):
                if (generation := self._find_current_request(message)) is not None:
                    generation.with_worker = False
                    generation.fail(RequestFailedError(reason, why or reason, param))
                self._submit_next_suspect()
            case worker_ipc.MissingMedia(keys=keys):
                self.workers.mark_media_missing(keys)
                if (generation := self._find_current_request(message)) is not None:
                    self._submit(generation)
            case worker_ipc.Report():
                self.report = message
                self._report_at = time.monotonic()
                self.metrics.add_report(message)
                self.manager.on_report(message)
                abandoned = self._abandoned.update(message.running)
                if abandoned is not None and self.ready is not None:
                    self.workers.send(worker_ipc.AbandonedRequests(abandoned))
            case worker_ipc.AdapterLoadResult(query_id=reply_id):
                self._on_adapter_loaded(message)
                self._resolve_reply(reply_id, message)
            case worker_ipc.TrimResult(operation_id=reply_id):
                self._resolve_reply(reply_id, message)
            case (
                worker_ipc.AuditReport(query_id=reply_id)
                | worker_ipc.DiagnosticReport(query_id=reply_id)
                | worker_ipc.AdoptionResult(query_id=reply_id)
            ):
                self._resolve_reply(reply_id, message)

    def _on_adapter_loaded(self, result: worker_ipc.AdapterLoadResult) -> None:
        if self._counts.adapters is not None and result.error is None:
            self._counts.adapters += 1
        if (adapter := self.adapters.handle_load_result(result)) is None:
            return
        log.error(
            "the new worker could not load an adapter",
            extra={"adapter": adapter.name, "reason": result.error},
        )
        if adapter.required:
            self.fail(
                f"cannot load the adapter {adapter.name}={adapter.path} of --lora-modules: "
                f"{result.error}"
            )

    def _has_client(self, request_id: str) -> bool:
        generation = self.requests.get(request_id)
        return generation is not None and generation.with_worker

    def _resolve_reply(self, reply_id: str, message: worker_ipc.FromWorker) -> None:
        waiting = self._replies.get(reply_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _find_current_request(
        self,
        message: (
            worker_ipc.Token
            | worker_ipc.PromptScores
            | worker_ipc.RequestFailure
            | worker_ipc.MissingMedia
        ),
    ) -> Generation | None:
        # A message is outdated if its request was released, parked or submitted again meanwhile.
        generation = self.requests.get(message.request_id)
        if generation is None or not generation.with_worker or generation.is_done:
            return None
        return generation if message.attempt == generation.attempt else None

    def _handle_tokens(self, tokens: list[worker_ipc.Token]) -> None:
        now = time.monotonic()
        for token in tokens:
            if (generation := self._find_current_request(token)) is None:
                continue
            if generation.started is None and token.started is not None:
                generation.started = token.started
                self.metrics.observe_queue_time(token.started)
            generation.push(token.token_id, token.finish_reason, token.logprobs)
            generation.losses = 0
            self._counts.generation_tokens += 1
            self.metrics.observe_token(generation, now)
            if token.finish_reason is not None:
                generation.with_worker = False
            elif generation.is_done:
                self.abort_in_worker(generation)  # the worker does not know stop strings
        self._submit_next_suspect()

    def _on_worker_lost(self, reason: str) -> None:
        log.error(
            "the worker exited unexpectedly",
            extra={"epoch": str(self.epochs.current), "reason": reason},
        )
        self.failures.requests.count_loss(self.requests.list_unfinished())
        self.on_epoch_ended()
        if not self.lifecycle.has_ended and self.lifecycle.state is not EngineState.STOPPING:
            recovery = self.manager.recover(reason, self.epochs.current)
            self._recovery = asyncio.create_task(recovery, name="recovery")
            self._recovery.add_done_callback(self._on_recovery_done)

    def _on_recovery_done(self, recovery: asyncio.Task[None]) -> None:
        if not recovery.cancelled() and (error := recovery.exception()) is not None:
            log.critical("the recovery of the worker failed", exc_info=error)
            self.fail(f"the worker cannot be replaced: {error!r}")

    # ---- the engine as a whole

    def compute_load(self) -> Load:
        """Return the load of the engine: the frontend's counts and the worker's latest report."""
        reported = None if self.report is None else self.report.load
        usage = (
            load.CacheUsage() if self.report is None else load.CacheUsage.from_report(self.report)
        )
        return load.merge_load(reported, self._counts, len(self.requests), usage, self.report_age_s)

    def list_ledger_entries(self) -> list[LedgerEntry]:
        """Return the ledger entries of the frontend, the worker's latest report and the standby."""
        reported = [] if self.report is None else self.report.ledger
        return self.ledger.list_entries() + reported + self.manager.standby.list_ledger_entries()

    def compute_kv_usage(self) -> float | None:
        """Return the share of KV blocks in use, 0 to 1; None before the first report."""
        return None if self.report is None else load.CacheUsage.from_report(self.report).kv

    def list_injections(self) -> list[str]:
        """Return the names of the injected faults."""
        if self.report is not None and self.report.injections:
            return [*self.hooks.names, *self.report.injections]
        parts = (part.partition(":")[0].strip() for part in self.settings.worker.inject.split(";"))
        return [name for name in parts if name]

    @property
    def report_age_s(self) -> float | None:
        """Seconds since the worker's latest report; None before the first report."""
        return None if self._report_at is None else time.monotonic() - self._report_at

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of prompt and output tokens; None until a worker or a flag defines it.

        It stays known while the worker is replaced, because bounds of bodies and answers depend on
        it.
        """
        return self._max_model_len

    async def start(self) -> None:
        """Start the first worker. Return when it serves or the engine has failed."""
        self.lifecycle.move_to(EngineState.WARMING)
        first = asyncio.create_task(self.manager.start_first(), name="first start")
        self._first_start = first
        try:
            await asyncio.wait({first})
        finally:
            first.cancel()
        if first.cancelled():  # by shutdown
            return
        first.result()
        freeze_counter.freeze()
        self.collections.start()

    def fail(self, message: str) -> None:
        """Fail all requests, and make the process exit with status 1."""
        log.critical("the engine failed and will exit", extra={"reason": message})
        if self.lifecycle.can_move_to(EngineState.FAILED):
            self.lifecycle.move_to(EngineState.FAILED)
        self.requests.fail_all("unavailable", f"the engine failed: {message}")
        if not self.exit_code.done():
            self.exit_code.set_result(1)

    async def shut_down(self, deadline_s: float) -> None:
        """Finish running requests within ``deadline_s`` seconds, then stop the engine.

        The process exits with status 0.
        """
        if not self.lifecycle.can_move_to(EngineState.STOPPING):
            return
        self.lifecycle.move_to(EngineState.STOPPING)
        for generation in self.requests.list_unfinished():
            generation.parked = False
        self.resubmit()
        try:
            async with asyncio.timeout(deadline_s):
                await self.idle.wait()
        except TimeoutError:
            log.warning(
                "requests were aborted, because they did not finish before the shutdown timeout",
                extra={"count": len(self.requests.list_unfinished())},
            )
            self.requests.fail_all("unavailable", "the engine is stopping: send the request again")
        for start in (self._first_start, self._recovery):
            if start is not None:
                start.cancel()
        self.manager.standby.end_lease()
        async with self.manager.replacing:
            await self.manager.standby.end()
            stop = await self.workers.stop()
            self.on_epoch_ended()
        if stop.stopped is not None:
            log.info(
                "worker stopped",
                extra={
                    "device_allocated": stop.stopped.device_allocated,
                    "device_baseline": stop.stopped.device_baseline,
                },
            )
        self.media.close()
        self.collections.stop()
        freeze_counter.unfreeze()
        self.lifecycle.move_to(EngineState.STOPPED)
        if not self.exit_code.done():
            self.exit_code.set_result(0)

    def _on_state_change(self, old_state: EngineState, new_state: EngineState) -> None:
        log.info("engine state changed", extra={"before": str(old_state), "after": str(new_state)})
        if new_state is EngineState.DRAINING:
            self._on_draining()
