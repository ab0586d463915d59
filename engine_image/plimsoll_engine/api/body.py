"""Read a request's body, at most so much of it."""

from __future__ import annotations

from starlette.requests import Request


class TooLarge(Exception):
    """The body is larger than its API takes."""


async def read(request: Request, limit: int) -> bytes:
    """Raises :class:`TooLarge` beyond ``limit`` bytes; ClientDisconnect where the client left."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise TooLarge(f"the body is larger than {limit} bytes")
    return bytes(body)
