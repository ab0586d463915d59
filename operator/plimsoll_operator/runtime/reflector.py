"""A list, then a watch, of the metadata of one kind in one namespace: nothing in between is missed.

kopf's watches cover all namespaces for the life of the process. This one starts for a namespace
when a policy there needs it, and sees everybody's objects. So it asks for metadata only, page
by page.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.queue import backoff

log = logging.getLogger(__name__)

GONE = 410
"""The version to continue from is too old: everything is listed again, at once the first time. An
API server whose cache is behind another's may keep listing versions that are too old."""


class Reflector:
    """``listed`` takes each full list, ``seen`` an object and whether it is gone."""

    def __init__(
        self,
        api: Api,
        kind: Kind,
        namespace: str,
        listed: Callable[[list[Object]], None],
        seen: Callable[[Object, bool], None],
    ) -> None:
        self._api, self._kind, self._namespace = api, kind, namespace
        self._listed, self._seen = listed, seen
        self.error: ApiError | OSError | TimeoutError | None = None
        """Why the last try failed, while it is so."""
        self.tried = asyncio.Event()
        """Set once there is a list, or a reason why there is none."""
        self._failures = 0

    async def run(self) -> None:
        """List and watch until canceled; begin again, later each time until there is an event."""
        while True:
            try:
                version = await self._list()
                self.error = None
                while True:
                    version = await self._watch(version)
                    self._failures = 0
            except (ApiError, OSError, TimeoutError) as error:
                self._failures += 1
                if isinstance(error, ApiError) and error.status == GONE and self._failures == 1:
                    continue
                self.error = error
                self.tried.set()
                log.warning("%s of %s: %r", self._kind.plural, self._namespace, error)
                await asyncio.sleep(backoff(self._failures, random.random()))

    async def _list(self) -> str:
        items, version = await self._api.metadata(self._kind, self._namespace)
        self._listed(items)
        self.tried.set()
        return version

    async def _watch(self, version: str) -> str:
        """Watch until the server ends it; return the version to continue from."""
        async for event, item in self._api.watch(self._kind, self._namespace, version):
            version, self._failures = item["metadata"]["resourceVersion"], 0
            if event != "BOOKMARK":
                self._seen(item, event == "DELETED")
        return version
