"""Semaphore that gives its slots to waiting clients in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect

WaitDisconnect = Callable[[], Coroutine[Any, Any, None]]
"""Coroutine function that returns once a client has disconnected."""


class FairSemaphore:
    """Semaphore that gives its slots to waiting clients in turn."""

    def __init__(self, num_slots: int) -> None:
        self._free = num_slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def hold_slot(
        self, client: str, wait_for_disconnect: WaitDisconnect | None = None
    ) -> AsyncIterator[None]:
        """Hold a slot for ``client`` within the context. Raises ClientDisconnect."""
        await self._acquire(client, wait_for_disconnect)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, client: str, wait_for_disconnect: WaitDisconnect | None) -> None:
        if self._free:
            self._free -= 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(future)
        disconnect = (
            None if wait_for_disconnect is None else asyncio.ensure_future(wait_for_disconnect())
        )
        if disconnect is not None:
            disconnect.add_done_callback(lambda _: future.cancel())
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release()  # the slot was assigned before the cancellation
            task = asyncio.current_task()
            if (
                disconnect is not None
                and disconnect.done()
                and task is not None
                and not task.cancelling()
            ):
                raise ClientDisconnect from None
            raise
        finally:
            if disconnect is not None:
                disconnect.cancel()

    def _release(self) -> None:
        while self._waiting:
            client, queue = self._waiting.popitem(last=False)
            while queue:
                waiter = queue.popleft()
                if waiter.done():
                    continue  # cancelled
                if queue:
                    self._waiting[client] = queue  # after the other clients
                waiter.set_result(None)
                return
        self._free += 1
