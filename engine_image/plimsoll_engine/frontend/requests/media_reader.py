"""Images and sounds of requests, processed beside the event loop by a few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from plimsoll_engine.caches.processor_cache import ProcessorCache
from plimsoll_engine.errors import UsageError
from plimsoll_engine.frontend.requests.request_log import QueueFull
from plimsoll_engine.multimodal.json_file import UnsupportedError
from plimsoll_engine.multimodal.processor import Processed, Processor
from plimsoll_engine.multimodal.processors import Processors, load_processors
from plimsoll_engine.settings import Settings

THREADS = 2
"""Each may hold one decoded image of the largest size."""
MAX_WAITING = 64
"""Files that wait for a thread; each is at most a request's body."""

Result = TypeVar("Result")


class MediaReader:
    """``capacity`` is the bytes of the cache of processed media."""

    def __init__(self, processors: Processors, capacity: int) -> None:
        self.processors = processors
        self.cache = ProcessorCache(capacity)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="media")
        self._waiting = 0

    async def read(self, processor: Processor, data: bytes) -> Processed:
        """Return the tensor of the file ``data``.

        Raises MediaError, and QueueFull where too many wait.
        """
        key = await self.run(lambda: processor.key(data))
        found = self.cache.get(key)
        if found is None:
            found = await self.run(lambda: processor.process(data))
            self.cache.put(found)
        return found

    async def run(self, work: Callable[[], Result]) -> Result:
        """``work`` in one of the threads. Raises QueueFull where too many wait."""
        if self._waiting >= MAX_WAITING:
            raise QueueFull(f"{self._waiting} images and sounds wait to be decoded: try again")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Take no more work; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.cache.clear()


def reader(settings: Settings) -> MediaReader:
    """Return the media reader of a checkpoint; UsageError names the file that is wrong."""
    try:
        return MediaReader(load_processors(settings.model), settings.media_cache_bytes)
    except UnsupportedError as error:
        raise UsageError(f"--model {settings.model}: {error}") from None
