"""What the operator assumes of an API server: one table of cases, for the real one and the fake.

Each case is a coroutine with the client and an empty namespace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from plimsoll_operator.kinds import EVENT, KINDS_BY_NAME, POD, SERVICE, Object
from plimsoll_operator.render.names import FIELD_MANAGER, MANAGED_BY_LABEL
from plimsoll_operator.runtime.client import Api, ApiError, ConflictError

MAP, ACCOUNT, WORKLOAD = (
    KINDS_BY_NAME[kind] for kind in ("ConfigMap", "ServiceAccount", "Deployment")
)  # fmt: skip
GONE_S = 30.0
"""The real server's garbage collector takes its time."""


def made(kind: str, namespace: str, name: str = "one", **fields: Any) -> Object:
    found = KINDS_BY_NAME[kind]
    return {
        "apiVersion": f"{found.group}/{found.version}".lstrip("/"),
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {MANAGED_BY_LABEL: FIELD_MANAGER},
        },
        **fields,
    }


def service(namespace: str, **spec: Any) -> Object:
    item = made("InferenceService", namespace, spec={"model": {"uri": "file:///m"}} | spec)
    del item["metadata"]["labels"]
    return item


def workload(namespace: str, *images: str, **spec: Any) -> Object:
    labels = {"app": "one"}
    containers = [{"name": f"c{number}", "image": image} for number, image in enumerate(images)]
    template = {"metadata": {"labels": labels}, "spec": {"containers": containers}}
    whole = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template} | spec
    return made("Deployment", namespace, spec=whole)


def version(item: Object) -> str:
    return str(item["metadata"]["resourceVersion"])


async def an_apply_creates_and_the_same_again_is_at_rest(api: Api, namespace: str) -> None:
    first = await api.apply(MAP, made("ConfigMap", namespace, data={"a": "1"}))
    assert first["metadata"]["uid"]
    assert "managedFields" not in first["metadata"]
    again = await api.apply(MAP, made("ConfigMap", namespace, data={"a": "1"}))
    assert version(again) == version(first)
    third = await api.apply(MAP, made("ConfigMap", namespace, data={"a": "2"}))
    assert int(version(third)) > int(version(first))
    assert third["metadata"]["uid"] == first["metadata"]["uid"]


async def an_apply_takes_its_own_fields_away_and_no_others(api: Api, namespace: str) -> None:
    await api.apply(MAP, made("ConfigMap", namespace, data={"a": "1", "b": "2"}))
    await api.apply(MAP, made("ConfigMap", namespace, data={"b": "2", "c": "3"}), manager="other")
    found = await api.apply(MAP, made("ConfigMap", namespace, data={"a": "9"}))
    assert found["data"] == {"a": "9", "b": "2", "c": "3"}
    found = await api.apply(MAP, made("ConfigMap", namespace), manager="other")
    assert found["data"] == {"a": "9"}


async def containers_are_told_apart_by_name(api: Api, namespace: str) -> None:
    await api.apply(WORKLOAD, workload(namespace, "a", "b"))
    other = workload(namespace)
    other["spec"]["template"]["spec"]["containers"] = [{"name": "added", "image": "x"}]
    await api.apply(WORKLOAD, other, manager="other")
    found = await api.apply(WORKLOAD, workload(namespace, "z"))
    containers = found["spec"]["template"]["spec"]["containers"]
    assert [(one["name"], one["image"]) for one in containers] == [("c0", "z"), ("added", "x")]


async def an_old_version_is_a_conflict(api: Api, namespace: str) -> None:
    first = await api.apply(MAP, made("ConfigMap", namespace, data={"a": "1"}))
    second = await api.apply(MAP, made("ConfigMap", namespace, data={"a": "2"}))
    stale = made("ConfigMap", namespace, data={"a": "3"})
    stale["metadata"]["resourceVersion"] = version(first)
    with pytest.raises(ConflictError):
        await api.apply(MAP, stale)
    with pytest.raises(ConflictError):
        await api.replace(MAP, first)
    replaced = await api.replace(MAP, second | {"data": {"a": "4"}})
    assert replaced["data"] == {"a": "4"}


async def what_is_new_takes_nothing_over(api: Api, namespace: str) -> None:
    await api.apply_new(MAP, made("ConfigMap", namespace, data={"a": "1"}))
    with pytest.raises(ConflictError):
        await api.apply_new(MAP, made("ConfigMap", namespace, data={"a": "2"}))
    with pytest.raises(ConflictError):
        await api.create(MAP, made("ConfigMap", namespace, data={"a": "2"}))
    found = await api.get(MAP, namespace, "one")
    assert found is not None
    assert found["data"] == {"a": "1"}


async def what_is_not_there_is_none_or_said(api: Api, namespace: str) -> None:
    assert await api.get(MAP, namespace, "one") is None
    first = await api.apply(MAP, made("ConfigMap", namespace))
    assert await api.delete(MAP, first)
    assert await api.delete(MAP, first), "it is gone, which was wanted"
    assert not await api.evict(namespace, "nobody", "1")
    with pytest.raises(ApiError) as refused:
        await api.apply(SERVICE, service(namespace) | {"status": {}}, "status")
    assert (refused.value.status, refused.value.is_lasting) == (404, True)


async def what_changed_since_is_not_deleted(api: Api, namespace: str) -> None:
    first = await api.apply(MAP, made("ConfigMap", namespace, data={"a": "1"}))
    second = await api.apply(MAP, made("ConfigMap", namespace, data={"a": "2"}))
    assert not await api.delete(MAP, first)
    assert await api.delete(MAP, second)
    assert await api.get(MAP, namespace, "one") is None


