"""Engine core: queue requests, run one step at a time, and return tokens.

It launches a step while the device still computes the previous one, and reads the tokens
afterwards. A step that fails is computed again request by request, so only requests that fail alone
end.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from plimsoll_engine.caches.receiver import MediaCacheReceiver
from plimsoll_engine.core.execute.runner import InFlightStep, NextToken, Runner
from plimsoll_engine.core.execute.sampling import NO_TOKEN
from plimsoll_engine.core.grammar.grammars import GrammarCompiler, GrammarError
from plimsoll_engine.core.grammar.matcher import MASK_WAIT_S
from plimsoll_engine.core.handover.inheritance import Inheritance
from plimsoll_engine.core.owners import create_owners
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Chunk, Scheduler
from plimsoll_engine.core.schedule.token_rules import COUNTED_TOKEN_BYTES
from plimsoll_engine.core.speculation.drafting import Speculation
from plimsoll_engine.errors import DeviceLostError, FatalWorkerError
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages.worker_ipc import (
    Logprobs,
    MissingMedia,
    PromptScores,
    RequestFailure,
    Submit,
    Token,
)
from plimsoll_engine.messages.zygote_ipc import DEFAULT_MEDIA_CACHE_BYTES
from plimsoll_engine.process.owners import Owner

log = logging.getLogger(__name__)

# Longest wait for a grammar when no request can run. The worker then reads messages again.
GRAMMAR_COMPILE_WAIT_S = 0.01

# Checking the deadlines in each step would be too slow.
DEADLINE_CHECK_INTERVAL_S = 0.05

# Before a handover. The next worker computes the tokens that were not accepted in time again.
QUIESCE_GRAMMAR_WAIT_S = 0.1

# Longest wait of a prefix cache reset for KV transfers, which usually take less time.
RESET_TRANSFER_TIMEOUT_S = 1.0


@dataclass(slots=True)
class StepOutput:
    """Results of one step: tokens, prompt log probabilities, and failed requests."""

    tokens: list[Token] = field(default_factory=list)
    # Prompt log probabilities. They must be sent before the tokens.
    scores: list[PromptScores] = field(default_factory=list)
    dropped: list[RequestFailure] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Counts since this worker started."""

    requests: int = 0
    aborted: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0


