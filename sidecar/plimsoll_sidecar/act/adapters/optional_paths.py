"""Read paths that not every server has, while requests are in flight and no step completes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from plimsoll_api.decoding import MalformedError, decode
from plimsoll_sidecar.clients.http import EngineError, HttpClient

# The server may forward the request to a process that hangs.
REQUEST_TIMEOUT_S = 1.0
# A server that gives no valid answer is asked less often.
RETRY_INTERVAL_S = 10.0
HTTP_NOT_FOUND = 404
# SGLang's scheduler updates its queues 20 times a second while requests wait in them.
MAX_QUEUES_AGE_S = 5.0

T = TypeVar("T")


class _PauseResponse(msgspec.Struct):
    is_paused: bool


def parse_pause(body: bytes) -> bool:
    """Return whether the engine is paused. Raises MalformedError."""
    return decode(body, _PauseResponse).is_paused


class _TransferQueues(msgspec.Struct):
    prefill_bootstrap_queue_reqs: int = 0
    prefill_prealloc_queue_reqs: int = 0  # the same, in SGLang 0.5.10
    prefill_inflight_queue_reqs: int = 0
    decode_prealloc_queue_reqs: int = 0
    decode_transfer_queue_reqs: int = 0


class _RankLoad(msgspec.Struct):
    timestamp: float
    disaggregation: _TransferQueues


class _Loads(msgspec.Struct):
    loads: list[_RankLoad]


def parse_transfers(body: bytes) -> int:
    """Return the number of requests that wait for another engine. Raises MalformedError.

    A scheduler that hangs no longer updates its queues, so they do not count.
    """
    oldest = time.time() - MAX_QUEUES_AGE_S
    queues = [rank.disaggregation for rank in decode(body, _Loads).loads if rank.timestamp > oldest]
    return sum(max(0, count) for queue in queues for count in msgspec.structs.astuple(queue))


class OptionalReader(Generic[T]):
    """Reads a path that the server may lack; ``parse`` may raise MalformedError."""

    def __init__(
        self,
        server: HttpClient,
        path: str | None,
        parse: Callable[[bytes], T],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._path, self._parse, self._clock = server, path, parse, clock
        self._absent, self._next_at = False, 0.0

    def reset(self) -> None:
        """Try the path again, because a new process may serve it."""
        self._absent, self._next_at = False, 0.0

    def read(self) -> T | None:
        """Return the parsed answer; None if unknown."""
        now = self._clock()
        if self._path is None or self._absent or now < self._next_at:
            return None
        self._next_at = now + RETRY_INTERVAL_S
        try:
            status, body = self._server.call("GET", self._path, REQUEST_TIMEOUT_S)
            self._absent = status == HTTP_NOT_FOUND
            value = self._parse(body) if status == 200 else None
        except (EngineError, MalformedError):
            return None
        if value is not None:
            self._next_at = now
        return value
