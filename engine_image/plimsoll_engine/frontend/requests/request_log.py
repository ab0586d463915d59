"""The request log: all that is needed to go on with a running request in another worker.

A request is in the log from its admission to its one :meth:`RequestLog.release`, whatever its end.
It holds tokens and text state and nothing that holds it, so it dies by reference counting alone.
"""

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
from plimsoll_engine.messages.worker_ipc import Logprobs, Media, Sampling, Started, Submit

TOKEN_BYTES = 8 + sys.getsizeof(1 << 20)
"""A list slot and, above the small integers, an object."""
PIECE_BYTES = 8 + sys.getsizeof("")
LOGPROB_BYTES = 100
"""One log probability that a client has not got yet, as an object or as JSON (``tests/unit/engine/
frontend/test_request_log.py``)."""


class QueueFull(Exception):
    """The engine holds as many unanswered requests as it may."""


class RequestFailed(Exception):
    """A request that ended with an error.

    ``reason`` is ``invalid`` where the client can cure it (``param`` names the field),
    ``unavailable`` where another replica can answer, ``deadline`` where the request's own has
    passed, ``error`` otherwise.
    """

    def __init__(self, reason: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.param = param


class TokenLogprobs(NamedTuple):
    """A token with the log probabilities of its place.

    ``offset`` is the number of characters of the text before the token's. A token that is not
    ``shown`` has no text there, as one that ends it.
    """

    token_id: int
    logprobs: Logprobs
    offset: int = 0
    shown: bool = True


class Delta(NamedTuple):
    """New text of a stream; ``finish_reason`` is ``stop`` or ``length`` on the last one.

    ``token_ids`` are all tokens since the last one. So are those of the log probabilities, where
    they were asked for. ``stop_reason`` is the stop string or the stop token that ended the text.
    """

    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprobs]
    token_ids: Sequence[int] = ()
    stop_reason: str | int | None = None


class TextRules(NamedTuple):
    """Where a text ends: ``include`` keeps what ended it, a stop string or a stop token."""

    stops: Sequence[str] = ()
    include: bool = False


ENDS_NOWHERE = TextRules()


@dataclass(frozen=True, slots=True)
class Admission:
    """How a request takes its turn.

    The fields are those of :class:`plimsoll_engine.messages.worker_ipc.Submit`.
    """

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    cache_salt: str = ""
    adapter: RegisteredAdapter | None = None


@dataclass(slots=True)
class Times:
    """Monotonic seconds."""

    arrived: float
    last_token: float | None = None


