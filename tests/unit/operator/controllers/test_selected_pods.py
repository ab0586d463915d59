"""The pods of policies, from a list and a watch of their metadata: what is read, and when.

Tests ``controllers/selected_pods.py`` and ``runtime/reflector.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest

from plimsoll_api.names import POLICY_LABEL
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.config import DEFAULT_IMAGES
from plimsoll_operator.controllers.selected_pods import MAX_SINGLE_READS, PolicyPods
from plimsoll_operator.fleet.selected_pods import SupervisionState
from plimsoll_operator.kinds import POD, Key, Kind, Object, parse_object
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import METADATA_PAGE_OBJECTS, Api, ApiError
from tests.fake_api import FakeApi

NOW = "2026-01-01T00:00:00Z"
KEY = Key("ml", "engines", "SupervisionPolicy")


def policy(name: str = "engines", generation: int = 1, app: str = "vllm") -> Object:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {
            "name": name, "namespace": "ml", "uid": name, "generation": generation,
            "resourceVersion": str(generation),
        },
        "spec": {"selector": {"matchLabels": {"app": app}}},
    }  # fmt: skip


class Server:
    """Pods by name, a watch of them, and every read of one or all."""

    def __init__(self, *pods: str) -> None:
        self.version = 1
        self.pods: dict[str, Object] = {}
        self.events: asyncio.Queue[tuple[str, Object] | Exception] = asyncio.Queue()
        self.reads: list[str] = []
        self.lists = 0
        self.refusal: Exception | None = None
        for name in pods:
            self.put(name)
        self.events = asyncio.Queue()

    def put(
        self, name: str, app: str = "vllm", label: str = "", has_supervisor: bool = True
    ) -> None:
        self.version += 1
        labels = {"app": app} | ({POLICY_LABEL: label} if label else {})
        meta = {"name": name, "labels": labels, "resourceVersion": str(self.version)}
        spec: Object = {"containers": []}
        if label and has_supervisor:
            spec["initContainers"] = [{"name": "supervisor", "restartPolicy": "Always"}]
        known, self.pods[name] = name in self.pods, {"metadata": meta, "spec": spec}
        self.events.put_nowait(("MODIFIED" if known else "ADDED", {"metadata": meta}))

    def drop(self, name: str) -> None:
        self.version += 1
        meta = self.pods.pop(name)["metadata"] | {"resourceVersion": str(self.version)}
        self.events.put_nowait(("DELETED", {"metadata": meta}))

    async def list_metadata(self, kind: Kind, namespace: str) -> tuple[list[Object], str]:
        self.lists += 1
        if self.refusal:
            raise self.refusal
        return [{"metadata": one["metadata"]} for one in self.pods.values()], str(self.version)

    async def watch(
        self, kind: Kind, namespace: str, version: str, accept: str
    ) -> AsyncIterator[tuple[str, Object]]:
        while True:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            yield event

    async def list_pages(
        self, kind: Kind, namespace: str, name: str = ""
    ) -> AsyncIterator[tuple[list[Object], str]]:
        self.reads.append(name or kind.selector)
        yield [one for key, one in self.pods.items() if name in ("", key)], str(self.version)


def run(server: Server, check: Callable[[PolicyPods, Store, list[Key]], Awaitable[None]]) -> None:
    async def main() -> None:
        store, changed = Store(), list[Key]()
        store.put(policy())
        pods = PolicyPods(
            cast("Api", server), store, DEFAULT_IMAGES, changed.append, 5.0, 0.0, lambda: NOW
        )
        pods.sync(KEY)
        await check(pods, store, changed)

    asyncio.run(main())


async def names(pods: PolicyPods, item: Object | None = None) -> list[str]:
    found, _ = await pods.read(KEY, parse_object(SupervisionPolicy, item or policy()))
    return [one.name for one in found]


async def settled(changed: list[Key]) -> list[Key]:
    for _ in range(20):
        await asyncio.sleep(0.001)
    told, changed[:] = list(changed), []
    return told


def test_only_what_changed_is_read_again() -> None:
    server = Server(*(f"p-{number}" for number in range(MAX_SINGLE_READS + 1)))

    async def check(pods: PolicyPods, store: Store, changed: list[Key]) -> None:
        assert len(await names(pods)) == MAX_SINGLE_READS + 1
        assert server.reads == ["app=vllm"], "many are listed"
        await settled(changed)
        await names(pods)
        assert server.reads == ["app=vllm"], "nothing changed"
        server.put("p-0")
        server.put("other", app="x")
        assert await settled(changed) == [KEY], "of the selected one alone"
        await names(pods)
        assert server.reads == ["app=vllm", "p-0"]
        server.drop("p-0")
        server.put("p-1", app="x")
        assert await settled(changed) == [KEY]
        assert len(await names(pods)) == MAX_SINGLE_READS - 1
        assert server.reads == ["app=vllm", "p-0"]

    run(server, check)


def test_a_supervised_pod_stays_with_its_policy_until_it_is_recreated() -> None:
    """Whether the policy's selector changed or somebody took the pod's label to look at it: it is
    restarted, scraped and evicted as before, and its incidents are not those of a pod that is gone.
    """
    server = Server("p-0")
    server.put("p-1", label="engines")
    server.put("p-2", app="x", label="engines", has_supervisor=False)

    async def check(pods: PolicyPods, store: Store, changed: list[Key]) -> None:
        assert await names(pods) == ["p-0", "p-1"], "the label alone is nothing"
        await settled(changed)
        server.put("p-1", app="x", label="engines")
        assert await settled(changed) == [KEY]
        for generation in (1, 2):
            item = policy(generation=generation, app="vllm" if generation == 1 else "y")
            store.put(item)
            store.put(policy("younger", app="x"))
            pods.sync(KEY)
            found, _ = await pods.read(KEY, parse_object(SupervisionPolicy, item))
            assert [one.name for one in found] == ["p-0", "p-1"][generation - 1 :]
            assert found[-1].state is SupervisionState.SUPERVISED
            assert (found[-1].other_policies, found[-1].is_oldest_policy) == ((), True)
        reads = list(server.reads)
        assert await names(pods, item) == ["p-1"]
        assert server.reads == reads, "what is not supervised is not read again and again"
        for number in range(MAX_SINGLE_READS):
            server.put(f"q-{number}", app="z", label="engines")
        server.put("r", app="y")
        await settled(changed)
        assert len(await names(pods, item)) == MAX_SINGLE_READS + 2
        assert server.reads[len(reads) :] == [f"{POLICY_LABEL}=engines", "app=y"]

    run(server, check)


def test_a_version_that_is_too_old_is_listed_anew() -> None:
    server = Server("p-0")

    async def check(pods: PolicyPods, store: Store, changed: list[Key]) -> None:
        assert await names(pods) == ["p-0"]
        await settled(changed)
        del server.pods["p-0"]  # while nobody watched
        server.events.put_nowait(ApiError(410, "Expired", "too old resource version"))
        assert await settled(changed) == [KEY]
        assert await names(pods) == []
        assert server.lists == 2

    run(server, check)


def test_versions_that_are_always_too_old_are_not_listed_as_fast_as_it_goes() -> None:
    server = Server("p-0")

    async def check(pods: PolicyPods, store: Store, changed: list[Key]) -> None:
        for _ in range(5):
            server.events.put_nowait(ApiError(410, "Expired", "too old resource version"))
        await settled(changed)
        assert server.lists == 2

    run(server, check)


def test_a_list_of_anybodys_pods_is_read_in_pages_and_little_of_it_is_kept() -> None:
    api, count = FakeApi(), 2 * METADATA_PAGE_OBJECTS + 1
    for number in range(count):
        meta = {"name": f"p-{number}", "namespace": "ml", "annotations": {"large": "x" * 1000}}
        api.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta | {"labels": {"app": "vllm"}}})
    items, version = asyncio.run(api.list_metadata(POD, "ml"))
    assert api.requests == 3
    assert {one["metadata"]["name"] for one in items} == {f"p-{n}" for n in range(count)}
    assert items[0]["metadata"].keys() == {"name", "labels", "resourceVersion"}
    assert version == str(api._version)


def test_a_list_that_is_refused_is_told_and_not_taken_for_none() -> None:
    server = Server("p-0")
    server.refusal = ApiError(403, "Forbidden", "pods is forbidden")

    async def check(pods: PolicyPods, store: Store, changed: list[Key]) -> None:
        with pytest.raises(ApiError, match="forbidden"):
            await names(pods)

    run(server, check)


def test_other_policies_of_the_namespace_are_told_of_one_that_changes() -> None:
    """The oldest one that selects a pod has it."""
    server = Server("p-0")

    async def check(pods: PolicyPods, store: Store, changed: list[Key]) -> None:
        await names(pods)
        await settled(changed)
        store.put(policy("other"))
        other = Key("ml", "other", "SupervisionPolicy")
        pods.sync(other)
        assert KEY in await settled(changed)
        store.put(policy(generation=2, app="x"))
        pods.sync(KEY)
        assert other in await settled(changed)
        assert await names(pods, policy(generation=2, app="x")) == []
        for one in (policy(generation=2), policy("other")):
            store.remove(one)
        pods.sync(KEY)
        pods.sync(other)
        lists = server.lists
        server.events.put_nowait(ApiError(410, "Expired", "nobody listens"))
        await settled(changed)
        assert server.lists == lists, "without a policy nothing is watched"

    run(server, check)
