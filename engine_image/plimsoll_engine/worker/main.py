"""Main loop of a worker: connect, prepare, take over, and serve until a Stop message.

The loop has one thread, reads messages between steps, and never waits for a busy frontend.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import random
import time
from pathlib import Path

import torch

from plimsoll_api.admin import STANDBY_PROCESS_NAME, Load, Role
from plimsoll_engine import injection
from plimsoll_engine.core.engine_core import EngineCore, StepOutput
from plimsoll_engine.core.grammar.grammars import Vocabulary
from plimsoll_engine.core.grammar.trial import TrialServer
from plimsoll_engine.core.speculation.drafting import DraftCounts
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.errors import FatalWorkerError, LoadError, RanksLostError, SettingsError
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.device_memory import read_device_memory
from plimsoll_engine.memory.diagnostics import run_diagnostic
from plimsoll_engine.memory.lost import (
    count_lost_blocks,
    count_lost_encoder_tokens,
    count_lost_host_blocks,
)
from plimsoll_engine.memory.trim import trim
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.choices import split_choices
from plimsoll_engine.messages.handover import HandoverOutcome, HandoverRefusal, HandoverRefusedError
from plimsoll_engine.messages.weight_ipc import MappingLostError
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.process.allocations import AllocationReporter
from plimsoll_engine.process.host_memory import (
    PythonMemoryEstimator,
    measure_process_memory,
    read_private_dirty_bytes,
)
from plimsoll_engine.process.stacks import write_stacks_on_sigusr1
from plimsoll_engine.process.threads import count_cores_per_process
from plimsoll_engine.worker.activity import ActivityRecorder
from plimsoll_engine.worker.channel import Channel, FrontendGoneError
from plimsoll_engine.worker.hooks import WorkerHooks, create_worker_hooks
from plimsoll_engine.worker.lifecycle import CoreLifecycle

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
TRANSFER_POLL_INTERVAL_S = 0.01
CLOSE_TIMEOUT_S = 10.0
# Interval while requests run. An idle worker divides it by 10.
CAPTURE_INTERVAL_S = 0.2
# Maximum time for which incoming messages postpone a capture. One of them may be a Stop.
MAX_CAPTURE_DELAY_S = 1.0
# Carried-over requests arrive within this time, and must not wait for a capture or a report.
FIRST_CAPTURE_DELAY_S = 0.05
# A new worker with the same settings and checkpoint would repeat them.
PERMANENT_ERRORS = (LoadError, SettingsError)


def run(config: WorkerConfig, epoch: int, vocabulary: Vocabulary | None = None) -> int:
    """Run a worker in a newly forked process, and return its exit status."""
    # Before all else: a fork copies one thread only and must not inherit a CUDA context.
    trials = None if vocabulary is None else TrialServer.fork(vocabulary.compile_for_trial)
    write_stacks_on_sigusr1(config.run_dir, "worker")
    random.seed()
    torch.set_num_threads(count_cores_per_process(config.tensor_parallel_size))
    torch.manual_seed(int.from_bytes(os.urandom(8)) >> 1)
    try:
        channel = Channel(config.socket)
    except FrontendGoneError as error:
        log.error("%s", error)
        return 1
    size = config.tensor_parallel_size
    ranks = Leader(config.run_dir, epoch, size) if size > 1 else None
    lifecycle = CoreLifecycle(
        config,
        vocabulary=vocabulary,
        ranks=ranks,
        trials=trials,
        on_stage=lambda stage: channel.send(worker_ipc.StartupStage(stage)),
    )
    try:
        channel.send(worker_ipc.Hello(epoch, os.getpid()))
        started = time.monotonic()
        injection.check_faults(config.inject)
        lifecycle.prepare()
        channel.send(_create_prepared_message(epoch, lifecycle))
        command = _wait_for_command(channel)
        if isinstance(command, worker_ipc.Stop):
            _release_and_report(lifecycle, channel)
            return 0
        engine = lifecycle.take_over(command.quick, command.handover)
        settings = lifecycle.settings
        assert settings is not None
        channel.send(
            worker_ipc.Ready(
                epoch=epoch,
                max_model_len=settings.max_model_len,
                num_blocks=settings.num_blocks,
                block_size=settings.block_size,
                load_s=time.monotonic() - started,
                stages_s=lifecycle.stages_s,
                refusal=lifecycle.refusal,
            )
        )
        del command  # with the handover in it
        Worker(lifecycle, channel, create_worker_hooks(config.inject, epoch, engine)).serve()
    except FrontendGoneError as error:
        log.error("%s", error)
        return 1
    except PERMANENT_ERRORS as error:
        return _report_failure(channel, str(error), is_permanent=True)
    except (FatalWorkerError, MappingLostError) as error:
        if isinstance(error, RanksLostError) and error.rank_exited:
            log.error("%s", error)  # the zygote reports to the frontend which rank exited
            return 1
        return _report_failure(channel, str(error))
    except Exception as error:
        log.exception("the worker failed")
        return _report_failure(channel, f"{type(error).__name__}: {error}")
    else:
        return 0
    finally:
        lifecycle.shut_down()
        channel.close()
        if trials is not None:
            trials.close()
        if ranks is not None:
            ranks.close()


def _create_prepared_message(epoch: int, lifecycle: CoreLifecycle) -> worker_ipc.Prepared:
    memory = measure_process_memory(
        Role.WORKER, PythonMemoryEstimator(), excluded_shared_bytes=lifecycle.mapped_host_bytes
    )
    leader = lifecycle.member.leader
    reports = [] if leader is None else leader.take_standby_memory_reports()
    others = [rank.memory for rank in reports]
    for process in (memory, *others):
        process.name, process.private = STANDBY_PROCESS_NAME, read_private_dirty_bytes(process.pid)
    return worker_ipc.Prepared(epoch, lifecycle.stages_s, memory, others)


def _wait_for_command(channel: Channel) -> worker_ipc.TakeOver | worker_ipc.Stop:
    while True:
        for message in channel.receive(REPORT_INTERVAL_S):
            if isinstance(message, worker_ipc.TakeOver | worker_ipc.Stop):
                return message


def _release_and_report(
    lifecycle: CoreLifecycle,
    channel: Channel,
    handover: bytes | HandoverRefusal | None = None,
    earlier_stages_s: dict[str, float] | None = None,
) -> None:
    # The process exits only after the frontend has closed the socket, because destroying a CUDA
    # context keeps the driver busy, which would delay the next worker. The handover is sent once
    # this process can no longer write to the KV pool.
    lifecycle.shut_down()
    if isinstance(handover, bytes) and not lifecycle.weights.is_fenced:
        handover = HandoverRefusal(
            HandoverOutcome.UNFENCED, "an object in the old worker still references the KV pool"
        )
    stopped = worker_ipc.StopResult(*lifecycle.get_allocated_after_shutdown())
    if isinstance(handover, bytes):
        stopped.handover = handover
    else:
        stopped.refusal = handover
    stopped.stages_s = (earlier_stages_s or {}) | lifecycle.close_stages_s
    stopped.sent = time.monotonic()
    channel.send(stopped, flush=True)
    channel.wait_until_closed(CLOSE_TIMEOUT_S)


def _report_failure(channel: Channel, message: str, is_permanent: bool = False) -> int:
    log.error("%s", message)
    try:
        channel.send(worker_ipc.WorkerFailure(message, is_permanent), flush=True)
    except FrontendGoneError as error:
        log.error("%s", error)
    return 1


class Worker:
    """Worker loop, which passes messages between the channel and the engine core."""

    def __init__(self, lifecycle: CoreLifecycle, channel: Channel, hooks: WorkerHooks) -> None:
        assert lifecycle.engine is not None
        self.engine: EngineCore = lifecycle.engine
        self.lifecycle = lifecycle
        self.leader = lifecycle.member.leader
        self.channel = channel
        self.hooks = hooks
        self.python = PythonMemoryEstimator()
        self.allocations = AllocationReporter()
        self.stopping = self._handover_requested = False
        self._activity = ActivityRecorder()
        self._stop_stages_s: dict[str, float] = {}
        self._next_report = self._next_capture = time.monotonic() + FIRST_CAPTURE_DELAY_S

    def serve(self) -> None:
        """Serve until a Stop message. Raises FrontendGoneError and FatalWorkerError."""
        while not self.stopping:
            due = min(self._next_report, self._next_capture)
            wait_s = 0.0 if self._can_step else due - time.monotonic()
            if self.engine.is_transferring:
                wait_s = min(wait_s, TRANSFER_POLL_INTERVAL_S)
            messages = self.channel.receive(max(0.0, wait_s))
            self._activity.begin()
            for message in messages:
                if not self.hooks.should_drop(message):
                    self._handle(message)
            self._activity.record("messages")
            if self.stopping:
                break
            if self._can_step:
                self._step()
            else:
                self.engine.poll(is_idle=not self.engine.has_work)
            self._activity.record("step")
            self._capture_graph()
            self._activity.record("capture")
            if time.monotonic() >= self._next_report:
                self.hooks.tick()
                self._next_report = time.monotonic() + REPORT_INTERVAL_S
                if not self.channel.is_full:
                    self.channel.send(self._create_report())
                self._activity.record("report")
        self._shut_down()

    @property
    def _can_step(self) -> bool:
        return self.engine.has_work and not self.channel.is_full

    def _step(self) -> None:
        output = self.engine.step()
        self._send_output(output)
        self.hooks.after_step(sum(token.finish_reason is not None for token in output.tokens))

    def _send_output(self, output: StepOutput) -> None:
        for scores in output.scores:
            self.channel.send(scores)
        if output.tokens:
            self.channel.send(worker_ipc.Tokens(self.engine.counters.steps, output.tokens))
        for dropped in output.dropped:
            self.channel.send(dropped)

    def _capture_graph(self) -> None:
        # A capture delays the next step, or a Stop, by tens of milliseconds.
        now = time.monotonic()
        overdue = now >= self._next_capture + MAX_CAPTURE_DELAY_S
        if now >= self._next_capture and (overdue or not self.channel.is_readable()):
            missing = self.engine.capture_next_graph()
            pause_s = CAPTURE_INTERVAL_S if missing else math.inf
            self._next_capture = now + (pause_s if self.engine.has_work else pause_s / 10)

    def _handle(self, message: worker_ipc.ToWorker) -> None:
        match message:
            case worker_ipc.Submit():
                for submit in split_choices(message):
                    if (refusal := self.engine.submit(submit)) is not None:
                        self.channel.send(refusal)
            case worker_ipc.Abort(request_id):
                self.engine.abort(request_id)
            case worker_ipc.AbandonedRequests(request_ids):
                self.engine.abandoned = frozenset(request_ids)
            case worker_ipc.LoadAdapter():
                self.channel.send(self._load_adapter(message))
            case worker_ipc.UnloadAdapter(number) if self.engine.runner.adapters is not None:
                self.engine.runner.adapters.unload(number)
            case worker_ipc.Trim(operation_id):
                steps = trim(self.engine, self.python, self.leader)
                self.channel.send(worker_ipc.TrimResult(operation_id, steps))
            case worker_ipc.AuditQuery(query_id):
                idle, rules, findings = run_audit(self.engine, self.lifecycle.ledger)
                keys = self.engine.receiver.list_keys()
                self.channel.send(worker_ipc.AuditReport(query_id, idle, rules, findings, keys))
            case worker_ipc.DiagnosticQuery(query_id, kind):
                found = run_diagnostic(kind, self.allocations)
                self.channel.send(worker_ipc.DiagnosticReport(query_id, found))
            case worker_ipc.CarryOverComplete(query_id):
                settled = self.engine.release_unclaimed_tables()
                adopted = [] if settled is None else settled.adopted
                refused = {} if settled is None else settled.refused
                self.channel.send(worker_ipc.AdoptionResult(query_id, adopted, refused))
            case worker_ipc.Stop(hand_over, sent):
                self.stopping = True
                self._handover_requested = hand_over
                if sent is not None:
                    self._activity.record("messages")
                    self._stop_stages_s["noticed"] = round(time.monotonic() - sent, 4)
                    waited_s = self._activity.get_durations_since(sent)
                    self._stop_stages_s |= {
                        f"noticed_after_{what}": s for what, s in waited_s.items()
                    }

    def _load_adapter(self, command: worker_ipc.LoadAdapter) -> worker_ipc.AdapterLoadResult:
        answer = worker_ipc.AdapterLoadResult(command.query_id, command.number)
        if (adapters := self.engine.runner.adapters) is None:
            answer.error = "this engine does not serve adapters: start it with --enable-lora"
            return answer
        try:
            adapters.load(command.name, command.number, Path(command.path))
        except (LoadError, OSError, torch.OutOfMemoryError) as error:
            answer.error = str(error)
        return answer

    def _create_report(self) -> worker_ipc.Report:
        engine, counters = self.engine, self.engine.counters
        scheduler = engine.scheduler
        draft_counts = DraftCounts() if engine.speculation is None else engine.speculation.counters
        rank_reports = [] if self.leader is None else self.leader.get_memory_reports()
        return worker_ipc.Report(
            load=Load(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting) + len(engine.grammars),
                compiling=len(engine.grammars),
                requests_total=counters.requests,
                aborted_total=counters.aborted,
                errors_total=counters.errors,
                prompt_tokens_total=counters.prompt_tokens,
                generation_tokens_total=counters.generation_tokens,
                steps_total=counters.steps,
                preemptions_total=scheduler.preemptions_total,
            ),
            memory=measure_process_memory(
                Role.WORKER,
                self.python,
                self.lifecycle.heap.collections,
                self.lifecycle.mapped_host_bytes,
            ),
            others=[rank.memory for rank in rank_reports],
            devices=read_device_memory(engine.runner.device)
            + [d for r in rank_reports for d in r.devices],
            ledger=self.lifecycle.ledger.list_entries(),
            prefix_hit_tokens_total=scheduler.prefix_hit_tokens_total,
            prefix_query_tokens_total=scheduler.prefix_query_tokens_total,
            drafts_total=draft_counts.drafts,
            draft_tokens_total=draft_counts.draft_tokens,
            accepted_tokens_total=draft_counts.accepted_tokens,
            kv_blocks_used=engine.pool.num_used,
            kv_blocks_total=engine.pool.num_blocks,
            kv_blocks_lost=count_lost_blocks(engine),
            host_blocks_total=None if scheduler.offload is None else scheduler.offload.slots,
            host_blocks_lost=count_lost_host_blocks(engine),
            encoder_tokens_total=None if scheduler.encoder is None else scheduler.encoder.budget,
            encoder_tokens_lost=count_lost_encoder_tokens(engine),
            running=[request.request_id for request in scheduler.running],
            injections=list(self.hooks.names),
            capturing=self._next_capture < math.inf,
        )

    def _shut_down(self) -> None:
        # The process exits. A collection now would also traverse the objects that the zygote froze
        # and copy their pages, while streams wait.
        gc.disable()
        started = time.monotonic()
        handover = self._create_handover() if self._handover_requested else None
        if self._handover_requested:
            tables_s = time.monotonic() - started - self._stop_stages_s["last_step"]
            self._stop_stages_s["tables"] = round(tables_s, 4)
        del self.engine, self.hooks
        _release_and_report(self.lifecycle, self.channel, handover, self._stop_stages_s)

    def _create_handover(self) -> bytes | HandoverRefusal:
        # Raises DeviceLostError, because the contents of the pool are then unknown.
        started = time.monotonic()
        self._send_output(self.engine.quiesce())
        self._stop_stages_s["last_step"] = round(time.monotonic() - started, 4)
        try:
            return self.lifecycle.hand_over()
        except HandoverRefusedError as error:
            return HandoverRefusal(error.outcome, str(error))
        except FatalWorkerError:
            raise
        except Exception as error:  # the successor can prefill again
            log.exception(
                "failed to hand over the KV pool, so the next worker prefills the requests again"
            )
            return HandoverRefusal(HandoverOutcome.FAILED, f"{type(error).__name__}: {error}")
