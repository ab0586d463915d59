"""Response to a generation request, as one body or as a stream.

The response admits the request when it starts, and releases it when it ends for any reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plimsoll_engine.api import errors
from plimsoll_engine.api.batch import Batch
from plimsoll_engine.api.body import get_client_key, wait_for_disconnect
from plimsoll_engine.api.chat_choice import ChatChoice
from plimsoll_engine.api.error_response import make_error_response
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.prompt_logprobs import PromptLogprobs
from plimsoll_engine.api.response_bodies import (
    DONE_EVENT,
    Choice,
    Envelope,
    encode_event,
    make_usage_object,
)
from plimsoll_engine.frontend.async_engine import AsyncEngine, NotServingError
from plimsoll_engine.frontend.requests.request_log import Delta, QueueFullError, RequestFailedError
from plimsoll_engine.http.budget import BodyBudget, BodyBudgetExceededError

log = logging.getLogger(__name__)


_UNSAFE_IN_HEADER_PATTERN = re.compile(r"[^ -~]")

UNPARSED_CALL_WARNING = "the output has a malformed tool call, which is returned as text"


def encode_error_body(status: int, message: str, code: str) -> bytes:
    """Return the body of an error response to a request that was not read."""
    return ApiError(status, message, code=code).encode_body()


async def refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer status 503 on a connection beyond the limit."""
    error = ApiError(
        503, "the engine has too many connections (--max-connections): retry later",
        code="too_many_connections", should_retry=True,
    )  # fmt: skip
    response = make_error_response(error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


class GenerationResponse(Response):
    """ASGI response that runs the generations of ``batch`` and sends their output.

    ``choices`` has one element for each generation.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        batch: Batch,
        choices: Sequence[Choice],
        *,
        stream: bool,
        include_usage: bool,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._batch = batch
        self._choices = choices
        self._envelope = Envelope(batch.model, batch.request_id)
        self._stream = stream
        self._usage = include_usage
        # Whether each chunk of the stream includes the usage so far.
        self.usage_in_chunks = False
        # Token IDs of a chat's prompt; None if the response omits them.
        self.prompt_ids: Sequence[int] | None = None
        # Token that ends the reasoning; None if reasoning tokens are not counted.
        self.reasoning_end: int | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        # Whether the response omits the generated tokens.
        self.echo_only = False
        # Sent to the client as headers.
        self.warnings: Sequence[str] = ()
        self._started = False
        # First error of a choice after the stream started.
        self._failure: ApiError | None = None
        # Number of tokens that the stream has sent for each choice.
        self._sent = [0] * len(batch.generations)
        self._budget: BodyBudget
        self._client: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generations, and send their output. Cancel them if the client disconnects."""
        self._budget = scope["app"].state.answers
        self._client = get_client_key(Request(scope))
        try:
            with self._engine.track_running(*self._batch.generations):
                await self._send_until_disconnect(receive, send)
        except (ApiError, NotServingError, QueueFullError, RequestFailedError) as error:
            await self._send_error(errors.convert_exception(error), scope, receive, send)
        except Exception:
            if not self._started:
                raise  # the application answers it with a 500
            log.exception(
                "the stream failed with an internal error",
                extra={"request": self._batch.request_id},
            )
            message = "internal error: see the engine's log"
            bug = ApiError(500, message, code="internal_error")
            await self._send_error(bug, scope, receive, send)

    async def _send_until_disconnect(self, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(
            self._send_stream(send) if self._stream else self._send_whole_response(send)
        )
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({answering, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, disconnected):
                task.cancel()
            # Wait for both tasks. An error of the answer was raised above.
            await asyncio.gather(answering, disconnected, return_exceptions=True)
            # Break the reference cycle of a failed task, its traceback and this frame.
            del answering, disconnected

    async def _get_next_deltas(self, open_choices: set[int]) -> list[tuple[Choice, Delta]]:
        # If a choice of a started stream fails, the other choices continue, and the stream ends
        # with the error.
        wake = self._batch.wake
        while True:
            new = []
            for number in sorted(open_choices):
                try:
                    delta = self._batch.generations[number].take(self._stream)
                except RequestFailedError as error:
                    open_choices.discard(number)
                    if not self._started or not open_choices:
                        raise
                    self._failure = self._failure or errors.convert_exception(error)
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

    async def _send_stream(self, send: Send) -> None:
        open_choices = set(range(len(self._choices)))
        new = await self._get_next_deltas(open_choices)
        # Send the status only now, because an error before the first output has another status.
        await self._send_headers(send, b"text/event-stream; charset=utf-8")
        for piece in self.make_first_events():
            await _send_part(send, piece)
        while True:
            for choice, delta in new:
                for piece in self.make_delta_events(choice, delta):
                    await _send_part(send, piece)
            if not open_choices:
                break
            new = await self._get_next_deltas(open_choices)
        if self._failure is not None:
            await self._end_with_error(send, self._failure)
            return
        await self._send_end_of_stream(send)

    def make_first_events(self) -> Iterator[bytes]:
        """Yield the first events of a stream."""
        more = {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids}
        for one in self._choices:
            if (first := one.make_first_chunk()) is not None:
                yield self._encode_chunk([first], more)
                more = {}

    def make_delta_events(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        """Yield the events for ``delta`` of ``choice``."""
        self._sent[choice.index] += len(delta.token_ids)
        for chunk in choice.make_chunks(delta):
            yield self._encode_chunk([chunk])

    async def _send_end_of_stream(self, send: Send) -> None:
        usage = self._encode_chunk([], self._make_usage_body()) if self._usage else b""
        await send_last_part(send, usage + DONE_EVENT)

    def _encode_chunk(
        self,
        choices: list[dict[str, Any]],
        extra_fields: Mapping[str, object] = MappingProxyType({}),
    ) -> bytes:
        body = self._envelope.wrap(self._choices[0].chunk_kind, choices) | dict(extra_fields)
        return encode_event(
            body | self._make_usage_body(self._sent) if self.usage_in_chunks else body
        )

    async def _send_whole_response(self, send: Send) -> None:
        open_choices = set(range(len(self._choices)))
        while open_choices:
            for choice, delta in await self._get_next_deltas(open_choices):
                self.collect(choice, delta)
        self.warnings = [*self.warnings, *dict.fromkeys(self.list_output_warnings())]
        if self.prompt_logprobs is not None:
            await self.prompt_logprobs.attach(self._batch, self._choices)
        encoded = self.encode_whole_response()
        with self.reserve(len(encoded)):
            await self._send_headers(send, self.media_type_whole)
            await send_last_part(send, encoded)

    @contextlib.contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        """Reserve memory for an unsent response until the context exits. Raises ApiError."""
        with self._budget.open_reservation(self._client) as reservation:
            try:
                reservation.reserve(size_bytes)
            except BodyBudgetExceededError as error:
                raise _make_no_memory_error(error.is_client_share) from None
            reservation.add_held(size_bytes)
            yield

    media_type_whole = b"application/json"

    def collect(self, choice: Choice, delta: Delta) -> None:
        """Add ``delta`` of ``choice`` to a response that is not streamed."""
        choice.add(delta)

    def list_output_warnings(self) -> list[str]:
        """Return the warnings about the output of a response that is not streamed."""
        return [
            UNPARSED_CALL_WARNING
            for c in self._choices
            if isinstance(c, ChatChoice) and c.has_unparsed_call
        ]

    def encode_whole_response(self) -> bytes:
        """Return the body of a response that is not streamed."""
        wholes = [choice.to_object() for choice in self._choices]
        body = self._envelope.wrap(self._choices[0].kind, wholes) | self._make_usage_body()
        if isinstance(self._choices[0], ChatChoice):
            body["prompt_token_ids"] = self.prompt_ids
            body["prompt_logprobs"] = self._choices[0].prompt_logprobs
        return msgspec.json.encode(body)

    def _make_usage_body(self, sent_tokens: Sequence[int] | None = None) -> dict[str, object]:
        if self.echo_only:
            sent_tokens = [0] * len(self._sent)
        return {
            "usage": make_usage_object(
                self._batch.generations, self._batch.n, self.reasoning_end, sent_tokens
            )
        }

    async def _send_headers(self, send: Send, media_type: bytes) -> None:
        headers = [(b"content-type", media_type), (b"cache-control", b"no-cache")]
        headers += make_warning_headers(self.warnings)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True

    async def _send_error(
        self, error: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._started:
            await make_error_response(error)(scope, receive, send)
            return
        await self._end_with_error(send, error)

    async def _end_with_error(self, send: Send, error: ApiError) -> None:
        # The status was already sent.
        self._engine.metrics.count_stream_error()
        await send_last_part(send, self.make_error_events(error))

    def make_error_events(self, error: ApiError) -> bytes:
        """Return the events that end a failed stream."""
        return b"data: " + error.encode_body() + b"\n\n" + DONE_EVENT


def make_warning_headers(warnings: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Return a header for each warning.

    Warnings repeat names from the body, and h11 refuses control characters and outer spaces.
    """
    return [
        (b"x-plimsoll-warning", _UNSAFE_IN_HEADER_PATTERN.sub("?", one).strip().encode())
        for one in warnings
    ]


def _make_no_memory_error(is_client_share: bool) -> ApiError:
    if is_client_share:
        return ApiError(
            429, "unread responses to your other requests have used up your share of memory: read"
            " them first", code="too_many_bytes", should_retry=True,
        )  # fmt: skip
    return ApiError(
        503, "unread responses to other clients have used up the memory for responses: retry later",
        code="overloaded", should_retry=True,
    )  # fmt: skip


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def send_last_part(send: Send, body: bytes) -> None:
    """Send the last part of a response body."""
    await send({"type": "http.response.body", "body": body, "more_body": False})
