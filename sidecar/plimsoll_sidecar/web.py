"""A small HTTP/1.1 server that no client can hold up: one loop, bounded connections, deadlines.

Each connection carries one request. Whoever sends nothing, sends slowly or reads slowly loses the
connection when its time is over, or earlier, when a new client needs the place: then the address
that holds most connections loses its oldest. So a new client always gets in, and one that floods
the port takes places from itself alone.

Clients are not refused by address: which one the kubelet probes from depends on the network plugin
(the node's own, the bridge's, a tunnel's), so that a list would take healthy pods out of service.
The launcher imports this module: it must stay small.
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
MAX_HEAD = 16 << 10
"""Bytes of a request's line and headers."""
REQUEST_S = 5.0
"""From the connection to the end of the request's headers."""
WRITE_S = 10.0
"""From the start of the answer until the client has read it and closed the connection. The server
does not close first: that could destroy data that the client has not read."""
BACKLOG = 1024
ACCEPTS = 16
"""New connections a turn: those that are here are served in between."""
NO_DESCRIPTOR_S = 0.05
REASONS = {
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
TEXT = "text/plain; charset=utf-8"
READING, WRITING, CLOSING = range(3)
_RESET = (1).to_bytes(4, sys.byteorder) + bytes(4)
"""``struct linger``: close at once."""
_EVICTED_FIRST = {CLOSING: 0, READING: 1, WRITING: 2}

Answer = tuple[int, str, bytes]
"""Status, content type and body."""


class Request:
    """``path`` is without its query; ``host`` is the Host header, None where there is none."""

    __slots__ = ("host", "method", "path")

    def __init__(self, method: str, path: str, host: str | None) -> None:
        self.method, self.path, self.host = method, path, host


def parse(head: bytes) -> Request | None:
    """Return the request of a whole head.

    None where it is not HTTP/1.x, or names two hosts or none.
    """
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
    __slots__ = ("address", "began", "deadline", "head", "sock", "state", "unsent")

    def __init__(self, sock: socket.socket, address: str, now: float) -> None:
        self.sock, self.address, self.began = sock, address, now
        self.deadline, self.state = now + REQUEST_S, READING
        self.head = b""
        self.unsent: list[memoryview] = []


class HttpServer:
    """``answer`` is called in the thread that calls :meth:`turn`; what it raises is a 500.

    ``headers`` are added to each answer, every line with its CRLF.
    """

    def __init__(
        self, host: str, port: int, answer: Callable[[Request], Answer], headers: str = ""
    ) -> None:
        """Listen; raise OSError (OverflowError for a port that is none)."""
        self._answer, self._headers = answer, headers
        self._listener = _listen(host, port)
        self._connections: dict[int, _Connection] = {}
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)

    @property
    def port(self) -> int:
        """The TCP port that it listens on, also where it was asked for port 0."""
        return int(self._listener.getsockname()[1])

    def watch(self, descriptor: int) -> None:
        """Lets a turn end when this can be read, too; the caller reads it."""
        self._poll.register(descriptor, select.POLLIN)

    def turn(self, wait_s: float) -> None:
        """Wait for something to do, at most ``wait_s``, and do it."""
        until = time.monotonic() + wait_s
        until = min([until, *(c.deadline for c in self._connections.values())])
        ready = self._poll.poll(max(0.0, 1000 * (until - time.monotonic())))
        for descriptor, _ in ready:
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._advance(connection)
        if any(descriptor == self._listener.fileno() for descriptor, _ in ready):
            self._accept()
        self._expire()

    def close(self) -> None:
        """Close the listener and every connection, without waiting for answers under way."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left, in this process or on the machine
                self._evict()
                time.sleep(NO_DESCRIPTOR_S)
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                self._evict()
            sock.setblocking(False)
            connection = _Connection(sock, address[0], time.monotonic())
            self._connections[sock.fileno()] = connection
            self._poll.register(sock, select.POLLIN)
            self._advance(connection)  # most requests come along with their connection

    def _advance(self, connection: _Connection) -> None:
        """As far as the client lets it go, without waiting."""
        try:
            if connection.state == READING:
                self._read(connection)
            if connection.state == WRITING:
                self._write(connection)
            if connection.state == CLOSING and not connection.sock.recv(MAX_HEAD):
                self._drop(connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        data = connection.sock.recv(MAX_HEAD)
        if not data:
            raise ConnectionError("the client disconnected")
        head = connection.head = connection.head + data
        end = head.find(b"\r\n\r\n")
        if 0 <= end <= MAX_HEAD:
            self._respond(connection, parse(head[:end]))
        elif len(head) > MAX_HEAD:
            self._reply(connection, (431, TEXT, b"the request's headers are too long\n"))

    def _respond(self, connection: _Connection, request: Request | None) -> None:
        if request is None:
            self._reply(connection, (400, TEXT, b"not an HTTP/1.1 request with one Host header\n"))
        elif request.method not in ("GET", "HEAD"):
            self._reply(connection, (405, TEXT, b"only GET and HEAD are allowed\n"))
        else:
            try:
                answer = self._answer(request)
            except Exception:  # noqa: BLE001 - a page that fails is its own failure
                sys.excepthook(*sys.exc_info())
                answer = 500, TEXT, b"this page failed; the supervisor's log says why\n"
            self._reply(connection, answer, request.method == "HEAD")

    def _reply(self, connection: _Connection, answer: Answer, head_only: bool = False) -> None:
        status, content, body = answer
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {content}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n{self._headers}\r\n"
        )
        connection.head, connection.state = b"", WRITING
        connection.deadline = time.monotonic() + WRITE_S
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

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in [c for c in self._connections.values() if c.deadline <= now]:
            if connection.state == READING and connection.head:
                self._reply(connection, (408, TEXT, b"the request did not end in time\n"))
                self._advance(connection)
            else:
                self._drop(connection, abort=connection.state != READING)

    def _evict(self) -> None:
        held: dict[str, list[_Connection]] = {}
        for connection in self._connections.values():
            held.setdefault(connection.address, []).append(connection)
        if held:
            most = max(held.values(), key=len)
            oldest = min(most, key=lambda c: (_EVICTED_FIRST[c.state], c.began))
            self._drop(oldest, abort=oldest.state == WRITING)

    def _drop(self, connection: _Connection, abort: bool = False) -> None:
        """``abort`` frees what the kernel still holds for a client that does not read."""
        descriptor = connection.sock.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)
        with contextlib.suppress(OSError):
            if abort:
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.sock.close()


def _listen(host: str, port: int) -> socket.socket:
    listener = bind_socket(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
