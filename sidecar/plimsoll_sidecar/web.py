"""Serve HTTP/1.1 in one loop, so that no client can block the server.

If all connections are in use, a new client replaces the oldest one of the address with the most
connections. The launcher imports this module, so it must stay small.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections.abc import Callable

from plimsoll_api.listening import bind_socket

MAX_CONNECTIONS = 64
# Request line and headers.
MAX_HEAD_BYTES = 16 << 10
# A connection must send all headers of its request within this time.
REQUEST_TIMEOUT_S = 5.0
# The server waits this long for the client to close the connection, because closing it first could
# lose data that the client has not read.
WRITE_TIMEOUT_S = 10.0
LISTEN_BACKLOG = 1024
# After this many new connections, existing ones are served again.
MAX_ACCEPTS_PER_ROUND = 16
NO_DESCRIPTOR_PAUSE_S = 0.05
REASON_PHRASES = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
TEXT_CONTENT_TYPE = "text/plain; charset=utf-8"
READING, WRITING, CLOSING = range(3)
# Resets a connection on close.
_LINGER_RESET = (1).to_bytes(4, sys.byteorder) + bytes(4)
# Order in which an address's connections are closed for a new client.
_EVICTION_ORDER = {CLOSING: 0, READING: 1, WRITING: 2}

Response = tuple[int, str, bytes]
"""Status, content type and body of an answer."""


class Request:
    """A request without its body. ``path`` excludes the query. ``host`` is None if missing."""

    __slots__ = ("host", "method", "path")

    def __init__(self, method: str, path: str, host: str | None) -> None:
        self.method, self.path, self.host = method, path, host


def parse_request(head: bytes) -> Request | None:
    """Return the request; None if it is invalid or has more than one Host header."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    fields = (line.partition(":") for line in lines)
    hosts = [value.strip() for name, _, value in fields if name.lower() == "host"]
    if len(hosts) > 1 or (not hosts and words[2] != "HTTP/1.0"):
        return None
    return Request(words[0], words[1].partition("?")[0], hosts[0] if hosts else None)


class _Connection:
    __slots__ = ("address", "deadline", "head", "sock", "started_at", "state", "unsent")

    def __init__(self, sock: socket.socket, address: str, now: float) -> None:
        self.sock, self.address, self.started_at = sock, address, now
        self.deadline, self.state = now + REQUEST_TIMEOUT_S, READING
        self.head = b""
        self.unsent: list[memoryview] = []


