"""ASGI middleware that sends response bodies in slices, to limit the write buffer.

uvicorn writes the whole body of a message before it waits for the client.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_SLICE_BYTES = 64 << 10
# A slice, uvicorn's high-water mark of 64 KiB, and headers.
MAX_WRITE_BUFFER_BYTES = 2 * MAX_SLICE_BYTES + (16 << 10)


class SlicedResponses:
    """ASGI middleware that sends response bodies in slices of :data:`MAX_SLICE_BYTES`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each slice of the response once the client has read the previous one."""

        async def send_slices(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= MAX_SLICE_BYTES:
                await send(message)
                return
            for start in range(0, len(body), MAX_SLICE_BYTES):
                end = start + MAX_SLICE_BYTES
                more = end < len(body) or message.get("more_body", False)
                await send({**message, "body": body[start:end], "more_body": more})

        await self._app(scope, receive, send_slices)
