"""One request's way through the engine to its client: admitted, answered, released.

The admission is inside the response, so that a request that was admitted is released whatever
happens: an answer, an error, a client that leaves at any moment, a cancelled task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plimsoll_engine.api import errors
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.body import client_key, wait_disconnect
from plimsoll_engine.api.chat_choice import ChatChoice
from plimsoll_engine.api.error_response import error_response
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.prompt_logprobs import PromptLogprobs
from plimsoll_engine.api.responses import DONE, Choice, Envelope, event, usage
from plimsoll_engine.frontend.async_engine import AsyncEngine, NotServing
from plimsoll_engine.frontend.requests.request_log import Delta, QueueFull, RequestFailed
from plimsoll_engine.http.budget import BodyBudget, OverBudget

log = logging.getLogger(__name__)


UNREAD = "the text has what begins like a tool call and is none that can be read"


def error_body(status: int, message: str, code: str) -> bytes:
    """Return the body of an error that is answered before there is a request."""
    return ApiError(status, message, code=code).body()


async def overloaded(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request over a connection that is one too many."""
    error = ApiError(
        503, "the engine has reached its limit of connections (--max-connections): try again",
        code="too_many_connections", retry=True,
    )  # fmt: skip
    response = error_response(error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


class Answer(Response):
    """An ASGI response that runs the generations of ``asked``; each is one of ``choices``."""

    def __init__(
        self,
        engine: AsyncEngine,
        batch: Batch,
        choices: Sequence[Choice],
        *,
        stream: bool,
        usage: bool,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._batch = batch
        self._choices = choices
        self._envelope = Envelope(batch.model, batch.request_id)
        self._stream = stream
        self._usage = usage
        self.continuous = False
        """Whether each chunk of the stream has the usage so far."""
        self.prompt_ids: Sequence[int] | None = None
        """The tokens of a chat's prompt, where the answer is to name them."""
        self.reasoning_end: int | None = None
        """The token that ends the reasoning, where the usage is to count it."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """Where something is to be said of the prompts' tokens."""
        self.echoes_alone = False
        """Whether the answer leaves out the tokens of its choices."""
        self.warnings: Sequence[str] = ()
        """Headers that tell what became of the request."""
        self._begun = False
        self._failure: ApiError | None = None
        """Of a choice of a stream whose others went on."""
        self._sent = [0] * len(batch.generations)
        """How many tokens of each choice the stream has sent."""
        self._answers: BodyBudget
        self._client: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generations and send what they give, whole or as a stream.

        A client that leaves ends them.
        """
        self._answers = scope["app"].state.answers
        self._client = client_key(Request(scope))
        try:
            with self._engine.running(*self._batch.generations):
                await self._until_disconnected(receive, send)
        except (ApiError, NotServing, QueueFull, RequestFailed) as error:
            await self._fail(errors.from_exception(error), scope, receive, send)
        except Exception:
            if not self._begun:
                raise  # the application answers it with a 500
            log.exception("a stream failed", extra={"request": self._batch.request_id})
            message = "internal error; see the engine's log"
            bug = ApiError(500, message, code="internal_error")
            await self._fail(bug, scope, receive, send)

    async def _until_disconnected(self, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._stream_to(send) if self._stream else self._once(send))
        leaving = asyncio.create_task(wait_disconnect(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            # Both end, whatever one of them raises; what the answer raised was raised above.
            await asyncio.gather(answering, leaving, return_exceptions=True)
            # A failed task holds its exception, whose traceback holds this frame: no cycle is left.
            del answering, leaving

    async def _next(self, open_choices: set[int]) -> list[tuple[Choice, Delta]]:
        """Return what is new, as soon as there is any; choices that end leave ``open_choices``.

        One that fails in a stream leaves them, too: the others go on, and the stream's end tells.
        """
        wake = self._batch.wake
        while True:
            new = []
            for number in sorted(open_choices):
                try:
                    delta = self._batch.generations[number].take(self._stream)
                except RequestFailed as error:
                    open_choices.discard(number)
                    if not self._begun or not open_choices:
                        raise
                    self._failure = self._failure or errors.from_exception(error)
                    continue
                if delta is None:
                    continue
                new.append((self._choices[number], delta))
                if delta.finish_reason is not None:
                    open_choices.discard(number)
            if new:
                return new
            wake.clear()
            await wake.wait()

    async def _stream_to(self, send: Send) -> None:
        open_choices = set(range(len(self._choices)))
        new = await self._next(open_choices)
        # Only now: an error before the first text has a status of its own.
        await self._start(send, b"text/event-stream; charset=utf-8")
        for piece in self.opening():
            await _more(send, piece)
        while True:
            for choice, delta in new:
                for piece in self.pieces(choice, delta):
                    await _more(send, piece)
            if not open_choices:
                break
            new = await self._next(open_choices)
        if self._failure is not None:
            await self._break_off(send, self._failure)
            return
        await self._end(send)

    def opening(self) -> Iterator[bytes]:
        """Yield the events that a stream begins with."""
        more = {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids}
        for one in self._choices:
            if (first := one.first()) is not None:
                yield self._chunk([first], more)
                more = {}

    def pieces(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        """Yield the events for ``delta`` of ``choice``."""
        self._sent[choice.index] += len(delta.token_ids)
        for chunk in choice.chunks(delta):
            yield self._chunk([chunk])

    async def _end(self, send: Send) -> None:
        usage = self._chunk([], self._usage_body()) if self._usage else b""
        await last(send, usage + DONE)

    def _chunk(
        self, choices: list[dict[str, Any]], more: Mapping[str, object] = MappingProxyType({})
    ) -> bytes:
        body = self._envelope.around(self._choices[0].chunk_kind, choices) | dict(more)
        return event(body | self._usage_body(self._sent) if self.continuous else body)

    async def _once(self, send: Send) -> None:
        open_choices = set(range(len(self._choices)))
        while open_choices:
            for choice, delta in await self._next(open_choices):
                self.collect(choice, delta)
        self.warnings = [*self.warnings, *dict.fromkeys(self.unread())]
        if self.prompt_logprobs is not None:
            await self.prompt_logprobs.attach(self._batch, self._choices)
        encoded = self.encoded()
        with self.reserved(len(encoded)):
            await self._start(send, self.whole_type)
            await last(send, encoded)

    @contextlib.contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Count ``size`` bytes that wait for their client; ApiError where there is no room."""
        with self._answers.open(self._client) as reservation:
            try:
                reservation.reserve(size)
            except OverBudget as error:
                raise _unread(error.client) from None
            reservation.add_held(size)
            yield

    whole_type = b"application/json"

    def collect(self, choice: Choice, delta: Delta) -> None:
        """Take in what is new of an answer in one piece."""
        choice.add(delta)

    def unread(self) -> list[str]:
        """Return what the client should know of an answer in one piece."""
        return [UNREAD for one in self._choices if isinstance(one, ChatChoice) and one.unread]

    def encoded(self) -> bytes:
        """Return the body of an answer in one piece."""
        wholes = [choice.whole() for choice in self._choices]
        body = self._envelope.around(self._choices[0].kind, wholes) | self._usage_body()
        if isinstance(self._choices[0], ChatChoice):
            body["prompt_token_ids"] = self.prompt_ids
            body["prompt_logprobs"] = self._choices[0].prompt_logprobs
        return msgspec.json.encode(body)

    def _usage_body(self, sent: Sequence[int] | None = None) -> dict[str, object]:
        if self.echoes_alone:
            sent = [0] * len(self._sent)
        return {"usage": usage(self._batch.generations, self._batch.n, self.reasoning_end, sent)}

    async def _start(self, send: Send, media_type: bytes) -> None:
        headers = [(b"content-type", media_type), (b"cache-control", b"no-cache")]
        headers += [(b"x-plimsoll-warning", one.encode()) for one in self.warnings]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._begun = True

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._begun:
            await error_response(error)(scope, receive, send)
            return
        await self._break_off(send, error)

    async def _break_off(self, send: Send, error: ApiError) -> None:
        """End a stream with an event of ``error``: its status is gone out."""
        self._engine.metrics.count_stream_error()
        await last(send, self.failed(error))

    def failed(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""
        return b"data: " + error.body() + b"\n\n" + DONE


def _unread(by_client: bool) -> ApiError:
    """Return whether the answer has no room beside those that clients have not read yet."""
    if by_client:
        return ApiError(
            429, "answers to your other requests are unread: read them, or request less at once",
            code="too_many_bytes", retry=True,
        )  # fmt: skip
    return ApiError(
        503, "unread answers of other clients take all the memory reserved for answers: try again",
        code="overloaded", retry=True,
    )  # fmt: skip


async def _more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def last(send: Send, body: bytes) -> None:
    """Send the end of an answer."""
    await send({"type": "http.response.body", "body": body, "more_body": False})
