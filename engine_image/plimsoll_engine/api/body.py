"""Read a request's body: so much of it, in so much time, within the memory for bodies."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import Receive

from plimsoll_engine.api.auth import TENANT
from plimsoll_engine.http.budget import BodyBudget, OverBudget, Reservation
from plimsoll_engine.http.limits import SMALL_BODY_BYTES, HttpLimits
from plimsoll_engine.http.turns import Left


class BodyRefused(Exception):
    """The body is not read.

    ``status`` is 400, 408, 413, 429 or 503; ``code`` is the serving API's.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Body(NamedTuple):
    """The body of one request as it arrives.

    ``client`` is whom it counts for: an API key where several tell tenants apart, else an address.
    ``left`` returns once the client has left.
    """

    raw: bytearray
    client: str
    left: Left


class BodyReader:
    """That of one server."""

    def __init__(self, limits: HttpLimits, budget: BodyBudget) -> None:
        self._limits = limits
        self._budget = budget

    @asynccontextmanager
    async def read(self, request: Request, most: int) -> AsyncIterator[Body]:
        """Yield the body, at most ``most`` bytes of it; leave the context when its bytes are gone.

        Raises :class:`BodyRefused`; ClientDisconnect where the client left.
        """
        client = client_of(request)
        announced = _announced(request)
        if announced is not None and announced > most:
            raise _too_large(most)
        with self._budget.open(client) as reservation:
            try:
                reservation.announce(announced or 0)
                raw = await self._read(request, most, announced is not None, reservation)
            except OverBudget as error:
                status, code = (429, "too_many_bytes") if error.client else (503, "overloaded")
                raise BodyRefused(status, code, str(error)) from None
            yield Body(raw, client, functools.partial(until_left, request.receive))

    async def _read(
        self, request: Request, most: int, announced: bool, reservation: Reservation
    ) -> bytearray:
        begun = asyncio.get_running_loop().time()
        body = bytearray()
        chunks = request.stream()
        while True:
            try:
                async with asyncio.timeout_at(begun + self._limits.body_deadline_s(len(body))):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise BodyRefused(
                    408,
                    "body_timeout",
                    f"the body did not arrive in time: {len(body)} bytes of it in"
                    f" {self._limits.body_deadline_s(len(body)):.0f} s",
                ) from None
            if chunk is None:
                return body
            size = len(body) + len(chunk)
            if size > most:
                raise _too_large(most)
            if not announced and size > SMALL_BODY_BYTES:
                reservation.announce(most)
            body += chunk
            reservation.came(len(chunk))


def client_of(request: Request) -> str:
    """Whose share of the memory for bodies a request takes: its tenant, else its address."""
    tenant = request.scope.get(TENANT)
    if tenant:
        return str(tenant)
    return request.client.host if request.client is not None else ""


async def until_left(receive: Receive) -> None:
    """Until the client of a request whose body was read has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _announced(request: Request) -> int | None:
    text = request.headers.get("content-length")
    return int(text) if text is not None else None  # h11 has seen to it that it is a number


def _too_large(most: int) -> BodyRefused:
    return BodyRefused(413, "body_too_large", f"the body is larger than the limit of {most} bytes")
