"""HTTP connection of uvicorn that times out clients that make no progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import h11
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from plimsoll_engine.http.limits import LINGER_TIMEOUT_S, MAX_HEADER_BYTES, HttpLimits
from plimsoll_engine.http.request_framing import StrictConnection

ErrorBodyEncoder = Callable[[int, str, str], bytes]
"""Function that returns the body of an error response, given its status, message and code."""


class ConnectionRegistry(Protocol):
    """Registry of a server's connections."""

    limits: HttpLimits
    overload_app: ASGIApp
    error_body: ErrorBodyEncoder

    def add(self, connection: Connection) -> None:
        """Register or refuse ``connection``."""

    def discard(self, connection: Connection) -> None:
        """Remove ``connection``."""

    def count_closed(self, reason: str) -> None:
        """Count a connection that the server closed for ``reason``."""


class _CountingTransport:
    def __init__(self, transport: asyncio.Transport, may_close: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_close = may_close
        self.written_bytes = 0

    def write(self, data: bytes) -> None:
        self.written_bytes += len(data)
        self._transport.write(data)

    @property
    def sent_bytes(self) -> int:
        # Bytes that the kernel has accepted.
        return self.written_bytes - self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._may_close():
            self._transport.close()

    def release(self) -> None:
        # Break the reference cycle with the connection.
        self._may_close = _return_true

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _return_true() -> bool:
    return True


class Connection(H11Protocol):
    """HTTP connection that the server closes if the client exceeds a timeout."""

    conn: StrictConnection

    def __init__(self, registry: ConnectionRegistry, **options: Any) -> None:
        super().__init__(**options)
        self.conn = StrictConnection()
        self._registry = registry
        # Monotonic time in seconds.
        self.idle_since = time.monotonic()
        self._header_since: float | None = self.idle_since
        self._sent = 0
        self._sent_at = self.idle_since
        self._half_closed = False
        """Whether the response is complete while the client still sends its body."""

    @property
    def host(self) -> str:
        """IP address of the client; empty on a Unix socket."""
        return self.client[0] if self.client else ""

    @property
    def is_answering(self) -> bool:
        """Whether a received request still lacks a part of its response."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    @property
    def unsent_bytes(self) -> int:
        """Number of response bytes in the write buffer."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection."""
        counting: Any = _CountingTransport(transport, self._may_close)
        super().connection_made(counting)
        self._registry.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection, and release the resources of its request."""
        self._registry.discard(self)
        super().connection_lost(exc)
        # Leave no reference cycle. With thousands of connections, a garbage collection of their
        # cycles would block the event loop for a tenth of a second.
        self.cycle = None  # type: ignore[assignment]
        transport: Any = self.transport
        transport.release()

    def refuse(self) -> None:
        """Answer the next request with 503, because the server has too many connections."""
        self.app = self._registry.overload_app

    def data_received(self, data: bytes) -> None:
        """Process received data. Close the connection if the client pipelines too much."""
        if self._half_closed or self.transport.is_closing():
            return
        if self.is_answering and len(data) > MAX_HEADER_BYTES:
            # uvicorn would buffer pipelined requests without a limit.
            self.abort("pipelined")
            return
        if self._header_since is None and self.conn.their_state is h11.IDLE:
            self._header_since = time.monotonic()
        # In pieces, so that h11 bounds headers and trailers that came at once.
        for start in range(0, len(data), MAX_HEADER_BYTES):
            super().data_received(data[start : start + MAX_HEADER_BYTES])
            if self.transport.is_closing():
                return
        if self.conn.their_state is not h11.IDLE:
            self._header_since = None

    def on_response_complete(self) -> None:
        """Start the idle timeout."""
        self.idle_since = time.monotonic()
        super().on_response_complete()

    @property
    def _is_answered_early(self) -> bool:
        cycle = self.cycle
        return cycle is not None and cycle.response_complete and cycle.more_body

    def _may_close(self) -> bool:
        # If the socket were closed while the client sends its body, the connection would be reset,
        # and the client could lose the response. Only the write side is closed then.
        if self._half_closed or not self._is_answered_early or not self.transport.can_write_eof():
            return True
        self._half_closed = True
        self.transport.write_eof()
        return False

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid HTTP request with the API's error body, and close the connection."""
        self._send_error_and_close(400, self.conn.error_message or msg, "invalid_http")

    def close_if_timed_out(self, now: float) -> None:
        """Close the connection if its client exceeded a timeout by ``now`` (monotonic seconds)."""
        limits = self._registry.limits
        transport: Any = self.transport
        sent = transport.sent_bytes
        if sent != self._sent or sent == transport.written_bytes:
            self._sent, self._sent_at = sent, now
        elif now - self._sent_at > limits.write_timeout_s:
            self.abort("write_timeout")
            return
        if transport.is_closing():
            return
        if self._is_answered_early:
            if now - self.idle_since > LINGER_TIMEOUT_S:
                self.abort("linger_timeout")
        elif (
            self._header_since is not None
            and self.conn.their_state is h11.IDLE
            and now - self._header_since > limits.header_timeout_s
        ):
            self._time_out_header()

    def _time_out_header(self) -> None:
        self._registry.count_closed("header_timeout")
        if not self.conn.trailing_data[0]:
            self.transport.close()  # no byte of a request came
            return
        seconds = f"{self._registry.limits.header_timeout_s:g}"
        message = (
            f"the request's header was not received within {seconds} s: send the header faster"
        )
        self._send_error_and_close(408, message, "header_timeout")

    def abort(self, reason: str) -> None:
        """Discard unsent bytes and close the connection for a reason in CLOSE_REASONS."""
        self._registry.count_closed(reason)
        self.transport.abort()

    def _send_error_and_close(self, status: int, message: str, code: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # an answer has already begun
            return
        body = self._registry.error_body(status, message, code)
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