class EngineCore:
    """Engine core, which runs all requests of one worker. Only the worker's loop may call it."""

    name = "engine"

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        grammars: GrammarCompiler | None = None,
        media_cache_bytes: int = DEFAULT_MEDIA_CACHE_BYTES,
        speculation: Speculation | None = None,
    ) -> None:
        self.runner = runner
        self.speculation = speculation
        self.receiver = MediaCacheReceiver(media_cache_bytes)
        self.scheduler = scheduler
        self.grammars = GrammarCompiler(None) if grammars is None else grammars
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        # The audit reports objects that are not in ``requests``.
        self.live: WeakSet[Request] = WeakSet()
        # IDs of requests whose client has disconnected, from the frontend's latest message.
        self.abandoned: frozenset[str] = frozenset()
        self.make_request: Callable[[Submit], Request] = Request.create
        self.inheritance: Inheritance | None = None
        self._suspects: deque[str] = deque()
        self._next_expiry = 0.0
        # Time that the host has waited for the device.
        self.waited_s = 0.0
        # Launched step whose tokens have not been read yet.
        self._in_flight: InFlightStep | None = None
        # Requests whose newest token has not been accepted by their grammar yet.
        self._unconfirmed: list[Request] = []

    @property
    def pool(self) -> BlockPool:
        """Block pool of the scheduler."""
        return self.scheduler.pool

    @property
    def max_decode_rows(self) -> int:
        """Maximum number of rows in a step that has no prompts."""
        if self.speculation is None:
            return self.scheduler.max_num_seqs
        return self.speculation.max_rows

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.requests)

    @property
    def is_transferring(self) -> bool:
        """Whether KV blocks are being copied to or from host memory."""
        return self.scheduler.offload is not None and bool(self.scheduler.offload.transfers)

    def poll(self, is_idle: bool = False) -> None:
        """Complete finished KV transfers, and release expired inherited tables.

        Call this between steps. ``is_idle`` means that there are no requests.
        """
        if self.inheritance is not None:
            self.inheritance.release_expired_tables()
        if self.scheduler.offload is not None:
            self.scheduler.offload.poll(is_idle)

    def reset_prefix_cache(self) -> bool:
        """Drop every cached block that no request uses, on the device and on the host.

        Return False if a transfer did not end within :data:`RESET_TRANSFER_TIMEOUT_S`. Its blocks
        stay cached.
        """
        offload = self.scheduler.offload
        settled = offload is None or offload.wait_for_transfers(RESET_TRANSFER_TIMEOUT_S)
        if offload is not None:
            offload.clear()
        self.pool.reset_prefix_cache()
        return settled

    def submit(self, message: Submit) -> RequestFailure | MissingMedia | None:
        """Queue a request. On failure, return the failure or the keys of missing media."""
        whole = self.receiver.restore_cached_media(message)
        if message.request_id in self.requests:
            return self._create_refusal(message, "a request with this ID is already running")
        if isinstance(whole, MissingMedia):
            return whole
        request = self.make_request(whole)
        if message.adapter and (why := self._set_adapter(request, message.adapter)) is not None:
            return self._create_refusal(message, why)
        if (why := self.scheduler.get_refusal_reason(request)) is not None:
            return self._create_refusal(message, why)
        self.counters.requests += 1
        self.counters.prompt_tokens += request.num_prompt
        self.requests[request.request_id] = request
        self.live.add(request)
        if self.speculation is not None:
            self.speculation.enable_drafts(request, self.scheduler.max_model_len)
        if self.inheritance is not None:
            self.inheritance.claim_table(request)
        if (grammar := request.sampling.grammar) is None:
            self._queue_request(request)
            return None
        if request.block_ids:
            self.scheduler.keep_inherited_blocks(request)
        self.grammars.start_compilation(
            request.request_id, grammar, message.output_ids, request.tenant
        )
        return None

    def _queue_request(self, request: Request) -> None:
        if request.block_ids:
            self.scheduler.start_with_inherited_blocks(request)
        else:
            self.scheduler.add(request)

    def release_unclaimed_tables(self) -> Inheritance | None:
        """Release inherited tables that no request has claimed, and return the inheritance, if any.

        Call this once, after the frontend has submitted all carried-over requests.
        """
        inheritance, self.inheritance = self.inheritance, None
        if inheritance is not None:
            inheritance.release_tables()
        return inheritance

    def quiesce(self) -> StepOutput:
        """Finish the step in progress without launching another, and return its results.

        The KV pool then contains the keys and values of all computed tokens. Raises
        :class:`DeviceLostError`.
        """
        output = StepOutput()
        self._finish_step(output)
        self._append_confirmed_tokens(output, QUIESCE_GRAMMAR_WAIT_S)
        if self.runner.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.runner.device)
            except RuntimeError as error:
                raise DeviceLostError(f"the device is lost: {error}") from None
        return output

    def _set_adapter(self, request: Request, adapter_number: int) -> str | None:
        # Returns an error message if the adapter is not loaded.
        adapters = self.runner.adapters
        request.adapter = None if adapters is None else adapters.get(adapter_number)
        return "the adapter of the request is not loaded" if request.adapter is None else None

    def abort(self, request_id: str) -> bool:
        """End a request without a response. Return False if no such request exists."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.counters.aborted += 1
        self._end_request(request)
        return True

    def _queue_compiled_requests(self, wait_s: float = 0.0) -> list[RequestFailure]:
        # Returns failures for invalid grammars. If no compilation has ended, wait for the first.
        dropped = []
        for request_id, outcome in self.grammars.collect_finished(wait_s):
            request = self.requests[request_id]
            self._queue_request(request)
            if isinstance(outcome, GrammarError):
                self.counters.errors += 1
                self._end_request(request)
                dropped.append(_create_grammar_failure(request, outcome))
            else:
                request.matcher = outcome
        return dropped

    def end_expired_requests(self, now: float) -> list[RequestFailure]:
        """End the requests whose deadline has passed, and return their failures."""
        expired = [
            r for r in self.requests.values() if r.deadline is not None and r.deadline <= now
        ]
        for request in expired:
            self.counters.errors += 1
            self._end_request(request)
        return [
            RequestFailure(r.request_id, r.attempt, "deadline", _format_deadline_message(r))
            for r in expired
        ]

    def step(self) -> StepOutput:
        """Launch one batch, then read the tokens of the previous batch, and return the results.

        Raises :class:`FatalWorkerError` if no further step can work.
        """
        if (now := time.monotonic()) >= self._next_expiry:
            self._next_expiry = now + DEADLINE_CHECK_INTERVAL_S
            if expired := self.end_expired_requests(now):
                return StepOutput(dropped=expired)
        if failures := self._queue_compiled_requests():
            return StepOutput(dropped=failures)
        self.poll()
        output = StepOutput()
        if self._suspects or any(r.awaits_token for r in self.scheduler.running):
            self._finish_step(output)
        self._append_confirmed_tokens(output, MASK_WAIT_S)
        self._free_outputs()
        suspect = self._take_next_suspect()
        chunks = self.scheduler.schedule(suspect)
        if self.speculation is not None and suspect is None:
            self._add_drafts(self.speculation, chunks)
        if not chunks:
            if suspect is not None:  # a handover or transfer still holds blocks that it needs
                self._suspects.appendleft(suspect.request_id)
            if self._in_flight is None and not output.tokens:
                self._append_confirmed_tokens(output, GRAMMAR_COMPILE_WAIT_S, is_idle=True)
                output.dropped += self._queue_compiled_requests(
                    0.0 if self._unconfirmed else GRAMMAR_COMPILE_WAIT_S
                )
            self._finish_step(output)
            return output
        self.counters.steps += 1
        try:
            step = self.runner.launch(chunks)
        except FatalWorkerError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a model spares other requests
            message = f"{type(error).__name__}: {error}"
            out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        else:
            # The step may compute one token too many for a request that ends in the previous step.
            # This is harmless: the device runs steps in launch order, so the next owner of the KV
            # blocks overwrites the extra keys and values.
            self._record_computed(chunks)
            self._finish_step(output)
            self._in_flight = step
            return output
        self._finish_step(output)
        self._retry_requests_alone(
            chunks, message, "unavailable" if out_of_memory else "error", output
        )
        return output

    def _add_drafts(self, speculation: Speculation, chunks: list[Chunk]) -> None:
        # On an error, disables drafts for all requests in ``chunks``.
        try:
            speculation.add_drafts(chunks, self.scheduler)
        except FatalWorkerError:
            raise
        except Exception as error:  # noqa: BLE001 - without drafts the step still works
            message = f"failed to create drafts: {type(error).__name__}: {error}"
            self._raise_if_device_lost(message)
            log.warning(message)
            for chunk in chunks:
                chunk.drafts = ()
                chunk.request.drafting = None

    def capture_next_graph(self) -> bool:
        """Capture one more graph of the model or the draft model. Return False if none is left."""
        if self.runner.capture_next_graph():
            return True
        draft = None if self.speculation is None else self.speculation.draft_model
        return draft is not None and draft.forward.capture_next_graph()

    def _record_computed(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            ends = chunk.has_newest_token
            self.scheduler.record_computed(chunk)
            chunk.request.in_flight.tokens += ends

    def _finish_step(self, output: StepOutput) -> None:
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        started = time.perf_counter()
        try:
            output.scores += step.collect_prompt_scores()
            results = step.collect_results()
        except RuntimeError as error:
            raise DeviceLostError(f"the device is lost: {error}") from None
        self.waited_s += time.perf_counter() - started
        for request, tokens, num_drafts in results:
            token_id, logprobs = tokens[0]
            if token_id == NO_TOKEN:
                self._end_with_invalid_logits(request, output)
            elif request.matcher is None:
                self._append_token(request, token_id, logprobs, output)
                if num_drafts:
                    self._append_accepted_drafts(request, tokens[1:], num_drafts, output)
            else:
                request.in_flight.unconfirmed = token_id, logprobs
                self._unconfirmed.append(request)
                self.grammars.masks.advance(request.matcher, token_id)

    def _append_accepted_drafts(
        self, request: Request, tokens: list[NextToken], num_drafts: int, output: StepOutput
    ) -> None:
        # ``tokens`` are those after the first, one for each accepted draft. ``num_drafts`` is the
        # number of drafts that were verified.
        assert self.speculation is not None
        self.speculation.record_verified_drafts(request, num_drafts, len(tokens))
        for token_id, logprobs in tokens:
            if request.released:
                break
            if token_id == NO_TOKEN:
                self._end_with_invalid_logits(request, output)
                break
            self.scheduler.record_accepted(request)
            self._append_token(request, token_id, logprobs, output)

    def _end_with_invalid_logits(self, request: Request, output: StepOutput) -> None:
        self.counters.errors += 1
        self._end_request(request)
        message = "the model's logits for this request are not finite: the request cannot continue"
        output.dropped.append(RequestFailure(request.request_id, request.attempt, "error", message))

    def _append_token(
        self, request: Request, token_id: int, logprobs: Logprobs | None, output: StepOutput
    ) -> None:
        request.append(token_id)
        self.counters.generation_tokens += 1
        reason = request.get_finish_reason(token_id, self.scheduler.max_model_len)
        started, attempt = request.take_start_statistics(), request.attempt
        output.tokens.append(
            Token(request.request_id, token_id, reason, logprobs, started, attempt)
        )
        if reason is not None:
            self._end_request(request)

    def _append_confirmed_tokens(
        self, output: StepOutput, wait_s: float, is_idle: bool = False
    ) -> None:
        # Waits up to ``wait_s`` seconds for fast grammars. If ``is_idle``, also waits for slow
        # grammars. Ends requests whose grammar fails or takes too long to check a token.
        if not self._unconfirmed:
            return
        masks = self.grammars.masks
        masks.wait_for_masks(wait_s, is_idle)
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for request in unconfirmed:
            matcher = request.matcher
            if request.released or request.in_flight.unconfirmed is None or matcher is None:
                continue
            if matcher.busy and not masks.give_up_if_overdue(matcher):
                self._unconfirmed.append(request)
                continue
            error = None
            if matcher.busy:
                error = self.grammars.refuse_overdue(matcher)
            else:
                (token_id, logprobs), request.in_flight.unconfirmed = (
                    request.in_flight.unconfirmed,
                    None,
                )
                self._append_token(request, token_id, logprobs, output)
                if matcher.error is not None:
                    error = GrammarError(matcher.field, matcher.error)
            if error is not None and not request.released:
                self.counters.errors += 1
                self._end_request(request)
                output.dropped.append(_create_grammar_failure(request, error))

    def _retry_requests_alone(
        self, chunks: list[Chunk], message: str, reason: str, output: StepOutput
    ) -> None:
        self._raise_if_device_lost(message)
        requests = [chunk.request for chunk in chunks if not chunk.request.released]
        if len(chunks) == 1 and requests:
            self.counters.errors += 1
            (request,) = requests
            self._end_request(request)
            output.dropped.append(
                RequestFailure(request.request_id, request.attempt, reason, message)
            )
            return
        log.warning(
            "a step with %d requests failed; retrying each request alone: %s", len(chunks), message
        )
        for request in requests:
            self.scheduler.preempt(request)
        self._suspects.extend(request.request_id for request in requests)

    def _take_next_suspect(self) -> Request | None:
        while self._suspects:
            request = self.requests.get(self._suspects.popleft())
            if request is not None and request in self.scheduler.waiting:
                return request
        return None

    def _raise_if_device_lost(self, message: str) -> None:
        if self.runner.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.runner.device)
        except RuntimeError as error:
            raise DeviceLostError(f"{message}; the device is lost: {error}") from None

    def _end_request(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._unconfirmed = [other for other in self._unconfirmed if other is not request]
        if not self.grammars.cancel(request.request_id):
            self.scheduler.remove(request)
        request.release(self.pool)
        if not self.requests:
            self._free_outputs()

    def _free_outputs(self) -> None:
        if self.scheduler.encoder is not None and self.runner.outputs is not None:
            self.runner.outputs.free(self.scheduler.encoder.take_freed_keys())

    def _create_refusal(self, message: Submit, reason: str) -> RequestFailure:
        self.counters.errors += 1
        return RequestFailure(message.request_id, message.attempt, "invalid", reason)

    def count_request_bytes(self) -> int:
        """Return the host memory of all requests, in bytes.

        Media in the receiver cache are not included.
        """
        media = {
            item.key: len(item.data or b"")
            for request in self.requests.values()
            for item in request.media
            if item.key not in self.receiver
        }
        return sum(media.values()) + sum(
            request.token_ids.itemsize * len(request.token_ids)
            + (0 if request.counts is None else COUNTED_TOKEN_BYTES * len(request.counts))
            + (0 if request.matcher is None else request.matcher.bytes)
            + len(request.allowed or b"")
            + (0 if request.drafting is None else request.drafting.nbytes)
            for request in self.requests.values()
        )

    def list_owners(self) -> list[Owner]:
        """Return the memory owners of this engine core."""
        return create_owners(self)

    def close(self) -> None:
        """Release every request, the model and the KV pool. Idempotent."""
        for request in list(self.requests.values()):
            self._end_request(request)
        self.release_unclaimed_tables()
        self._suspects.clear()
        self._unconfirmed.clear()
        self._in_flight = None
        for owner in reversed(self.list_owners()):
            if owner.close is not None:
                owner.close()
        self.scheduler.offload = None


def _format_deadline_message(request: Request) -> str:
    if not request.num_outputs:
        return "the request's deadline passed before its first token"
    return f"the request's deadline passed after {request.num_outputs} output tokens"


def _create_grammar_failure(request: Request, error: GrammarError) -> RequestFailure:
    if error.unavailable:
        return RequestFailure(request.request_id, request.attempt, "unavailable", str(error))
    return RequestFailure(request.request_id, request.attempt, "invalid", str(error), error.field)
