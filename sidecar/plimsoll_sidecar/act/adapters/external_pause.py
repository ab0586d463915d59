"""Whether an external engine holds its requests because somebody paused it.

vLLM says so in its development mode, at ``/is_paused``. SGLang does not: its ``/ready`` answers 503
while it is paused, but also once a health check failed, as that of an engine that hangs does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from plimsoll_api.decoding import Malformed, decode
from plimsoll_sidecar.clients.http import EngineError, HttpClient

ANSWER_S = 1.0
"""The server may pass the question on to a process that hangs."""
AGAIN_S = 10.0
"""Until a server that did not answer, or not properly, is asked again."""
NOT_FOUND = 404


class _Answer(msgspec.Struct):
    is_paused: bool


class PauseReader:
    """Asks ``path`` of a server; without one, or with none there, a pause is unknown."""

    def __init__(
        self,
        server: HttpClient,
        path: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._path, self._clock = server, path, clock
        self._absent, self._next = False, 0.0

    def forget(self) -> None:
        """Another process serves, which may have the route."""
        self._absent, self._next = False, 0.0

    def read(self) -> bool | None:
        """Return whether the engine is paused; None where the server does not say."""
        now = self._clock()
        if self._path is None or self._absent or now < self._next:
            return None
        self._next = now + AGAIN_S
        try:
            status, body = self._server.call("GET", self._path, ANSWER_S)
            self._absent = status == NOT_FOUND
            paused = decode(body, _Answer).is_paused if status == 200 else None
        except (EngineError, Malformed):
            return None
        if paused is not None:
            self._next = now
        return paused
