"""Clients of a Service in front of several pods: a new connection for each request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import httpx

from plimsoll_api.times import format_rfc3339_micro as rfc3339
from tests.lab.kube import eventually

PAUSE_S = 0.05
END_S = 90.0


class Visits:
    """``count`` clients that call ``ask`` until the block ends. kube-proxy chooses a pod for each
    connection. ``ask`` raises ValueError or an error of httpx for a request that failed."""

    def __init__(self, ask: Callable[[], None], count: int = 2) -> None:
        self._request = ask
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        self.answered = 0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        # A first packet that comes while kube-proxy writes a new Service's rules is lost.
        eventually(lambda: self._ask() is None, "the Service is forwarded", END_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=END_S)

    def _ask(self) -> str | None:
        """What went wrong, None where nothing did."""
        try:
            self._request()
        except (httpx.HTTPError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_S):
            trouble = self._ask()
            with self._lock:
                if trouble is None:
                    self.answered += 1
                else:
                    self.failures.append(f"{rfc3339(time.time())}: {trouble}")
