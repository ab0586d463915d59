"""Who is next where many clients want one thing: each client in its turn, whatever it asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect

Left = Callable[[], Coroutine[Any, Any, None]]
"""Returns once a client has left."""


class Turns:
    """``places`` may be held at once. How many wait is the caller's to bound."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, client: str, left: Left | None = None) -> AsyncIterator[None]:
        """Hold a place; clients that wait get the free ones round and round.

        Raises ClientDisconnect where ``left`` returns before there is one.
        """
        await self._take(client, left)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, client: str, left: Left | None) -> None:
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        leaving = None if left is None else asyncio.ensure_future(left())
        if leaving is not None:
            leaving.add_done_callback(lambda _: mine.cancel())
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._pass_on()  # it had become ours meanwhile
            task = asyncio.current_task()
            if (
                leaving is not None
                and leaving.done()
                and task is not None
                and not task.cancelling()
            ):
                raise ClientDisconnect from None
            raise
        finally:
            if leaving is not None:
                leaving.cancel()

    def _pass_on(self) -> None:
        while self._waiting:
            client, queue = self._waiting.popitem(last=False)
            while queue:
                next_one = queue.popleft()
                if next_one.done():
                    continue  # cancelled
                if queue:
                    self._waiting[client] = queue  # behind the others
                next_one.set_result(None)
                return
        self._free += 1
