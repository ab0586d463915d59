"""Full lists beside the watches: they heal what a watch missed, and show that it did.

kopf does not report an object that is gone from the list with which it begins a watch, so each
such list is followed by one of ours. See ``docs/decisions/0001-operator-runtime.md``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Sequence

from plimsoll_operator.config import CLOCKS, Clocks
from plimsoll_operator.kinds import OPTIONAL, WATCHED, Key, Kind
from plimsoll_operator.runtime.cache import OWNERS, Listed, Store
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.watches import Watches

log = logging.getLogger(__name__)

MAX_WAITS = 20
"""A watch that begins again all the time does not delay the list for ever."""


class Resync:
    """List every kind, compare with the cache, and queue every service.

    ``served`` has the optional kinds that the cluster had at the last list.
    """

    def __init__(
        self,
        api: Api,
        store: Store,
        watches: Watches,
        add: Callable[[Key], None],
        namespaces: Sequence[str],
        clocks: Clocks = CLOCKS,
    ) -> None:
        self._clocks = clocks
        self._api, self._store, self._watches, self._add = api, store, watches, add
        self._namespaces = namespaces
        self._first = True
        self.served: set[str] = set()

    async def run(self, every_s: float) -> None:
        """List for ever: each ``every_s`` seconds, and soon after a watch failed or went stale."""
        while True:
            period = min(every_s, self._clocks.suspicious) if self._watches.stale(1) else every_s
            interrupted = await _within(period, self._watches.listing)
            if interrupted:
                await quiet(self._watches.listing, self._clocks.quiet)
            try:
                await self.list_all(count_missed=not interrupted)
            except (ApiError, OSError, TimeoutError) as error:
                if interrupted:
                    self._watches.listing.set()
                log.warning("resync: %s", str(error) or repr(error))

    async def list_all(self, count_missed: bool = True) -> None:
        """List all kinds and queue all services; look for the kinds that a cluster may lack.

        Where ``count_missed``, changes without an event are counted against their watch, once
        events had ``clocks.event`` to arrive. The first list has nothing to compare with.
        """
        self._store.begin_listing()
        optional = [kind for kind in OPTIONAL if await self._api.serves(kind)]
        self.served.clear()
        self.served.update(kind.kind for kind in optional)
        owners: set[Key] = set()
        lists = []
        for kind in (*WATCHED, *optional):  # services and policies come first
            items, version = await self._list(kind, owners)
            if kind.kind in OWNERS:
                owners.update(one.key for one in items)
            lists.append((kind, items, version))
        if not self._first:
            await asyncio.sleep(self._clocks.event)
        for kind, items, version in lists:
            missed = self._store.replace(kind.kind, items, version)
            if kind.watched and count_missed and not self._first:
                self._watches.count_missed(kind.kind, missed)
        self._first = False
        for key in self._store.known():
            self._add(key)

    async def _list(self, kind: Kind, owners: Container[Key]) -> tuple[list[Listed], str]:
        """All objects of a kind, and the version of the list: the oldest one of several lists."""
        items: list[Listed] = []
        versions = []
        for namespace in self._namespaces or (None,):
            async for page, version in self._api.pages(kind, namespace):
                # Packed at once: unpacked, all of them are ten times as large.
                items += self._store.listed(page, owners)
                versions.append(version)
        return items, min(versions, key=lambda text: int(text) if text.isdigit() else 0)


async def quiet(listing: asyncio.Event, for_s: float) -> None:
    """Return with ``listing`` cleared, once it was not set for ``for_s`` seconds."""
    for _ in range(MAX_WAITS):
        listing.clear()
        await asyncio.sleep(for_s)
        if not listing.is_set():
            return
    listing.clear()


async def _within(seconds: float, event: asyncio.Event) -> bool:
    """Whether ``event`` was set in time."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