async def a_later_pod_of_the_same_name_is_not_evicted(api: Api, namespace: str) -> None:
    wanted = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one", "namespace": namespace},
    }
    wanted |= {"spec": {"containers": [{"name": "engine", "image": "x"}]}}
    for _ in range(100):
        try:
            pod = await api.create(POD, wanted)
            break
        except ApiError as error:
            if "serviceaccount" not in error.message:  # a controller makes that of a new namespace
                raise
            await asyncio.sleep(0.1)
    assert "409" in await api.evict(namespace, "one", "00000000-0000-0000-0000-000000000000")
    assert await api.get(POD, namespace, "one") is not None
    assert await api.evict(namespace, "one", pod["metadata"]["uid"]) == ""
    assert await api.get(POD, namespace, "one") is None


async def a_bad_object_is_refused_with_its_field(api: Api, namespace: str) -> None:
    for spec, said in (
        ({"replicas": -1}, "spec.replicas"),
        ({"model": {"uri": "file://relative"}}, "model.uri must be"),
    ):
        with pytest.raises(ApiError, match=said) as refused:
            await api.apply(SERVICE, service(namespace, **spec))
        assert (refused.value.status, refused.value.is_lasting) == (422, True)
    assert await api.get(SERVICE, namespace, "one") is None


async def a_spec_has_defaults_and_a_generation_that_a_status_leaves(
    api: Api, namespace: str
) -> None:
    first = await api.apply(SERVICE, service(namespace))
    assert first["spec"]["replicas"] == 1
    assert first["metadata"]["generation"] == 1
    status = {"observedGeneration": 1, "replicas": 2}
    told = service(namespace) | {"status": status}
    del told["spec"]
    second = await api.apply(SERVICE, told, "status")
    assert second["status"] == status
    assert second["spec"] == first["spec"]
    assert second["metadata"]["generation"] == 1
    assert version(second) != version(first)
    third = await api.apply(SERVICE, service(namespace, replicas=3) | {"status": {"replicas": 9}})
    assert third["metadata"]["generation"] == 2
    assert third["status"] == status, "it is not written with the spec"
    told["status"] = {"replicas": 2}
    assert (await api.apply(SERVICE, told, "status"))["status"] == {"replicas": 2}


async def a_list_comes_in_pages_of_one_version(api: Api, namespace: str) -> None:
    for number in range(7):
        await api.apply(MAP, made("ConfigMap", namespace, f"n{number}"))
    other = made("ConfigMap", namespace, "not-ours")
    del other["metadata"]["labels"]
    await api.apply(MAP, other, manager="other")
    small = replace(MAP, page=3)
    pages = [page async for page in api.list_pages(small, namespace)]
    assert [len(items) for items, _ in pages] == [3, 3, 1]
    assert len({of for _, of in pages}) == 1
    items = [item for found, _ in pages for item in found]
    assert {item["metadata"]["name"] for item in items} == {f"n{number}" for number in range(7)}
    assert {(item["apiVersion"], item["kind"]) for item in items} == {("v1", "ConfigMap")}


async def what_an_owner_has_goes_with_it(api: Api, namespace: str) -> None:
    owner = await api.apply(ACCOUNT, made("ServiceAccount", namespace))
    about = {"apiVersion": "v1", "kind": "ServiceAccount", "name": "one"}
    item = made("ConfigMap", namespace)
    item["metadata"]["ownerReferences"] = [about | {"uid": owner["metadata"]["uid"]}]
    await api.apply(MAP, item)
    await api.apply(MAP, made("ConfigMap", namespace, "other"))
    assert await api.delete(ACCOUNT, owner)
    async with asyncio.timeout(GONE_S):
        while await api.get(MAP, namespace, "one") is not None:  # noqa: ASYNC110 - it is remote
            await asyncio.sleep(0.1)
    assert await api.get(MAP, namespace, "other") is not None


async def warnings_are_found_by_what_they_are_about(api: Api, namespace: str) -> None:
    for name, uid, kind in (
        ("a", "u-1", "Warning"),
        ("b", "u-1", "Normal"),
        ("c", "u-2", "Warning"),
    ):
        about = {"kind": "Pod", "name": "p", "namespace": namespace, "uid": uid}
        await api.apply(
            EVENT,
            {
                "apiVersion": "v1", "kind": "Event", "type": kind, "reason": "R", "message": name,
                "metadata": {"name": name, "namespace": namespace}, "involvedObject": about,
            },
        )  # fmt: skip
    assert [one["message"] for one in await api.list_object_events(namespace, "u-1")] == ["a"]


async def an_api_is_there_or_is_not(api: Api, namespace: str) -> None:
    assert await api.serves(MAP)
    assert await api.serves(POD)
    assert not await api.serves(KINDS_BY_NAME["PodMonitor"])


CASES: list[Callable[[Api, str], Awaitable[None]]] = [
    an_apply_creates_and_the_same_again_is_at_rest,
    an_apply_takes_its_own_fields_away_and_no_others,
    containers_are_told_apart_by_name,
    an_old_version_is_a_conflict,
    what_is_new_takes_nothing_over,
    what_is_not_there_is_none_or_said,
    what_changed_since_is_not_deleted,
    a_later_pod_of_the_same_name_is_not_evicted,
    a_bad_object_is_refused_with_its_field,
    a_spec_has_defaults_and_a_generation_that_a_status_leaves,
    a_list_comes_in_pages_of_one_version,
    what_an_owner_has_goes_with_it,
    warnings_are_found_by_what_they_are_about,
    an_api_is_there_or_is_not,
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
