"""Writes an answer slice by slice, so that what waits for a client in its connection is bounded.

uvicorn hands a body to the socket in one piece, whatever its size, and asks only before the next
one whether the client takes anything.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SLICE_BYTES = 64 << 10
WAITING_BYTES = 2 * SLICE_BYTES + (16 << 10)
"""The most that waits in a connection: a slice on top of uvicorn's high-water mark of 64 KiB, and
headers."""


class Slices:
    """An application whose answers leave in slices of :data:`SLICE_BYTES`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a long piece of an answer as slices, each after the one before has left."""

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