class HttpServer:
    """Serves requests in the thread that calls :meth:`handle_events`.

    If ``answer`` raises an exception, the status is 500. ``headers`` holds header lines for each
    answer, each with CRLF at its end.
    """

    def __init__(
        self, host: str, port: int, answer: Callable[[Request], Response], headers: str = ""
    ) -> None:
        """Listen. Raises OSError if this fails, and OverflowError for an invalid port."""
        self._answer, self._headers = answer, headers
        self._listener = _create_listener(host, port)
        self._connections: dict[int, _Connection] = {}
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    @property
    def port(self) -> int:
        """TCP port on which the server listens."""
        return int(self._listener.getsockname()[1])

    def watch(self, descriptor: int) -> None:
        """Make :meth:`handle_events` return as soon as ``descriptor`` is readable.

        The caller must read from the descriptor.
        """
        self._poll.register(descriptor, select.POLLIN)

    def handle_events(self, wait_s: float) -> None:
        """Wait at most ``wait_s`` seconds for events of connections, and handle them."""
        until = time.monotonic() + wait_s
        until = min([until, *(c.deadline for c in self._connections.values())])
        ready = self._poll.poll(max(0.0, 1000 * (until - time.monotonic())))
        for descriptor, _ in ready:
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._advance(connection)
        if any(descriptor == self._listener.fileno() for descriptor, _ in ready):
            self._accept()
        self._close_expired()

    def close(self) -> None:
        """Close the listener and all connections, without completing answers."""
        for connection in list(self._connections.values()):
            self._close_connection(connection)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS_PER_ROUND):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # this process or the machine has no free file descriptor
                self._close_oldest()
                time.sleep(NO_DESCRIPTOR_PAUSE_S)
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                self._close_oldest()
            sock.setblocking(False)
            connection = _Connection(sock, address[0], time.monotonic())
            self._connections[sock.fileno()] = connection
            self._poll.register(sock, select.POLLIN)
            self._advance(connection)  # most requests arrive together with their connection

    def _advance(self, connection: _Connection) -> None:
        # As far as possible without blocking.
        try:
            if connection.state == READING:
                self._read(connection)
            if connection.state == WRITING:
                self._write(connection)
            if connection.state == CLOSING and not connection.sock.recv(MAX_HEAD_BYTES):
                self._close_connection(connection)
        except BlockingIOError:
            return
        except OSError:
            self._close_connection(connection)

    def _read(self, connection: _Connection) -> None:
        data = connection.sock.recv(MAX_HEAD_BYTES)
        if not data:
            raise ConnectionError("the client disconnected")
        head = connection.head = connection.head + data
        end = head.find(b"\r\n\r\n")
        if 0 <= end <= MAX_HEAD_BYTES:
            self._respond(connection, parse_request(head[:end]))
        elif len(head) > MAX_HEAD_BYTES:
            self._reply(
                connection, (431, TEXT_CONTENT_TYPE, b"the request's headers are too long\n")
            )

    def _respond(self, connection: _Connection, request: Request | None) -> None:
        if request is None:
            self._reply(
                connection,
                (400, TEXT_CONTENT_TYPE, b"not an HTTP/1.1 request with one Host header\n"),
            )
        elif request.method not in ("GET", "HEAD"):
            self._reply(connection, (405, TEXT_CONTENT_TYPE, b"only GET and HEAD are allowed\n"))
        else:
            try:
                answer = self._answer(request)
            except Exception:  # noqa: BLE001 - a failing page must not stop the server
                sys.excepthook(*sys.exc_info())
                answer = (
                    500,
                    TEXT_CONTENT_TYPE,
                    b"this page cannot be rendered; the supervisor's log contains the error\n",
                )
            self._reply(connection, answer, request.method == "HEAD")

    def _reply(self, connection: _Connection, answer: Response, head_only: bool = False) -> None:
        status, content, body = answer
        head = (
            f"HTTP/1.1 {status} {REASON_PHRASES[status]}\r\nContent-Type: {content}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n{self._headers}\r\n"
        )
        connection.head, connection.state = b"", WRITING
        connection.deadline = time.monotonic() + WRITE_TIMEOUT_S
        connection.unsent = [memoryview(head.encode())]
        if body and not head_only:
            connection.unsent.append(memoryview(body))
        self._poll.modify(connection.sock, select.POLLOUT)

    def _write(self, connection: _Connection) -> None:
        while connection.unsent:
            sent = connection.sock.sendmsg(connection.unsent)
            while connection.unsent and sent >= len(connection.unsent[0]):
                sent -= len(connection.unsent.pop(0))
            if sent:
                connection.unsent[0] = connection.unsent[0][sent:]
        connection.sock.shutdown(socket.SHUT_WR)
        connection.state = CLOSING
        self._poll.modify(connection.sock, select.POLLIN)

    def _close_expired(self) -> None:
        now = time.monotonic()
        for connection in [c for c in self._connections.values() if c.deadline <= now]:
            if connection.state == READING and connection.head:
                self._reply(
                    connection, (408, TEXT_CONTENT_TYPE, b"the request was not complete in time\n")
                )
                self._advance(connection)
            else:
                self._close_connection(connection, abort=connection.state != READING)

    def _close_oldest(self) -> None:
        # A client that floods the port displaces only its own connections. None is rejected because
        # of its address: that of the kubelet's probes depends on the network plugin.
        connections_by_address: dict[str, list[_Connection]] = {}
        for connection in self._connections.values():
            connections_by_address.setdefault(connection.address, []).append(connection)
        if connections_by_address:
            largest_group = max(connections_by_address.values(), key=len)
            oldest = min(largest_group, key=lambda c: (_EVICTION_ORDER[c.state], c.started_at))
            self._close_connection(oldest, abort=oldest.state == WRITING)

    def _close_connection(self, connection: _Connection, abort: bool = False) -> None:
        # With abort, data that the client has not read is discarded.
        descriptor = connection.sock.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)
        with contextlib.suppress(OSError):
            if abort:
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            connection.sock.close()


def _create_listener(host: str, port: int) -> socket.socket:
    listener = bind_socket(host, port)
    try:
        listener.listen(LISTEN_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
