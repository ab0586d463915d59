"""The way to the next version of the API: both are served, nothing is lost either way, and the
stored version moves without a service noticing.

The definition is the real one under a group of its own, so that no other test meets it.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from plimsoll_api import generate
from plimsoll_operator.kinds import Kind
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.queue import RateLimit
from tests.cluster.operator.test_crd_fuzz import specs

NOW, NEXT = "v1alpha1", "v1beta1"
MADE = 160


def definition(group: str) -> dict[str, Any]:
    """InferenceService in ``group``, stored as it is now, and served in the next version, too.

    By the rule for new fields (docs/operations.md) the next version's are in both schemas.
    """
    made = copy.deepcopy(generate.make_inference_service_crd())
    made["metadata"]["name"] = f"inferenceservices.{group}"
    spec = made["spec"]
    spec["group"] = group
    del spec["names"]["shortNames"], spec["names"]["categories"]
    (now,) = spec["versions"]
    fields = now["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    fields["model"]["properties"]["format"] = {"type": "string", "maxLength": 32}
    spec["versions"] = [now, now | {"name": NEXT, "storage": False}]
    return made


@pytest.fixture
def group(kubectl: Any) -> Iterator[str]:
    group = f"v{uuid.uuid4().hex[:8]}.plimsoll.dev"
    serve(kubectl, definition(group))
    yield group
    kubectl("delete", "crd", f"inferenceservices.{group}", "--wait=false")


def serve(kubectl: Any, item: dict[str, Any]) -> None:
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(item))
    kubectl.established(item["metadata"]["name"])


def kinds(group: str) -> tuple[Kind, Kind]:
    now, following = (
        Kind("InferenceService", group, version, "inferenceservices", "") for version in (NOW, NEXT)
    )
    return now, following


def test_both_versions_hold_the_same_and_the_stored_one_moves(kubectl: Any, group: str) -> None:
    before = asyncio.run(both_ways(kubectl, group))
    assert len(before) > 20, "enough of the generated specs were accepted"
    name = f"inferenceservices.{group}"

    crd = definition(group)
    for version in crd["spec"]["versions"]:
        version["storage"] = version["name"] == NEXT
    serve(kubectl, crd)
    assert kubectl.get("crd", name)["status"]["storedVersions"] == [NOW, NEXT]
    without = crd | {"spec": crd["spec"] | {"versions": crd["spec"]["versions"][1:]}}
    early = kubectl.run("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(without))
    assert "storedVersions" in early.stderr, "the API server keeps a version that may be stored"

    asyncio.run(rewrite(kubectl, group))
    kubectl.patch("crd", name, {"status": {"storedVersions": [NEXT]}}, "status")
    serve(kubectl, without)
    after = {item["metadata"]["name"]: item for item in kubectl.list(name)}
    assert {key: (item["spec"], item["metadata"]["uid"]) for key, item in after.items()} == before
    assert {item["apiVersion"] for item in after.values()} == {f"{group}/{NEXT}"}


async def both_ways(kubectl: Any, group: str) -> dict[str, tuple[Any, str]]:
    """Writes generated specs in one version and reads them in the other; specs and uids by name."""
    now, following = kinds(group)
    found = {}
    api = await Api.connect(str(kubectl.kubeconfig), 30.0, RateLimit(500, 500))
    try:
        for index, spec in enumerate(specs(MADE, seed=11)):
            written, read = (now, following) if index % 4 < 2 else (following, now)
            item = {
                "apiVersion": f"{group}/{written.version}",
                "kind": "InferenceService",
                "metadata": {"name": f"any-{index}", "namespace": kubectl.namespace},
                "spec": next_shape(spec),
            }
            try:
                made = await api.create(written, item)
            except ApiError as error:
                if error.status not in (400, 422):
                    raise
                continue
            name = made["metadata"]["name"]
            seen = await api.get(read, kubectl.namespace, name)
            assert seen is not None
            assert seen["spec"] == made["spec"], f"read as {read.version}"
            put = await api.replace(read, seen)
            assert put["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
            found[name] = (made["spec"], made["metadata"]["uid"])
    finally:
        await api.close()
    return found


def next_shape(spec: dict[str, Any]) -> dict[str, Any]:
    """``spec`` with a field of the next version, where it has a model to hold one."""
    model = spec.get("model")
    return spec | {"model": model | {"format": "safetensors"}} if isinstance(model, dict) else spec


async def rewrite(kubectl: Any, group: str) -> None:
    """Writes every object back as it is: that is the whole migration of the stored version."""
    _, following = kinds(group)
    api = await Api.connect(str(kubectl.kubeconfig), 30.0, RateLimit(500, 500))
    try:
        async for items, _ in api.list_pages(following, kubectl.namespace):
            for item in items:
                await api.replace(following, item)
    finally:
        await api.close()
