"""One request's way through the engine to its client: admitted, answered, released.

The admission is inside the response, so that a request that was admitted is released whatever
happens: an answer, an error, a client that leaves at any moment, a cancelled task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plimsoll_engine.api import errors
from plimsoll_engine.api.build import Asked
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.shapes import DONE, Choice, Envelope, event, usage
from plimsoll_engine.frontend.engine import Engine, NotServing
from plimsoll_engine.frontend.requests import Delta, QueueFull, RequestFailed


def error_response(error: ApiError) -> Response:
    return Response(
        error.body(), error.status, headers=error.headers(), media_type="application/json"
    )


class Answer(Response):
    """An ASGI response that runs the generations of ``asked``; each is one of ``choices``."""

    def __init__(
        self,
        engine: Engine,
        asked: Asked,
        choices: Sequence[Choice],
        *,
        stream: bool,
        usage: bool,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._asked = asked
        self._choices = choices
        self._envelope = Envelope(asked.model, asked.request_id)
        self._stream = stream
        self._usage = usage
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._engine.running(*self._asked.generations):
                await self._until_disconnected(receive, send)
        except (NotServing, QueueFull, RequestFailed) as error:
            await self._fail(errors.of(error), scope, receive, send)

    async def _until_disconnected(self, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._stream_to(send) if self._stream else self._once(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RequestFailed, OSError):
                    await task
            # A failed task holds its exception, whose traceback holds this frame: no cycle is left.
            del answering, leaving, task

    async def _next(self, open_choices: set[int]) -> list[tuple[Choice, Delta]]:
        """What is new, as soon as there is any; choices that end leave ``open_choices``."""
        wake = self._asked.wake
        while True:
            new = []
            for number in sorted(open_choices):
                delta = self._asked.generations[number].take()
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
        kind = self._choices[0].chunk_kind
        for one in self._choices:
            if (first := one.first()) is not None:
                await _more(send, event(self._envelope.around(kind, [first])))
        while True:
            for choice, delta in new:
                for chunk in choice.chunks(delta):
                    await _more(send, event(self._envelope.around(kind, [chunk])))
            if not open_choices:
                break
            new = await self._next(open_choices)
        if self._usage:
            await _more(send, event(self._envelope.around(kind, []) | self._usage_body()))
        await _last(send, DONE)

    async def _once(self, send: Send) -> None:
        open_choices = set(range(len(self._choices)))
        while open_choices:
            for choice, delta in await self._next(open_choices):
                choice.add(delta)
        encoded = self.encoded([choice.whole() for choice in self._choices])
        await self._start(send, self.whole_type)
        await _last(send, encoded)

    whole_type = b"application/json"

    def encoded(self, wholes: list[dict[str, Any]]) -> bytes:
        """The body of an answer in one piece."""
        body = self._envelope.around(self._choices[0].kind, wholes) | self._usage_body()
        return msgspec.json.encode(body)

    def _usage_body(self) -> dict[str, object]:
        return {"usage": usage(self._asked.generations, self._asked.n)}

    async def _start(self, send: Send, media_type: bytes) -> None:
        headers = [(b"content-type", media_type), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._begun = True

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._begun:
            await error_response(error)(scope, receive, send)
            return
        # The status is gone out; clients read an error event as the stream's failure.
        await _last(send, b"data: " + error.body() + b"\n\n")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _last(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})
