"""Log of running requests, with everything that another worker needs to continue them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from plimsoll_engine.frontend.requests.adapter_registry import RegisteredAdapter
from plimsoll_engine.frontend.requests.detokenize import Detokenizer, StopMatcher
from plimsoll_engine.frontend.requests.prompt_scores import PromptScores
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.worker_ipc import (
    FirstTokenStatistics,
    Logprobs,
    Media,
    Sampling,
    Submit,
)

# An 8-byte slot of a list and an integer object.
BYTES_PER_TOKEN = 8 + sys.getsizeof(1 << 20)
# A piece of text in a list, without its characters.
BYTES_PER_PIECE = 8 + sys.getsizeof("")
# Memory as an object or as JSON, measured in tests/unit/engine/frontend/test_request_log.py.
BYTES_PER_LOGPROB = 100


class QueueFullError(Exception):
    """The limit of unanswered requests is reached."""


class RequestFailedError(Exception):
    """A request ended with an error.

    Attributes:
        reason: ``invalid`` if the client can correct the request, ``unavailable`` if another
            replica can answer it, ``deadline``, or ``error``.
        param: Name of the invalid field.

    """

    def __init__(self, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.param = param


class TokenLogprobs(NamedTuple):
    """Log probabilities of one output token.

    ``offset`` is the number of output characters before the token. ``shown`` is False for a token
    that adds no text, such as a stop token.
    """

    token_id: int
    logprobs: Logprobs
    offset: int = 0
    shown: bool = True


class Delta(NamedTuple):
    """New output of a request since the previous delta.

    Attributes:
        finish_reason: ``stop`` or ``length`` in the last delta, otherwise None.
        logprobs, token_ids: Entries for all new tokens, including those without text.
        stop_reason: Stop string or stop token that ended the output.

    """

    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprobs]
    token_ids: Sequence[int] = ()
    stop_reason: str | int | None = None


class StopRules(NamedTuple):
    """Stop strings of a request.

    If ``include`` is True, the text includes the stop string or stop token that ended it.
    """

    stops: Sequence[str] = ()
    include: bool = False


NO_STOP_RULES = StopRules()


@dataclass(frozen=True, slots=True)
class Admission:
    """Scheduling parameters of a request, as in :class:`.worker_ipc.Submit`."""

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    cache_salt: str = ""
    adapter: RegisteredAdapter | None = None


@dataclass(slots=True)
class RequestTimes:
    """Times of a request, in monotonic seconds."""

    arrived: float
    last_token: float | None = None


class Generation:
    """One choice of a running request."""

    __slots__ = (
        "__weakref__",
        "_characters",
        "_closed_at",
        "_detokenizer",
        "_error",
        "_include",
        "_logprobs",
        "_pending",
        "_searched",
        "_shown",
        "_stops",
        "_taken",
        "admission",
        "answer_bytes",
        "attempt",
        "ended",
        "finish_reason",
        "losses",
        "media",
        "output_ids",
        "parked",
        "prompt_ids",
        "request_id",
        "sampling",
        "scores",
        "started",
        "stop_reason",
        "times",
        "wake",
        "with_worker",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: Sampling,
        detokenizer: Detokenizer,
        text: StopRules = NO_STOP_RULES,
        admission: Admission = Admission(),
        wake: asyncio.Event | None = None,
        media: Sequence[Media] = (),
    ) -> None:
        """Create a generation. All choices of a request share the event ``wake``."""
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.media = list(media)
        self.admission = admission
        self.output_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.parked = False
        self.with_worker = False  # the serving worker has received the request and has not ended it
        # Workers that crashed while they ran the request, since its last token.
        self.losses = 0
        # Number of the request's latest submission.
        self.attempt = 0
        self.times = RequestTimes(arrived=time.monotonic())
        self.started: FirstTokenStatistics | None = None
        self._detokenizer = detokenizer
        self._characters = 0  # of the text, including text that a stop string may still remove
        self._shown = 0  # characters of the text that no stop string can remove
        self._stops = StopMatcher(text.stops, text.include)
        self._include = text.include
        self._pending: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        # Size of the text and log probabilities that the client has not received yet.
        self.answer_bytes = 0
        most = sampling.prompt_logprobs
        # None if the client did not request scores of the prompt.
        self.scores = None if most is None else PromptScores(len(prompt_ids), most)
        self._searched = 0
        self._closed_at: int | None = None
        # Number of output tokens that :meth:`take` has returned.
        self._taken = 0
        self._error: tuple[str, str, str | None] | None = None
        self.wake = asyncio.Event() if wake is None else wake
        self.ended = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        """Whether the generation ended with an error."""
        return self._error is not None

    @property
    def is_done(self) -> bool:
        """Whether the generation ended, with or without an error."""
        return self.finish_reason is not None or self._error is not None

    def push(
        self, token_id: int, finish_reason: str | None, logprobs: Logprobs | None = None
    ) -> None:
        """Add a token from the worker. End the request if the text contains a stop string."""
        if self.is_done:
            return
        self.output_ids.append(token_id)
        is_stop_token = finish_reason == "stop" and token_id in self.sampling.stop_token_ids
        if is_stop_token:
            self.stop_reason = token_id
        piece, stopped, offset = "", False, self._characters
        shown = self._include or not is_stop_token  # as in vLLM, a stop token is not text
        if shown:
            # Bytes of an unfinished character are text that precedes the text of this token.
            before = "" if logprobs is None else self._detokenizer.finish()
            shown = self._detokenizer.has_text(token_id)
            piece = self._detokenizer.push(token_id)
            self._characters += len(piece)
            if len(piece) > len(before) and piece.startswith(before):
                offset += len(before)
        if logprobs is not None:
            self._logprobs.append(TokenLogprobs(token_id, logprobs, offset, shown))
            self.answer_bytes += (1 + len(logprobs.top)) * BYTES_PER_LOGPROB
        if len(self.output_ids) > self.sampling.min_tokens:
            piece, stopped = self._stops.push(piece)
        if not stopped and finish_reason is not None:
            remaining, stopped = self._stops.push(self._detokenizer.finish())
            piece += remaining if stopped else remaining + self._stops.finish()
        self.finish_reason = "stop" if stopped else finish_reason
        self._shown += len(piece)
        if stopped:
            self.stop_reason = self._stops.matched_stop
            self._logprobs = [
                entry
                if entry.offset < self._shown
                else entry._replace(offset=self._shown, shown=False)
                for entry in self._logprobs
            ]
        if piece:
            self._pending.append(piece)
            self.answer_bytes += BYTES_PER_PIECE + len(piece)
        if piece or self.is_done:
            self.wake.set()
        if self.is_done:
            self.ended.set()

    def add_scores(self, message: worker_ipc.PromptScores) -> None:
        """Add scores of the prompt from a worker."""
        if self.scores is not None:
            self.scores.add(message)

    def fail(self, error: RequestFailedError) -> None:
        """End the request with an error, unless it has already ended."""
        if not self.is_done:
            self._error = (error.reason, str(error), error.param)
            self.wake.set()
            self.ended.set()

    def take(self, streamed: bool = True) -> Delta | None:
        """Return the output since the last call; None if there is none. Raises RequestFailedError.

        If ``streamed`` is False, the output still counts in :attr:`answer_bytes`.
        """
        if self._error is not None:
            # A stored exception would keep this frame, and so this request, in memory.
            raise RequestFailedError(*self._error)
        if not self._pending and not self.is_done:
            return None
        new = self.output_ids[self._taken :]
        text, logprobs, held_back = "".join(self._pending), self._logprobs, list[TokenLogprobs]()
        if (
            not self.is_done and self._stops.held_text
        ):  # a stop string may still remove these tokens
            certain = sum(entry.offset < self._shown for entry in logprobs)
            logprobs, held_back = logprobs[:certain], logprobs[certain:]
        delta = Delta(text, self.finish_reason, logprobs, new, self.stop_reason)
        self._taken += len(new)
        self._pending.clear()
        self._logprobs = held_back
        if streamed:
            self.answer_bytes = 0
        return delta

    @property
    def computed_tokens(self) -> int:
        """Number of tokens that the worker has computed; 0 before the first output token."""
        # The worker computes the latest output token in the next step.
        return len(self.prompt_ids) + len(self.output_ids) - 1 if self.output_ids else 0

    def count_tokens_before(self, end_token: int) -> int:
        """Return the number of output tokens before the first ``end_token``, or of all without one.

        Every call must have the same ``end_token``.
        """
        if self._closed_at is None and end_token in self.output_ids[self._searched :]:
            self._closed_at = self.output_ids.index(end_token, self._searched)
        self._searched = len(self.output_ids)
        return self._searched if self._closed_at is None else self._closed_at

    def create_submission(self) -> Submit:
        """Return the message that makes a worker run or continue the request, as a new attempt."""
        self.attempt += 1
        sampling = self.sampling
        if self.scores is not None and self.scores.is_complete:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Submit(
            self.request_id,
            self.prompt_ids,
            sampling,
            list(self.output_ids),
            priority=self.admission.priority,
            tenant=self.admission.tenant,
            arrived=self.times.arrived,
            deadline_s=self.admission.deadline_s,
            cache_salt=self.admission.cache_salt,
            media=self.media,
            adapter=0 if self.admission.adapter is None else self.admission.adapter.number,
            attempt=self.attempt,
        )


class RequestLog:
    """Log of the requests that are admitted and not yet released, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._running: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._running)

    def admit(self, *generations: Generation) -> None:
        """Admit all ``generations``, or raise QueueFullError if they exceed the capacity."""
        if len(self._running) + len(generations) > self.capacity:
            raise QueueFullError(
                f"{len(self._running)} requests are unanswered, and {len(generations)} more would "
                f"exceed the limit of {self.capacity} (--max-queued): retry later"
            )
        for generation in generations:
            self._running[generation.request_id] = generation

    def get(self, request_id: str) -> Generation | None:
        """Return the generation ``request_id``; None if it was released."""
        return self._running.get(request_id)

    def release(self, request_id: str) -> Generation | None:
        """Remove and return the generation ``request_id``; None if it was already released."""
        return self._running.pop(request_id, None)

    def list_unfinished(self) -> list[Generation]:
        """Return the generations that have not ended, oldest first."""
        return [generation for generation in self._running.values() if not generation.is_done]

    def list_carried_over(self) -> list[Generation]:
        """Return the unfinished generations that are not parked, oldest first."""
        return [generation for generation in self.list_unfinished() if not generation.parked]

    def list_adapters(self) -> list[RegisteredAdapter]:
        """Return the adapter of each running request that uses one, with repetitions."""
        adapters = (generation.admission.adapter for generation in self._running.values())
        return [adapter for adapter in adapters if adapter is not None]

    def fail_all(self, reason: str, message: str) -> None:
        """Fail all unfinished requests with the same error."""
        for generation in self.list_unfinished():
            generation.fail(RequestFailedError(reason, message))

    def count_bytes(self) -> int:
        """Return the bytes of tokens, unsent output, prompt scores and lists of allowed tokens."""
        running = self._running.values()
        # Choices share their prompt.
        shared = {id(g.prompt_ids): len(g.prompt_ids) for g in running}
        allowed = (g.sampling.allowed_token_ids for g in running)
        shared |= {id(ids): len(ids) for ids in allowed if ids is not None}
        tokens = sum(shared.values()) + sum(len(g.output_ids) for g in running)
        scores = sum(g.scores.nbytes for g in running if g.scores is not None)
        return BYTES_PER_TOKEN * tokens + scores + sum(g.answer_bytes for g in running)

    def count_media_bytes(self) -> int:
        """Return the bytes of image and audio tensors, including those in the processor cache."""
        media = {id(m.data): len(m.data or b"") for g in self._running.values() for m in g.media}
        return sum(media.values())
