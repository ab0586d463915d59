"""A list, then a watch, of one kind in one namespace or in all: nothing in between is missed.

kopf's watches cover what the leader reconciles. These serve two other needs. Every replica knows
the policies, by which its webhook decides; and in a namespace with policies, the leader watches the
pods of everybody, of which it asks for the metadata only.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.runtime.client import METADATA, WHOLE, Api, ApiError
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
        namespace: str | None,
        listed: Callable[[list[Object]], None],
        seen: Callable[[Object, bool], None],
        whole: bool = False,
    ) -> None:
        """Prepare to list and watch metadata, or with ``whole`` all of each object."""
        self._api, self._kind, self._namespace, self._whole = api, kind, namespace, whole
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
                where = self._namespace or "all namespaces"
                log.warning("%s of %s: %r", self._kind.plural, where, error)
                await asyncio.sleep(backoff(self._failures, random.random()))

    async def _list(self) -> str:
        if self._namespace is not None and not self._whole:
            items, version = await self._api.metadata(self._kind, self._namespace)
        else:
            items, version = [], ""
            async for page, listed in self._api.pages(self._kind, self._namespace):
                items += page
                version = version or listed
        self._listed(items)
        self.tried.set()
        return version

    async def _watch(self, version: str) -> str:
        """Watch until the server ends it; return the version to continue from."""
        accept = WHOLE if self._whole else METADATA
        async for event, item in self._api.watch(self._kind, self._namespace, version, accept):
            version, self._failures = item["metadata"]["resourceVersion"], 0
            if event != "BOOKMARK":
                self._seen(item, event == "DELETED")
        return version
