"""Specs at random: what the operator renders from an admitted one, a real API server takes.

The API server has the definitions of all optional kinds, and the webhook of LeaderWorkerSets where
its controller can be built. Each object that differs from those before is created in a dry run. A
pod template, peers and variables from other objects have an open schema, so they are left out: the
operator's status has the server's words about them.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll_operator.kinds import KINDS_BY_NAME, OPTIONAL_KINDS, InvalidSpecError
from plimsoll_operator.plans.service import make_plan, parse_service
from plimsoll_operator.render.names import compute_digest
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.queue import RateLimit
from tests.cluster.operator.test_crd_fuzz import IMAGES, SPEC, value
from tests.cluster.test_integrations import define
from tests.lab import binaries
from tests.lab.definitions import Definitions
from tests.lab.errors import MissingError
from tests.lab.kube import Kube
from tests.lab.lab import namespace, new_lab
from tests.lab.leader_worker_set import LeaderWorkerSets
from tests.lab.objects import Refused

FIELDS = (
    "replicas", "autoscaling", "parallelism", "memory", "supervision", "restart", "rollout",
    "disruption", "service", "gateway",
)  # fmt: skip
MONITORING = {"PodMonitor", "PrometheusRule"}
DEVICES = ("nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "rdma/hca")
WHOLE_ONE_IN = 10
"""One in so many specs has all fields; the others have few of them, and are admitted more often."""
FITTING = 0.8
"""Share of the parallelisms that are made for their engine."""
SENT_AT_ONCE = 8
COUNTS = (150, pytest.param(5000, marks=(pytest.mark.long, pytest.mark.timeout(3600))))


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    """A control plane of its own: other tests need clusters without these kinds."""
    lab = new_lab(node=False)
    lab.start()
    try:
        define(lab.kube, binaries.GATEWAY, binaries.INFERENCE, binaries.KEDA)
        try:
            groups = LeaderWorkerSets(lab)
        except MissingError as missing:
            pytest.skip(str(missing))
        groups.start()
        with namespace(lab.kube) as found:
            yield found
        groups.stop()
    finally:
        lab.stop()


def engine(dice: random.Random) -> dict[str, Any]:
    """An engine with devices; most can have several nodes."""
    made: dict[str, Any] = {"type": dice.choice(("vllm", "vllm", "sglang", "plimsoll", "custom"))}
    if made["type"] != "plimsoll":
        made["image"] = "e:1"
    limits = {name: str(dice.choice((1, 2, 4, 8))) for name in DEVICES if dice.random() < 0.3}
    if dice.random() < 0.5:
        limits["memory"] = "64Gi"
    resources: dict[str, Any] = {"limits": limits}
    if dice.random() < 0.2:
        claims = SPEC["properties"]["engine"]["properties"]["resources"]["properties"]
        resources["resourceClaims"] = value(claims["resourceClaims"], dice)
    return made | {"resources": resources}


def specs(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """As the generator of all specs makes them, with engines that mean something."""
    dice = random.Random(seed)
    for _ in range(count):
        share = 1.0 if dice.randrange(WHOLE_ONE_IN) == 0 else 0.25
        spec: dict[str, Any] = {"model": {"uri": "file:///m"}, "engine": engine(dice)}
        for name in FIELDS:
            if dice.random() < share:
                spec[name] = value(SPEC["properties"][name], dice)
        if "parallelism" in spec and dice.random() < FITTING:
            spec["engine"] |= {"type": dice.choice(("vllm", "sglang")), "image": "e:1"}
            spec["parallelism"] = {
                name: dice.choice((1, 2, 4, 8))
                for name in ("tensor", "pipeline", "data", "devicesPerNode")
                if dice.random() < share + 0.2
            }
        yield spec


@pytest.mark.parametrize("count", COUNTS)
def test_the_api_server_takes_what_is_rendered_from_an_admitted_spec(
    kube: Kube, definitions: Definitions, count: int
) -> None:
    seed = int(os.environ.get("PLIMSOLL_FUZZ_SEED", "1"))
    found: Counter[str] = Counter()
    distinct: dict[str, dict[str, Any]] = {}
    for index, spec in enumerate(specs(count, seed)):
        body = {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": f"fuzz-{index}", "namespace": kube.namespace},
            "spec": spec,
        }
        try:
            item = definitions.create(body)
        except Refused:
            found["refused"] += 1
            continue
        item["metadata"]["uid"] = "00000000-0000-4000-8000-000000000000"
        try:
            plan = make_plan(parse_service(item), {}, [], [], IMAGES)
        except InvalidSpecError:
            found["invalid"] += 1
            continue
        found["admitted"] += 1
        for made in plan.desired:
            if made["kind"] not in MONITORING:
                distinct.setdefault(anonymous(made, f"fuzz-{index}"), made)
    refused = asyncio.run(dry_run(kube, list(distinct.values()), found))
    print(f"seed {seed}: {dict(found)}")
    assert refused == []
    assert not found["invalid"], "an admitted spec that the operator cannot render"
    assert found["admitted"] > count // 10
    wanted = {kind.kind for kind in OPTIONAL_KINDS} - MONITORING | {"Deployment"}
    assert {kind for kind in wanted if not found[kind]} == set()


def anonymous(made: dict[str, Any], name: str) -> str:
    """A digest of an object without what only the service's name and its hashes make different."""
    plain = copy.deepcopy(made)
    plain["metadata"].pop("annotations", None)
    plain.pop("data", None)
    return compute_digest(str(plain).replace(name, "NAME"))


async def dry_run(
    kube: Kube, items: list[dict[str, Any]], found: Counter[str]
) -> list[tuple[str, str]]:
    """The objects that the API server refuses, with its words; ``found`` counts those it takes."""
    api = await Api.connect(str(kube.kubeconfig), 60.0, RateLimit(1000, 1000))
    refused: list[tuple[str, str]] = []
    limit = asyncio.Semaphore(SENT_AT_ONCE)
    query = {"dryRun": "All", "fieldValidation": "Strict"}

    async def create(item: dict[str, Any]) -> None:
        async with limit:
            try:
                path = KINDS_BY_NAME[item["kind"]].path(kube.namespace)
                await api._call("POST", path, query, item)
            except ApiError as error:
                refused.append((f"{item['kind']} {item['metadata']['name']}", error.message))
            else:
                found[item["kind"]] += 1

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(create(item))
    finally:
        await api.close()
    return refused
