"""List all objects regularly, to repair and count the changes that a watch missed.

kopf does not report objects that were deleted before it starts a watch. See
``docs/decisions/0001-operator-runtime.md``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Sequence

from plimsoll_operator.config import DEFAULT_INTERVALS, Intervals
from plimsoll_operator.kinds import LEADER_WORKER_SET, OPTIONAL_KINDS, WATCHED_KINDS, Key, Kind
from plimsoll_operator.runtime.cache import OWNER_KINDS, ListedObject, Store
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.watches import Watches

log = logging.getLogger(__name__)

MAX_LIST_DELAYS = 20
"""Maximum number of times that watches which restart can delay a list."""


class Resync:
    """Loop that lists every kind, updates the cache, and queues all services and policies.

    ``served`` contains the optional kinds that the cluster served at the last list.
    """

    def __init__(
        self,
        api: Api,
        store: Store,
        watches: Watches,
        add: Callable[[Key], None],
        namespaces: Sequence[str],
        intervals: Intervals = DEFAULT_INTERVALS,
    ) -> None:
        self._intervals = intervals
        self._api, self._store, self._watches, self._add = api, store, watches, add
        self._namespaces = namespaces
        self._first = True
        self.served: set[str] = set()
        self.groups = asyncio.Event()

    async def run(self, interval_s: float) -> None:
        """List all objects every ``interval_s`` seconds, or sooner after a watch's restart."""
        while True:
            period = (
                min(interval_s, self._intervals.suspicious)
                if self._watches.list_stale_kinds(1)
                else interval_s
            )
            interrupted = await _is_set_within(period, self._watches.listing)
            if interrupted:
                await wait_until_quiet(self._watches.listing, self._intervals.quiet)
            try:
                await self.list_all(count_missed=not interrupted)
            except (ApiError, OSError, TimeoutError) as error:
                if interrupted:
                    self._watches.listing.set()
                log.warning("resync: failed to list objects: %s", str(error) or repr(error))

    async def list_all(self, count_missed: bool = True) -> None:
        """List all kinds, detect the optional kinds, and queue all services and policies.

        With ``count_missed``, each change without an event counts as missed by the watch.
        """
        self._store.begin_listing()
        optional = [kind for kind in OPTIONAL_KINDS if await self._api.serves(kind)]
        self.served.clear()
        self.served.update(kind.kind for kind in optional)
        if LEADER_WORKER_SET in optional:
            self.groups.set()
        owners: set[Key] = set()
        lists = []
        for kind in (*WATCHED_KINDS, *optional):  # services and policies come first
            items, version = await self._list_kind(kind, owners)
            if kind.kind in OWNER_KINDS:
                owners.update(one.key for one in items)
            lists.append((kind, items, version))
        if not self._first:
            await asyncio.sleep(self._intervals.event)
        for kind, items, version in lists:
            missed = self._store.replace(kind.kind, items, version)
            if kind.watched and count_missed and not self._first:
                self._watches.count_missed(kind.kind, missed)
        self._first = False
        for key in self._store.list_known_keys():
            self._add(key)

    async def _list_kind(
        self, kind: Kind, owners: Container[Key]
    ) -> tuple[list[ListedObject], str]:
        """Return all objects of a kind, and the list's oldest resource version."""
        items: list[ListedObject] = []
        versions = []
        for namespace in self._namespaces or (None,):
            async for page, version in self._api.list_pages(kind, namespace):
                # Compress page by page: the uncompressed list would be ten times as large.
                items += self._store.compress_listed(page, owners)
                versions.append(version)
        return items, min(versions, key=lambda text: int(text) if text.isdigit() else 0)


async def wait_until_quiet(listing: asyncio.Event, quiet_s: float) -> None:
    """Clear ``listing``; return once it has not been set for ``quiet_s`` seconds."""
    for _ in range(MAX_LIST_DELAYS):
        listing.clear()
        await asyncio.sleep(quiet_s)
        if not listing.is_set():
            return
    listing.clear()


async def _is_set_within(seconds: float, event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
