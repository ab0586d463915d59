"""A list, then a watch, of the metadata of one kind in one namespace: nothing in between is missed.

Beside kopf's watches, which are for good and for all namespaces: one of these is begun for a
namespace when somebody there needs it, and its objects may be anybody's. So it asks for metadata
alone, and the list may be answered from the API server's cache.
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
"""The version to go on from is too old by now: everything is listed anew."""


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

    async def run(self) -> None:
        """List and watch until canceled; begin again, later each time, after a failure."""
        failures = 0
        while True:
            try:
                version = await self._list()
                failures, self.error = 0, None
                while True:
                    version = await self._watch(version)
            except (ApiError, OSError, TimeoutError) as error:
                if isinstance(error, ApiError) and error.status == GONE:
                    continue
                failures, self.error = failures + 1, error
                self.tried.set()
                log.warning("%s of %s: %r", self._kind.plural, self._namespace, error)
                await asyncio.sleep(backoff(failures, random.random()))

    async def _list(self) -> str:
        items, version = await self._api.metadata(self._kind, self._namespace)
        self._listed(items)
        self.tried.set()
        return version

    async def _watch(self, version: str) -> str:
        """Watch until the server ends it; return the version to go on from."""
        async for event, item in self._api.watch(self._kind, self._namespace, version):
            version = item["metadata"]["resourceVersion"]
            if event != "BOOKMARK":
                self._seen(item, event == "DELETED")
        return version
