"""HTTP calls, each bounded as a whole: in time, and in the bytes of its head and of its body.

urllib3's timeout is for one read of the socket, so a server that sends a byte now and then can hold
its caller forever. Here every read from the wire counts: status line, headers, chunks and body
alike. All clients of the supervisor use :func:`request`.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

# urllib3 would warn on each call. HttpClient explains why it does not verify certificates.
urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

MAX_BYTES = 4 << 20
"""Bytes of a body, unless the caller allows less. Pages of known engines have less than 1 MiB."""
MAX_HEAD = 64 << 10
"""Bytes of the status line and headers, including what the framing adds to a body."""
CHUNK = 1 << 16
MAX_MESSAGE = 500
"""Characters of an error, which quotes a line that is not HTTP."""
LOOPBACK = "127.0.0.1"
"""In a URL: this pod, whichever of its addresses the engine listens at."""


class NoAnswer(Exception):
    """The server gave no answer, or one that is too long or too slow to be one."""


class TooLong(NoAnswer):
    """The body has more bytes than the caller takes."""


class EngineError(Exception):
    """The engine, or another server, gave no usable answer; the message says why."""


class Answer(NamedTuple):
    """``headers`` are case-insensitive; ``body`` is empty where only the head was asked for."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def own_addresses() -> Iterator[str]:
    """Yield the addresses at which an engine of this pod may listen, the loopback's first.

    An engine that is told its pod's address, or takes one family alone, does not listen at all of
    them. A socket that is connected sends nothing: it shows which address the kernel would use.
    """
    yield from (LOOPBACK, "::1")
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((anywhere, 9))
            yield route.getsockname()[0]


class _Wire(io.RawIOBase):
    """The bytes of one answer as they arrive, up to a deadline and a maximum number."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline
        self.left = MAX_HEAD

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the answer did not end in time")
        if self.left <= 0:
            raise http.client.HTTPException("its head or its framing is too long")
        self._sock.settimeout(seconds)
        count = self._raw.readinto(buffer)
        self.left -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer that is read through a :class:`_Wire`."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._wire = _Wire(self.fp.detach(), sock, deadline)
        self.fp = io.BufferedReader(self._wire)

    def begin(self) -> None:
        super().begin()
        # The body's own bound is read()'s, with a message of its own.
        self._wire.left = 2 * MAX_BYTES


class _Bounded:
    """A connection whose answers end within what is left of the request's total time."""

    host: str
    timeout: float | None
    response_class: Any

    def _new_conn(self) -> socket.socket:
        """Connect; for the loopback, to the first address of this pod that takes the connection."""
        asked, failed = self.host, None
        addresses = own_addresses() if asked == LOOPBACK else iter((asked,))
        try:
            for address in addresses:
                self.host = address
                try:
                    return super()._new_conn()  # type: ignore[misc, no-any-return]
                except urllib3.exceptions.NewConnectionError as error:
                    failed = failed or error
        finally:
            self.host = asked
        assert failed is not None
        raise failed

    def getresponse(self) -> Any:
        deadline = time.monotonic() + (self.timeout or 0.0)
        self.response_class = partial(_Response, deadline=deadline)
        return super().getresponse()  # type: ignore[misc]


class _Connection(_Bounded, HTTPConnection):
    pass


class _TlsConnection(_Bounded, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def pool(**options: Any) -> urllib3.PoolManager:
    """Return a pool of bounded connections; ``options`` are those of urllib3's."""
    found = urllib3.PoolManager(retries=False, **options)
    found.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return found


def request(
    connections: urllib3.PoolManager,
    method: str,
    url: str,
    timeout_s: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = MAX_BYTES,
    head_only: bool = False,
) -> Answer:
    """Return the whole answer, or its head; raise :class:`NoAnswer`.

    Redirects are not followed, and a compressed body, which was not asked for, is not decompressed.
    """
    try:
        answer = connections.request(
            method,
            url,
            body=body,
            headers=headers,
            timeout=urllib3.Timeout(total=timeout_s),
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        if head_only:
            answer.close()
        data = b"" if head_only else _read(answer, max_bytes)
        return Answer(answer.status, answer.headers, data)
    except urllib3.exceptions.ReadTimeoutError as error:
        raise NoAnswer("the answer did not end in time") from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        # ValueError: http.client refuses a header, such as a token with line breaks.
        raise NoAnswer(str(error)[:MAX_MESSAGE]) from error


def _read(answer: urllib3.BaseHTTPResponse, limit: int) -> bytes:
    """Return the whole body. Its connection goes back to the pool after the last piece only."""
    pieces, size = [], 0
    try:
        while piece := answer.read1(CHUNK):
            size += len(piece)
            if size > limit:
                raise TooLong(f"the answer has more than {limit / (1 << 20):g} MiB")
            pieces.append(piece)
    except BaseException:
        answer.close()
        raise
    answer.release_conn()
    return b"".join(pieces)


class HttpClient:
    """A client of an engine's server; ``url`` has no path. Safe to use from several threads.

    Each call has a connection of its own: an open one would count as a client's during a drain, and
    one that the server closes between two calls would look like a failure.

    An ``https`` URL is used without verification of the certificate. The server is on the pod's
    own loopback, its certificate names the Service, and no secret is sent.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def _pool(self) -> urllib3.PoolManager:
        if not self._url.startswith("https://"):
            # urllib3 2.2 passes assert_hostname on to plain connections, which refuse it.
            return pool()
        return pool(cert_reqs=ssl.CERT_NONE, assert_hostname=False)

    def call(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> tuple[int, bytes]:
        """Status and body; EngineError without an answer, or one too long or too slow to be one."""
        headers = {"Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        url = self._url + path
        try:
            with self._pool() as connections:
                found = request(connections, method, url, timeout_s, body, headers, max_bytes)
        except NoAnswer as error:
            raise EngineError(f"{method} {path}: {error}") from error
        return found.status, found.body

    def answers(self, path: str, timeout_s: float) -> bool:
        """Whether a GET of ``path`` gets the head of an answer: that of an error is one, too."""
        try:
            with self._pool() as connections:
                request(connections, "GET", self._url + path, timeout_s, head_only=True)
        except NoAnswer:
            return False
        return True
