"""One connection of a server: uvicorn's, with an end for each client that keeps it waiting.

A client may send no header, an endless one, half a body, or take nothing of its answer; each costs
a connection and what is buffered for it. :meth:`Connection.check`, which is called each second,
says when it has had its time. A client that moves on, however slowly, is left alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import h11
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from plimsoll_engine.http.limits import HEADER_BYTES, LINGER_S, HttpLimits
from plimsoll_engine.http.request_framing import StrictConnection

ErrorBody = Callable[[int, str, str], bytes]
"""Status, message and code to the body of an error in the API's own shape."""


class Peers(Protocol):
    """What a connection needs of all connections of its server."""

    limits: HttpLimits
    overloaded: ASGIApp
    error_body: ErrorBody

    def add(self, connection: Connection) -> None:
        """Take the connection in, or refuse it."""

    def discard(self, connection: Connection) -> None:
        """Give up its place."""

    def ended(self, reason: str) -> None:
        """Count a connection that the server ended."""


class _Counted:
    """A transport that counts what is written to it, and that asks before it closes."""

    def __init__(self, transport: asyncio.Transport, may_close: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_close = may_close
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    @property
    def taken(self) -> int:
        """Bytes that the kernel has taken: for a client that reads nothing they stand still."""
        return self.written - self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._may_close():
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """A connection that ends when its client has had its time."""

    conn: StrictConnection

    def __init__(self, peers: Peers, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.conn = StrictConnection(h11.SERVER, HEADER_BYTES)
        self._peers = peers
        self.since = time.monotonic()
        """When it began to wait for its client."""
        self._header_since: float | None = self.since
        self._taken = 0
        self._taken_at = self.since
        self._dropping = False
        """All is said, the client still speaks."""

    @property
    def host(self) -> str:
        """The client's address; empty on a Unix socket."""
        return self.client[0] if self.client else ""

    @property
    def working(self) -> bool:
        """A whole request is in work; else it waits for the client."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    @property
    def nbytes(self) -> int:
        """What of the answer waits for the client."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and put the transport in between that counts what is unsent."""
        super().connection_made(_Counted(transport, self._may_close))  # type: ignore[arg-type]
        self._peers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up the connection's place and all that its request holds."""
        self._peers.discard(self)
        super().connection_lost(exc)

    def refuse(self) -> None:
        """Answer the next request with 503: the server has as many connections as it may."""
        self.app = self._peers.overloaded

    def data_received(self, data: bytes) -> None:
        """Take in bytes of the client.

        Too many behind a request that still runs end the connection.
        """
        if self._dropping or self.transport.is_closing():
            return
        if self.working and len(data) > HEADER_BYTES:
            # The next requests on top of one in work would be kept in memory, counted nowhere.
            self.abort("pipelined")
            return
        if self._header_since is None and self.conn.their_state is h11.IDLE:
            self._header_since = time.monotonic()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._header_since = None

    def on_response_complete(self) -> None:
        """Begin the time to wait for the next request."""
        self.since = time.monotonic()
        super().on_response_complete()

    @property
    def _answered_early(self) -> bool:
        """The answer is complete and the body is not."""
        cycle = self.cycle
        return cycle is not None and cycle.response_complete and cycle.more_body

    def _may_close(self) -> bool:
        """Close our side first.

        A socket that is closed while bytes come in is reset, and the client may lose the answer.
        """
        if self._dropping or not self._answered_early or not self.transport.can_write_eof():
            return True
        self._dropping = True
        self.transport.write_eof()
        return False

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP in our format of errors, and end the connection."""
        self._last_words(400, self.conn.fault or msg, "invalid_http")

    def check(self, now: float) -> None:
        """End the connection if its client has had its time."""
        limits = self._peers.limits
        transport: Any = self.transport
        taken = transport.taken
        if taken != self._taken or taken == transport.written:
            self._taken, self._taken_at = taken, now
        elif now - self._taken_at > limits.write_timeout_s:
            self.abort("write_timeout")
            return
        if transport.is_closing():
            return
        if self._answered_early:
            if now - self.since > LINGER_S:
                self.abort("linger_timeout")
        elif (
            self._header_since is not None
            and self.conn.their_state is h11.IDLE
            and now - self._header_since > limits.header_timeout_s
        ):
            self._header_is_late()

    def _header_is_late(self) -> None:
        self._peers.ended("header_timeout")
        if not self.conn.trailing_data[0]:
            self.transport.close()  # it has asked for nothing
            return
        seconds = f"{self._peers.limits.header_timeout_s:g}"
        message = f"the request's header did not arrive within {seconds} s"
        self._last_words(408, message, "header_timeout")

    def abort(self, why: str) -> None:
        """Close at once; what waits to be written is dropped."""
        self._peers.ended(why)
        self.transport.abort()

    def _last_words(self, status: int, message: str, code: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # in the middle of an answer
            return
        body = self._peers.error_body(status, message, code)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
