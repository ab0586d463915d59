"""Everybody else while one client abuses the service: streams, probes, Prometheus.

What they see is what counts: a request that does not end as it should is a failure, by its words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

from bench.abuse_scene import Answer, Scene, exchange, request

REQUEST_S = 30.0
"""Longest wait of a small request, and of a stream of some seconds."""
STREAM_TOKENS = 100
PROBE_S = 1.0
"""Kubernetes' default of timeoutSeconds; the supervisor's readiness probe may fail no time."""
SCRAPE_S = 10.0
"""Prometheus' default of scrape_timeout."""
HEALTH_EVERY_S, PROBE_EVERY_S, SCRAPE_EVERY_S = 0.05, 0.5, 2.0
PAUSE_S = 0.2


class Others:
    """Another tenant's clients and the cluster's own. ``reset`` begins a new count."""

    def __init__(self, scene: Scene, streams: int = 3, small: int = 3) -> None:
        self._scene, self._streams, self._small = scene, streams, small
        self.reset()

    def reset(self) -> None:
        self.failures: Counter[str] = Counter()
        self.done = 0
        self.wait_max_s = 0.0
        self.health_max_s = 0.0

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[Others]:
        """They work within the block."""
        loops: list[Callable[[], Awaitable[None]]] = [
            *[lambda number=n: self._requests(number, True) for n in range(self._streams)],
            *[lambda number=n: self._requests(number, False) for n in range(self._small)],
            self._health,
            lambda: self._gets("probe", self._scene.probe_port, "/ready", PROBE_S, PROBE_EVERY_S),
            lambda: self._gets(
                "scrape", self._scene.metrics_port, "/metrics", SCRAPE_S, SCRAPE_EVERY_S
            ),
        ]
        tasks = [asyncio.ensure_future(loop()) for loop in loops]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

    async def _requests(self, number: int, stream: bool) -> None:
        turn = 0
        while True:
            turn += 1
            body: dict[str, object] = {
                "model": self._scene.model, "prompt": f"Ship {number} sails on tide {turn}",
                "max_tokens": STREAM_TOKENS if stream else 1 + turn % 4, "temperature": 0,
                "ignore_eos": True, "stream": stream,
            }  # fmt: skip
            if not stream and turn % 4 == 0:
                body |= {"structured_outputs": {"regex": "[a-z]{1,8}"}, "ignore_eos": False}
            sent = request(self._scene, "/v1/completions", json.dumps(body).encode())
            begin = time.monotonic()
            answer = await exchange(self._scene.port, sent, REQUEST_S)
            self.wait_max_s = max(self.wait_max_s, time.monotonic() - begin)
            self._count("stream" if stream else "request", _wrong(answer, stream))
            await asyncio.sleep(PAUSE_S)

    async def _health(self) -> None:
        """How long ``/health`` takes at most says how long the event loop was blocked."""
        sent = request(self._scene, "/health", method="GET")
        while True:
            begin = time.monotonic()
            answer = await exchange(self._scene.port, sent, REQUEST_S)
            self.health_max_s = max(self.health_max_s, time.monotonic() - begin)
            self._count("health", None if answer.status == 200 else str(answer.status))
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _gets(
        self, what: str, port: int, path: str, timeout_s: float, every_s: float
    ) -> None:
        while True:
            sent = request(self._scene, path, method="GET")
            answer = await exchange(port, sent, timeout_s)
            self._count(what, None if answer.status == 200 else str(answer.status))
            await asyncio.sleep(every_s)

    def _count(self, what: str, trouble: str | None) -> None:
        self.done += 1
        if trouble is not None:
            self.failures[f"{what}: {trouble}"] += 1


def _wrong(answer: Answer, stream: bool) -> str | None:
    if answer.status != 200:
        return f"{answer.status} {answer.body[:200].decode(errors='replace')}"
    if stream and (b"data: [DONE]" not in answer.body or b'"error"' in answer.body):
        return f"broken: {answer.body[-200:].decode(errors='replace')}"
    return None
