"""Reads the supervisors' memory figures from their pods, bounded in every direction."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp

from plimsoll_operator.kinds import Object
from plimsoll_operator.render.paths import METRICS_PORT
from plimsoll_operator.status.figures import Figures, memory, parse
from plimsoll_operator.store import Key, Store

log = logging.getLogger(__name__)

TIMEOUT_S = 3.0
AT_ONCE = 16
MAX_BYTES = 1 << 20
PUBLISH_S = 60.0
"""A figure in a status moves at most this often; the first one comes at once."""


class Scraper:
    """``changed`` is called with each service whose published figures changed."""

    def __init__(
        self,
        store: Store,
        changed: Callable[[Key], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._changed, self._clock = store, changed, clock
        self._published: dict[Key, tuple[float, dict[str, Figures]]] = {}
        self.failures = 0

    def published(self, key: Key) -> dict[str, Figures] | None:
        """Figures by pod name; None until the service was asked for the first time."""
        found = self._published.get(key)
        return found[1] if found else None

    def forget(self, key: Key) -> None:
        """After the service is gone."""
        self._published.pop(key, None)

    def publish(self, key: Key, fresh: dict[str, Figures]) -> None:
        """Takes ``fresh`` for the status when it reads differently there and the time has come."""
        now = self._clock()
        known = self._published.get(key)
        if known and _shown(known[1]) == _shown(fresh):
            return
        if known and memory(known[1]) and now - known[0] < PUBLISH_S:
            return
        self._published[key] = (now, fresh)
        self._changed(key)

    async def run(self, every_s: float) -> None:
        """Scrapes for ever."""
        limit = asyncio.Semaphore(AT_ONCE)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while True:
                await asyncio.sleep(every_s)
                keys = self._store.services()
                await asyncio.gather(*(self._service(session, limit, key) for key in keys))

    async def _service(
        self, session: aiohttp.ClientSession, limit: asyncio.Semaphore, key: Key
    ) -> None:
        addresses = {
            pod["metadata"]["name"]: address
            for pod in self._store.of(key, {"Pod"})
            if (address := _address(pod))
        }
        found = await asyncio.gather(
            *(self._one(session, limit, address) for address in addresses.values())
        )
        figures = zip(addresses, found, strict=True)
        self.publish(key, {pod: one for pod, one in figures if one is not None})

    async def _one(
        self, session: aiohttp.ClientSession, limit: asyncio.Semaphore, address: str
    ) -> Figures | None:
        async with limit:
            try:
                async with session.get(f"http://{address}:{METRICS_PORT}/metrics") as answer:
                    answer.raise_for_status()
                    text = (await answer.content.read(MAX_BYTES)).decode(errors="replace")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.failures += 1
                log.debug("metrics of %s: %r", address, error)
                return None
        return parse(text)


def _shown(figures: dict[str, Figures]) -> tuple[object, ...]:
    """What a status says of ``figures``."""
    spent = {pod for pod, one in figures.items() if one.restarts_left == 0}
    known = any(one.restarts_left is not None for one in figures.values())
    return memory(figures), spent, known


def _address(pod: Object) -> str | None:
    """The address of a running pod, in brackets where it is IPv6."""
    status = pod.get("status") or {}
    address = status.get("podIP") if status.get("phase") == "Running" else None
    return f"[{address}]" if address and ":" in address else address
