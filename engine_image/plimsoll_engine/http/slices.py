"""ASGI middleware that sends response bodies in slices, to limit the write buffer of a connection.

uvicorn passes a body to the socket in one piece, whatever its size. It waits for the client only
before the next piece.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SLICE_BYTES = 64 << 10
WAITING_BYTES = 2 * SLICE_BYTES + (16 << 10)
"""Maximum size of a write buffer: a slice, uvicorn's high-water mark of 64 KiB, and headers."""


class SlicedResponses:
    """ASGI application whose responses are sent in slices of :data:`SLICE_BYTES`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application. Each slice is sent after the client has read the preceding one."""

        async def sliced(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= SLICE_BYTES:
                await send(message)
                return
            for start in range(0, len(body), SLICE_BYTES):
                end = start + SLICE_BYTES
                more = end < len(body) or message.get("more_body", False)
                await send({**message, "body": body[start:end], "more_body": more})

        await self._app(scope, receive, sliced)
