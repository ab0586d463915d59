"""One request's way through the engine to its client: admitted, answered, released.

The admission is inside the response, so that a request that was admitted is released whatever
happens: an answer, an error, a client that leaves at any moment, a cancelled task.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plimsoll_engine.api import errors
from plimsoll_engine.api.errors import ApiError
from plimsoll_engine.api.shapes import DONE, Shape, event
from plimsoll_engine.frontend.engine import Engine, NotServing
from plimsoll_engine.frontend.requests import Generation, QueueFull, RequestFailed


def error_response(error: ApiError) -> Response:
    return Response(
        error.body(), error.status, headers=error.headers(), media_type="application/json"
    )


class Answer(Response):
    """An ASGI response that runs ``generation``."""

    def __init__(
        self, engine: Engine, generation: Generation, *, chat: bool, stream: bool, usage: bool
    ) -> None:
        super().__init__()
        self._engine = engine
        self._generation = generation
        self._shape = Shape(engine.settings.served_model_name, generation, chat)
        self._stream = stream
        self._usage = usage
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._engine.running(self._generation):
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

    async def _stream_to(self, send: Send) -> None:
        delta = await self._generation.delta()
        # Only now: an error before the first text has a status of its own.
        await self._start(send, b"text/event-stream; charset=utf-8")
        first = self._shape.first()
        if first is not None:
            await _more(send, event(first))
        while True:
            if delta.text or delta.finish_reason is not None:
                await _more(send, event(self._shape.delta(delta.text, delta.finish_reason)))
            if delta.finish_reason is not None:
                break
            delta = await self._generation.delta()
        if self._usage:
            await _more(send, event(self._shape.usage_chunk(self._generation)))
        await _last(send, DONE)

    async def _once(self, send: Send) -> None:
        texts: list[str] = []
        while True:
            text, finish_reason = await self._generation.delta()
            texts.append(text)
            if finish_reason is not None:
                break
        body = msgspec.json.encode(self._shape.whole("".join(texts), self._generation))
        await self._start(send, b"application/json")
        await _last(send, body)

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
