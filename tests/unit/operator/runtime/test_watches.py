"""The policies of a replica: from one list and one watch, in the store and for the webhook."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from plimsoll_operator.kinds import POLICY, Key, Kind, Object
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import OBJECT_MEDIA_TYPE, Api, ApiError
from plimsoll_operator.runtime.queue import WorkQueue
from plimsoll_operator.runtime.watches import PolicyWatch, Watches


def policy(name: str, version: int, namespace: str = "ml") -> Object:
    meta = {
        "name": name, "namespace": namespace, "uid": name, "resourceVersion": str(version),
        "managedFields": [],
    }  # fmt: skip
    return {"kind": POLICY.kind, "metadata": meta, "spec": {"selector": {}}}


class Server:
    """Policies by namespace, and the events of a watch."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Object]] = {"ml": {}, "other": {}}
        self.events: asyncio.Queue[tuple[str, Object] | Exception] = asyncio.Queue()
        self.lists: list[str | None] = []

    async def list_pages(
        self, kind: Kind, namespace: str | None
    ) -> AsyncIterator[tuple[list[Object], str]]:
        assert kind is POLICY
        self.lists.append(namespace)
        for name, held in self.held.items():
            if namespace in (None, name):
                yield list(held.values()), "7"

    async def watch(
        self, kind: Kind, namespace: str | None, version: str, accept: str
    ) -> AsyncIterator[tuple[str, Object]]:
        assert (version, accept) == ("7", OBJECT_MEDIA_TYPE)
        if namespace == "other":
            await asyncio.Event().wait()
        while True:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            yield event


@pytest.mark.parametrize("namespaces", [(), ("ml", "other")])
def test_a_replica_knows_the_policies_from_one_watch(namespaces: tuple[str, ...]) -> None:
    async def main() -> None:
        server, store, queue = Server(), Store(), WorkQueue[Key](1)
        told: list[tuple[str, bool]] = []
        watch = PolicyWatch(cast("Api", server), store, Watches(store, queue), namespaces)
        watch.on_change = lambda item, gone: told.append((item["metadata"]["name"], gone))
        server.held["ml"] = {"a": policy("a", 1), "b": policy("b", 2)}
        server.held["other"] = {"c": policy("c", 3, "other")}
        assert not watch.is_current()
        task = asyncio.create_task(watch.run())
        await settled()
        assert watch.is_current()
        assert server.lists == [*(namespaces or (None,))]
        assert sorted(told) == [("a", False), ("b", False), ("c", False)]
        assert len(store.list_kind(POLICY.kind)) == len(queue) == 3

        server.events.put_nowait(("DELETED", policy("a", 8)))
        await settled()
        assert told[-1] == ("a", True)
        assert names(store) == {"b", "c"}

        # What goes while the watch is away is in no event, but not in the next list either.
        del server.held["ml"]["a"], server.held["ml"]["b"]
        server.events.put_nowait(ApiError(410, "Expired", "too old"))
        await settled()
        assert ("b", True) in told
        assert names(store) == {"c"}, "policies of another namespace stay"

        server.events.put_nowait(OSError("away"))
        await settled()
        assert not watch.is_current()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def names(store: Store) -> set[str]:
    return {one["metadata"]["name"] for one in store.list_kind(POLICY.kind)}


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
