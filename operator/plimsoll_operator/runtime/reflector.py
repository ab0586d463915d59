"""List and then watch one kind, without missing changes in between.

kopf watches most objects that the leader reconciles; reflectors watch the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.runtime.client import (
    METADATA_MEDIA_TYPE,
    OBJECT_MEDIA_TYPE,
    Api,
    ApiError,
    is_outage,
)
from plimsoll_operator.runtime.queue import compute_backoff_s

log = logging.getLogger(__name__)

GONE_STATUS = 410
"""HTTP status for a resource version that is too old, after which the reflector lists again."""


class Reflector:
    """Reflector that lists and watches one kind.

    ``on_list`` is called with each full list. ``on_event`` is called with each changed object, and
    with True if it was deleted.
    """

    def __init__(
        self,
        api: Api,
        kind: Kind,
        namespace: str | None,
        on_list: Callable[[list[Object]], None],
        on_event: Callable[[Object, bool], None],
        complete_objects: bool = False,
    ) -> None:
        self._api, self._kind, self._namespace, self._whole = api, kind, namespace, complete_objects
        self._on_list, self._on_event = on_list, on_event
        self.error: ApiError | OSError | TimeoutError | None = None
        """Last failure; None while the watch works."""
        self.tried = asyncio.Event()
        """Event that is set after the first list or failure."""
        self._failures = 0

    async def run(self) -> None:
        """List and watch until cancelled; after a failure, list again with an increasing delay."""
        while True:
            try:
                version = await self._list()
                self.error = None
                while True:
                    version = await self._watch(version)
                    self._failures = 0
            except (ApiError, OSError, TimeoutError) as error:
                self._failures += 1
                if (
                    isinstance(error, ApiError)
                    and error.status == GONE_STATUS
                    and self._failures == 1
                ):
                    continue
                self.error = error
                self.tried.set()
                where = self._namespace or "all namespaces"
                log.warning("failed to watch %s in %s: %r", self._kind.plural, where, error)
                delay = compute_backoff_s(self._failures, random.random(), is_outage(error))
                await asyncio.sleep(delay)

    async def _list(self) -> str:
        if self._namespace is not None and not self._whole:
            items, version = await self._api.list_metadata(self._kind, self._namespace)
        else:
            items, version = [], ""
            async for page, listed in self._api.list_pages(self._kind, self._namespace):
                items += page
                version = version or listed
        self._on_list(items)
        self.tried.set()
        return version

    async def _watch(self, version: str) -> str:
        """Watch until the server ends the watch; return the last resource version."""
        accept = OBJECT_MEDIA_TYPE if self._whole else METADATA_MEDIA_TYPE
        async for event, item in self._api.watch(self._kind, self._namespace, version, accept):
            version, self._failures = item["metadata"]["resourceVersion"], 0
            if event != "BOOKMARK":
                self._on_event(item, event == "DELETED")
        return version
