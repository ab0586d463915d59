"""Calls to a foreign engine's server, each bounded in time and size as a whole."""

from __future__ import annotations

import time

import urllib3

from plimsoll_sidecar.act.adapter import EngineError

MAX_BYTES = 4 << 20
CHUNK = 1 << 16


class Server:
    """``url`` without a path. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def call(
        self, method: str, path: str, timeout_s: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """Status and body; EngineError without an answer, or one too long or too slow to be one.

        Each call has a connection of its own: one that stays open would count as a client's
        during a drain, and one that the server closes in between would be taken for a failure.
        """
        deadline = time.monotonic() + timeout_s
        headers = {"Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            with urllib3.PoolManager(retries=False) as http:
                answer = http.request(
                    method,
                    self._url + path,
                    body=body,
                    headers=headers,
                    timeout=timeout_s,
                    redirect=False,
                    preload_content=False,
                )
                return answer.status, _read(answer, deadline)
        except (urllib3.exceptions.HTTPError, OSError, _Unusable) as error:
            raise EngineError(f"{method} {path}: {error}") from error


class _Unusable(Exception):
    pass


def _read(answer: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    pieces, size = [], 0
    try:
        while piece := answer.read1(CHUNK):
            size += len(piece)
            if size > MAX_BYTES:
                raise _Unusable(f"the answer has more than {MAX_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                raise _Unusable("the answer does not come to its end")
            pieces.append(piece)
    finally:
        answer.close()
    return b"".join(pieces)
