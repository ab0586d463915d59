"""Read request bodies within limits on size, time and memory."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import Receive

from plimsoll_engine.api.auth import TENANT_SCOPE_KEY
from plimsoll_engine.http.budget import BodyBudget, BodyBudgetExceededError, Reservation
from plimsoll_engine.http.fair_semaphore import WaitDisconnect
from plimsoll_engine.http.limits import MAX_SMALL_BODY_BYTES, HttpLimits


class BodyRefusedError(Exception):
    """The request body is refused with this HTTP ``status`` and ``code``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Body(NamedTuple):
    """Body of a request, whose memory counts towards the share of ``client``."""

    raw: bytearray
    client: str
    wait_for_disconnect: WaitDisconnect


class BodyReader:
    """Reader of the request bodies of a server."""

    def __init__(self, limits: HttpLimits, budget: BodyBudget) -> None:
        self._limits = limits
        self._budget = budget

    @asynccontextmanager
    async def read(self, request: Request, max_bytes: int) -> AsyncIterator[Body]:
        """Read the body of ``request``, and release its memory when the context exits.

        Raises BodyRefusedError or ClientDisconnect.
        """
        client = get_client_key(request)
        declared = _parse_content_length(request)
        if declared is not None and declared > max_bytes:
            raise _make_too_large_error(max_bytes)
        with self._budget.open_reservation(client) as reservation:
            try:
                reservation.reserve(declared or 0)
                raw = await self._read_body(request, max_bytes, declared is not None, reservation)
            except BodyBudgetExceededError as error:
                status, code = (
                    (429, "too_many_bytes") if error.is_client_share else (503, "overloaded")
                )
                raise BodyRefusedError(status, code, str(error)) from None
            yield Body(raw, client, functools.partial(wait_for_disconnect, request.receive))

    async def _read_body(
        self, request: Request, max_bytes: int, is_length_declared: bool, reservation: Reservation
    ) -> bytearray:
        started = asyncio.get_running_loop().time()
        body = bytearray()
        chunks = request.stream()
        while True:
            try:
                async with asyncio.timeout_at(
                    started + self._limits.compute_body_timeout_s(len(body))
                ):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise BodyRefusedError(
                    408,
                    "body_timeout",
                    f"received only {len(body)} bytes of the body within "
                    f"{self._limits.compute_body_timeout_s(len(body)):.0f} s: send the body "
                    "faster",
                ) from None
            if chunk is None:
                return body
            size = len(body) + len(chunk)
            if size > max_bytes:
                raise _make_too_large_error(max_bytes)
            if not is_length_declared and size > MAX_SMALL_BODY_BYTES:
                reservation.reserve(max_bytes)
            body += chunk
            reservation.add_held(len(chunk))


def get_client_key(request: Request) -> str:
    """Return the client's name in the memory budget: its tenant, or else its address."""
    tenant = request.scope.get(TENANT_SCOPE_KEY)
    if tenant:
        return str(tenant)
    return request.client.host if request.client is not None else ""


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client of a request disconnects. Read the whole body before this call."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _parse_content_length(request: Request) -> int | None:
    text = request.headers.get("content-length")
    return int(text) if text is not None else None  # h11 accepts only numbers


def _make_too_large_error(max_bytes: int) -> BodyRefusedError:
    return BodyRefusedError(
        413,
        "body_too_large",
        f"the body is larger than the maximum of {max_bytes} bytes: send a smaller body",
    )
