"""Send HTTP requests with limits on the total time, and on the size of head and body.

urllib3 applies its timeout to each read of the socket: a server that sends one byte from time to
time could block its caller forever. These limits cover the whole response.
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

# The pages of known engines are smaller than 1 MiB.
MAX_BODY_BYTES = 4 << 20
# Status line, headers, and the framing of a body.
MAX_HEAD_BYTES = 64 << 10
READ_CHUNK_BYTES = 1 << 16
# An error message may quote a malformed line of the response.
MAX_MESSAGE_CHARS = 500
# In a URL, it stands for all addresses of this pod, because the engine may listen on any of them.
LOOPBACK = "127.0.0.1"


class RequestError(Exception):
    """No response, or a response that was incomplete, too large or too slow."""


class ResponseTooLargeError(RequestError):
    """A response whose body is larger than the limit."""


class EngineError(Exception):
    """A failed call to the engine, or an unusable response."""


class HttpResponse(NamedTuple):
    """Response of a server, without a body if only the head was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def iterate_pod_addresses() -> Iterator[str]:
    """Yield the addresses on which an engine of this pod may listen, loopback first."""
    yield from (LOOPBACK, "::1")
    for family, remote in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((remote, 9))
            yield route.getsockname()[0]


class _BoundedStream(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline
        self.remaining_bytes = MAX_HEAD_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the response was not complete within the timeout")
        if self.remaining_bytes <= 0:
            raise http.client.HTTPException(
                "the headers of the response, or of its chunks, are larger than the limit"
            )
        self._sock.settimeout(seconds)
        count = self._raw.readinto(buffer)
        self.remaining_bytes -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._wire = _BoundedStream(self.fp.detach(), sock, deadline)
        self.fp = io.BufferedReader(self._wire)

    def begin(self) -> None:
        super().begin()
        # _read_body() has a limit and a message of its own for the body.
        self._wire.remaining_bytes = 2 * MAX_BODY_BYTES


class _BoundedConnection:
    host: str
    timeout: float | None
    response_class: Any

    def _new_conn(self) -> socket.socket:
        original_host, first_error = self.host, None
        addresses = iterate_pod_addresses() if original_host == LOOPBACK else iter((original_host,))
        try:
            for address in addresses:
                self.host = address
                try:
                    return super()._new_conn()  # type: ignore[misc, no-any-return]
                except urllib3.exceptions.NewConnectionError as error:
                    first_error = first_error or error
        finally:
            self.host = original_host
        assert first_error is not None
        raise first_error

    def getresponse(self) -> Any:
        deadline = time.monotonic() + (self.timeout or 0.0)
        self.response_class = partial(_Response, deadline=deadline)
        return super().getresponse()  # type: ignore[misc]


class _Connection(_BoundedConnection, HTTPConnection):
    pass


class _TlsConnection(_BoundedConnection, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def create_pool(**options: Any) -> urllib3.PoolManager:
    """Return a pool manager with bounded connections, and urllib3's ``options``."""
    pool = urllib3.PoolManager(retries=False, **options)
    pool.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return pool


def request(
    connections: urllib3.PoolManager,
    method: str,
    url: str,
    timeout_s: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    max_bytes: int = MAX_BODY_BYTES,
    head_only: bool = False,
) -> HttpResponse:
    """Send a request without following redirects. Raises :class:`RequestError`."""
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
        data = b"" if head_only else _read_body(answer, max_bytes)
        return HttpResponse(answer.status, answer.headers, data)
    except urllib3.exceptions.ReadTimeoutError as error:
        raise RequestError("the response was not complete within the timeout") from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        # ValueError: http.client rejects a header, such as a token with line breaks.
        raise RequestError(str(error)[:MAX_MESSAGE_CHARS]) from error


def _read_body(answer: urllib3.BaseHTTPResponse, max_bytes: int) -> bytes:
    pieces, size = [], 0
    try:
        while piece := answer.read1(READ_CHUNK_BYTES):
            size += len(piece)
            if size > max_bytes:
                raise ResponseTooLargeError(
                    f"the body of the response is larger than {max_bytes / (1 << 20):g} MiB"
                )
            pieces.append(piece)
    except BaseException:
        answer.close()
        raise
    answer.release_conn()
    return b"".join(pieces)


class HttpClient:
    """Client of an engine's server. Thread-safe.

    Each request uses a new connection, because the engine counts open connections in a drain.
    Certificates are not verified: no secret is sent, and the engine's certificate names the
    Service.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def _create_pool(self) -> urllib3.PoolManager:
        if not self._url.startswith("https://"):
            # urllib3 2.2 passes assert_hostname to plain connections, which reject it.
            return create_pool()
        return create_pool(cert_reqs=ssl.CERT_NONE, assert_hostname=False)

    def call(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes | None = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> tuple[int, bytes]:
        """Send a request, and return the status and body of the response. Raises EngineError."""
        headers = {"Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        url = self._url + path
        try:
            with self._create_pool() as connections:
                answer = request(connections, method, url, timeout_s, body, headers, max_bytes)
        except RequestError as error:
            raise EngineError(f"{method} {path} failed: {error}") from error
        return answer.status, answer.body

    def responds_to_get(self, path: str, timeout_s: float) -> bool:
        """Report whether a GET request to ``path`` gets a response with any status."""
        try:
            with self._create_pool() as connections:
                request(connections, "GET", self._url + path, timeout_s, head_only=True)
        except RequestError:
            return False
        return True
