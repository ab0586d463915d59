"""Calls to an engine's server, each bounded in time and size as a whole."""

from __future__ import annotations

import ssl
import time

import urllib3

# urllib3 would warn on each call. HttpClient explains why it does not verify certificates.
urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

MAX_BYTES = 4 << 20
CHUNK = 1 << 16


class EngineError(Exception):
    """The engine, or another server, gave no usable answer; the message says why."""


class HttpClient:
    """A client of an engine's server; ``url`` has no path. Safe to use from several threads.

    An ``https`` URL is used without verification of the certificate. The server is on the pod's
    own loopback, its certificate names the Service, and no secret is sent.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def _pool(self) -> urllib3.PoolManager:
        if not self._url.startswith("https://"):
            # urllib3 2.2 passes assert_hostname on to plain connections, which refuse it.
            return urllib3.PoolManager(retries=False)
        return urllib3.PoolManager(retries=False, cert_reqs=ssl.CERT_NONE, assert_hostname=False)

    def call(
        self, method: str, path: str, timeout_s: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """Status and body; EngineError without an answer, or one too long or too slow to be one."""
        deadline = time.monotonic() + timeout_s
        try:
            with self._pool() as http:
                answer = self._request(http, method, path, timeout_s, body)
                return answer.status, read(answer, deadline)
        except (urllib3.exceptions.HTTPError, OSError, Unusable) as error:
            raise EngineError(f"{method} {path}: {error}") from error

    def answers(self, path: str, timeout_s: float) -> bool:
        """Whether a GET of ``path`` gets the head of an answer: that of an error is one, too."""
        try:
            with self._pool() as http:
                self._request(http, "GET", path, timeout_s, None).close()
        except (urllib3.exceptions.HTTPError, OSError):
            return False
        return True

    def _request(
        self,
        http: urllib3.PoolManager,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes | None,
    ) -> urllib3.BaseHTTPResponse:
        """Return the answer, its body not read.

        Each call has a connection of its own: one that stays open would count as a client's
        during a drain, and one that the server closes in between would be taken for a failure.
        """
        headers = {"Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        return http.request(
            method,
            self._url + path,
            body=body,
            headers=headers,
            timeout=timeout_s,
            redirect=False,
            preload_content=False,
        )


class Unusable(Exception):
    """An answer that is too long, or too slow to be one."""


def read(answer: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """Return the whole body of an answer; :class:`Unusable` beyond its bounds.

    A timeout of urllib3 is for one piece: an engine that sends a byte a second would hold the
    sampler for ever. Its connection goes back to the pool after the last piece only.
    """
    pieces, size = [], 0
    try:
        while piece := answer.read1(CHUNK):
            size += len(piece)
            if size > MAX_BYTES:
                raise Unusable(f"the answer has more than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                raise Unusable("the answer did not end in time")
            pieces.append(piece)
    except BaseException:
        answer.close()
        raise
    answer.release_conn()
    return b"".join(pieces)