class Generation:
    """One running request."""

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
        text: TextRules = ENDS_NOWHERE,
        admission: Admission = Admission(),
        wake: asyncio.Event | None = None,
        media: Sequence[Media] = (),
    ) -> None:
        """Begin a generation.

        ``wake`` is set when there is something to :meth:`take`; the choices of one answer share it.
        """
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.media = list(media)
        self.admission = admission
        self.output_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.parked = False
        self.with_worker = False  # the present worker was given it and has not ended it
        self.losses = 0
        """Workers that ended while they computed it, since its last token."""
        self.attempt = 0
        """The number of its last submission."""
        self.times = Times(arrived=time.monotonic())
        self.started: Started | None = None
        self._detokenizer = detokenizer
        self._characters = 0  # of the text, with what a stop string may still cut
        self._stops = StopMatcher(text.stops, text.include)
        self._include = text.include
        self._pending: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self.answer_bytes = 0
        """Memory of text and log probabilities that its client has not got yet."""
        most = sampling.prompt_logprobs
        self.scores = None if most is None else PromptScores(len(prompt_ids), most)
        """Of the prompt's tokens, where they were asked for."""
        self._searched = 0
        self._closed_at: int | None = None
        self._taken = 0
        """How many of its tokens were taken."""
        self._error: tuple[str, str, str | None] | None = None
        self.wake = asyncio.Event() if wake is None else wake
        self.ended = asyncio.Event()

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    @property
    def done(self) -> bool:
        """Whether it ended, well or with an error."""
        return self.finish_reason is not None or self._error is not None

    def push(
        self, token_id: int, finish_reason: str | None, logprobs: Logprobs | None = None
    ) -> None:
        """Take in a token of the worker. A stop string ends the request before the worker does."""
        if self.done:
            return
        self.output_ids.append(token_id)
        ends = finish_reason == "stop" and token_id in self.sampling.stop_token_ids
        if ends:
            self.stop_reason = token_id
        piece, stopped, offset = "", False, self._characters
        shown = self._include or not ends  # as in vLLM a stop token is no text
        if shown:
            # Bytes that no character follows are text before the token's own.
            before = "" if logprobs is None else self._detokenizer.finish()
            shown = self._detokenizer.shows(token_id)
            piece = self._detokenizer.push(token_id)
            self._characters += len(piece)
            if len(piece) > len(before) and piece.startswith(before):
                offset += len(before)
        if logprobs is not None:
            self._logprobs.append(TokenLogprobs(token_id, logprobs, offset, shown))
            self.answer_bytes += (1 + len(logprobs.top)) * LOGPROB_BYTES
        if len(self.output_ids) > self.sampling.min_tokens:
            piece, stopped = self._stops.push(piece)
        if not stopped and finish_reason is not None:
            rest, stopped = self._stops.push(self._detokenizer.finish())
            piece += rest if stopped else rest + self._stops.finish()
        self.finish_reason = "stop" if stopped else finish_reason
        if stopped:
            self.stop_reason = self._stops.found
        if piece:
            self._pending.append(piece)
            self.answer_bytes += PIECE_BYTES + len(piece)
        if piece or self.done:
            self.wake.set()
        if self.done:
            self.ended.set()

    def score(self, message: worker_ipc.PromptScores) -> None:
        """Take in what a worker says of the prompt."""
        if self.scores is not None:
            self.scores.add(message)

    def fail(self, error: RequestFailed) -> None:
        """End the request with an error; one that has ended already stays as it is."""
        if not self.done:
            self._error = (error.reason, str(error), error.param)
            self.wake.set()
            self.ended.set()

    def take(self, streamed: bool = True) -> Delta | None:
        """Return what is new since the last call; None for nothing.

        Where it is not ``streamed``, it counts as memory until the answer is whole. Raises
        :class:`RequestFailed`.
        """
        if self._error is not None:
            # A new one each time: one that is kept would hold this frame, and so this request.
            raise RequestFailed(*self._error)
        if not self._pending and not self.done:
            return None
        new = self.output_ids[self._taken :]
        text = "".join(self._pending)
        delta = Delta(text, self.finish_reason, self._logprobs, new, self.stop_reason)
        self._taken += len(new)
        self._pending.clear()
        self._logprobs = []
        if streamed:
            self.answer_bytes = 0
        return delta

    @property
    def computed_tokens(self) -> int:
        """Tokens that a worker had computed for its last one; 0 before the first one."""
        return len(self.prompt_ids) + len(self.output_ids) - 1 if self.output_ids else 0

    def tokens_before(self, last: int) -> int:
        """Return how many tokens come before the first ``last``, always the same one.

        All of them where there is none. Each token is looked at once.
        """
        if self._closed_at is None and last in self.output_ids[self._searched :]:
            self._closed_at = self.output_ids.index(last, self._searched)
        self._searched = len(self.output_ids)
        return self._searched if self._closed_at is None else self._closed_at

    def submission(self) -> Submit:
        """Return what a worker must know to go on from here, as a new attempt.

        Tokens of an earlier one are none of its own.
        """
        self.attempt += 1
        sampling = self.sampling
        if self.scores is not None and self.scores.complete:
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
    """Every request that was admitted and not yet released, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._running: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._running)

    def admit(self, *generations: Generation) -> None:
        """All of them or, with :class:`QueueFull`, none."""
        if len(self._running) + len(generations) > self.capacity:
            raise QueueFull(
                f"{len(self._running)} requests wait for an answer and {len(generations)} more are "
                f"over the most, {self.capacity} (--max-queued)"
            )
        for generation in generations:
            self._running[generation.request_id] = generation

    def get(self, request_id: str) -> Generation | None:
        """Return the running generation of that id; None where it has been released."""
        return self._running.get(request_id)

    def release(self, request_id: str) -> Generation | None:
        """Return the one end of a request; None where it was released before."""
        return self._running.pop(request_id, None)

    def unfinished(self) -> list[Generation]:
        """Return the generations that have not ended, oldest first."""
        return [generation for generation in self._running.values() if not generation.done]

    def to_resubmit(self) -> list[Generation]:
        """Return every unfinished request with its tokens so far, oldest first.

        This is the carry-over; parked ones stay parked.

        The next worker makes again what a dead one had made and not sent: token i depends on the
        tokens before it and on (seed, i) alone, so the client sees one text.
        """
        return [generation for generation in self.unfinished() if not generation.parked]

    def adapters(self) -> list[RegisteredAdapter]:
        """Return the adapter of each request which has one."""
        found = (generation.admission.adapter for generation in self._running.values())
        return [adapter for adapter in found if adapter is not None]

    def fail_all(self, reason: str, message: str) -> None:
        """End all of them with the same error."""
        for generation in self.unfinished():
            generation.fail(RequestFailed(reason, message))

    def bytes(self) -> int:
        """Memory of the tokens held, and of what is known of their answers.

        With the log probabilities of prompts, and the lists of allowed tokens.
        """
        running = self._running.values()
        # Choices share theirs.
        shared = {id(g.prompt_ids): len(g.prompt_ids) for g in running}
        allowed = (g.sampling.allowed_token_ids for g in running)
        shared |= {id(one): len(one) for one in allowed if one is not None}
        tokens = sum(shared.values()) + sum(len(g.output_ids) for g in running)
        scores = sum(g.scores.nbytes for g in running if g.scores is not None)
        return TOKEN_BYTES * tokens + scores + sum(g.answer_bytes for g in running)

    def media_bytes(self) -> int:
        """Return the bytes of the tensors of images and sounds, each counted once.

        Those that the processor cache holds as well are counted there too.
        """
        media = {id(m.data): len(m.data or b"") for g in self._running.values() for m in g.media}
        return sum(media.values())
