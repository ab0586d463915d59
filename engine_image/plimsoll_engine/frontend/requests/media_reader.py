"""Decode the images and audio clips of requests in threads, so that the event loop is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from plimsoll_engine.caches.processor_cache import ProcessorCache
from plimsoll_engine.errors import UsageError
from plimsoll_engine.frontend.requests.request_log import QueueFullError
from plimsoll_engine.multimodal.json_file import UnsupportedCheckpointError
from plimsoll_engine.multimodal.processor import ProcessedMedia, Processor
from plimsoll_engine.multimodal.processors import Processors, load_processors
from plimsoll_engine.settings import Settings

# Each thread may hold one decoded image of maximum size.
DECODING_THREADS = 2
# A file is at most as large as a request body.
MAX_WAITING_FILES = 64

Result = TypeVar("Result")


class MediaReader:
    """Reader of media files with a cache for up to ``capacity`` bytes of processed tensors."""

    def __init__(self, processors: Processors, capacity: int) -> None:
        self.processors = processors
        self.cache = ProcessorCache(capacity)
        self._threads = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="media")
        self._waiting = 0

    async def read(self, processor: Processor, data: bytes) -> ProcessedMedia:
        """Return the processed tensor of a file with the content ``data``.

        Raises MediaError, and QueueFullError if too many files wait.
        """
        key = await self.run(lambda: processor.hash_file(data))
        processed = self.cache.get(key)
        if processed is None:
            processed = await self.run(lambda: processor.process(data))
            self.cache.put(processed)
        return processed

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` in one of the threads. Raises QueueFullError if too many files wait."""
        if self._waiting >= MAX_WAITING_FILES:
            raise QueueFullError(
                f"{self._waiting} images and audio clips are waiting to be decoded: retry later"
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Refuse new files, and empty the cache. Files in a thread are still processed."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.cache.clear()


def create_reader(settings: Settings) -> MediaReader:
    """Return a media reader for the checkpoint. Raises UsageError."""
    try:
        return MediaReader(load_processors(settings.model), settings.worker.media_cache_bytes)
    except UnsupportedCheckpointError as error:
        raise UsageError(
            f"cannot process images or audio for the checkpoint of --model {settings.model}: "
            f"{error}"
        ) from None
