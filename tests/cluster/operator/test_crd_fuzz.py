"""Specs at random, made from the resource definition itself: the API server refuses one, or it can
be reconciled, or the operator says InvalidSpec. Nothing else, and never a traceback."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll_api import generate
from plimsoll_api.operation import MAX_SERVICE_REPLICAS
from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject.validate import check_object
from plimsoll_operator.kinds import SERVICE, InvalidSpecError
from plimsoll_operator.plans.service import make_plan, parse_service
from plimsoll_operator.render import Images
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.queue import RateLimit
from plimsoll_operator.status.service import make_status
from tests.lab.definitions import Definitions
from tests.lab.objects import Refused

IMAGES = Images("engine:1", "supervisor:1")
SCHEMA = generate.make_inference_service_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]
TEXTS = (
    "", "a", "main", "0", "-1", "1", "2", "50%", "0%", "1Gi", "64Mi", "1e3", "10m", "30s", "0s",
    "1h30m", "file:///m", "pvc://claim/x", "hf://org/name", "hf://org", "file:///../etc", "/health",
    "é🚢", "x" * 300, "name with spaces", "UPPER", "a.b-c", "$(HOME)", "{{ x }}", "\t\n",
)  # fmt: skip
ANYTHING: tuple[Any, ...] = (
    None, True, 0, -1, 3.5, 1 << 40, "", [], {}, [1], {"a": None}, {"spec": {}},
)  # fmt: skip
TEMPLATES: tuple[Any, ...] = (
    {"spec": {"nodeSelector": {"a": "b"}}},
    {"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}]}},
    {"spec": {"containers": "none"}},
    {"metadata": {"labels": {"plimsoll.dev/service": "other"}}},
    {"metadata": None, "spec": None},
    {"spec": {"tolerations": [{"operator": "Exists"}], "volumes": [None]}},
)
OTHERWISE = "judged otherwise by the API server"
WILD, BAD, ONE_REAL_IN = 0.004, 0.03, 10
# Some 300 services of 10 objects each are made for real: minutes where the machine is busy.
COUNTS = (200, pytest.param(5000, marks=(pytest.mark.long, pytest.mark.timeout(900))))


def value(node: dict[str, Any], dice: random.Random, depth: int = 0) -> Any:
    """Something for a node of the schema: mostly of its type, at times not at all."""
    if dice.random() < WILD:
        return dice.choice(ANYTHING)
    if "enum" in node:
        return dice.choice(node["enum"])
    if "default" in node and dice.random() < 0.2:
        return node["default"]
    if node.get("x-kubernetes-int-or-string"):
        return text(node, dice) if dice.random() < 0.8 else dice.choice([0, 1, 7, -1])
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return dice.choice(TEMPLATES)
    match node.get("type"):
        case "object" if "properties" in node:
            made = {}
            share = 0.25 if depth else 0.35
            for name, child in node["properties"].items():
                if name in node.get("required", ()) or dice.random() < share:
                    made[name] = value(child, dice, depth + 1)
            return made
        case "object":
            inner = node.get("additionalProperties") or {"type": "string"}
            return {
                dice.choice(["a", "memory", "nvidia.com/gpu", ""]): value(inner, dice, depth + 1)
                for _ in range(dice.randrange(3))
            }
        case "array":
            return [value(node["items"], dice, depth + 1) for _ in range(dice.randrange(4))]
        case "boolean":
            return dice.random() < 0.5
        case "integer" | "number":
            low, high = node.get("minimum", -2), node.get("maximum", 100)
            outside = dice.random() < BAD
            return dice.choice([low - 1, high + 1] if outside else [low, high, low + 1])
    return text(node, dice)


def text(node: dict[str, Any], dice: random.Random) -> str:
    """Mostly one that the pattern takes."""
    fitting = [one for one in TEXTS if re.search(node.get("pattern", ""), one)]
    return dice.choice(TEXTS if dice.random() < BAD or not fitting else fitting)


def specs(count: int, seed: int) -> list[dict[str, Any]]:
    """Half have a model that is right, so that the rest of them is looked at."""
    dice = random.Random(seed)
    made = []
    for index in range(count):
        spec = value(SPEC, dice)
        if not isinstance(spec, dict):
            spec = {"replicas": spec}
        if index % 2:
            spec["model"] = {"uri": "file:///m"}
        made.append(spec)
    return made


@pytest.mark.parametrize("count", COUNTS)
def test_any_spec_is_refused_reconciled_or_called_invalid(
    kubectl: Any,
    definitions: Definitions,
    start: Callable[..., Any],
    eventually: Callable[..., Any],
    count: int,
) -> None:
    operator = start("--engine-image=engine:1", "--supervisor-image=supervisor:1")
    seed = int(os.environ.get("PLIMSOLL_FUZZ_SEED", "1"))
    found = asyncio.run(judged(kubectl, definitions, specs(count, seed), count // ONE_REAL_IN))
    print(f"seed {seed}: {dict(found)}")
    assert found["refused"] > count // 10
    assert not found["invalid, and no field is named"]
    assert not found[OTHERWISE]
    assert found["accepted"] > count // 10
    eventually(lambda: undecided(kubectl) == [], 60 + count / 5)
    lines = [json.loads(line) for line in operator.log.read_text().splitlines()]
    assert [line for line in lines if "traceback" in line] == []


async def judged(
    kubectl: Any, definitions: Definitions, wanted: list[dict[str, Any]], real: int
) -> Counter[str]:
    """The verdicts on each spec: of the definitions, then of the operator's own functions.

    ``real`` of them go to the API server, which must judge as the definitions do.
    """
    api = await Api.connect(str(kubectl.kubeconfig), 30.0, RateLimit(500, 500))
    verdicts: Counter[str] = Counter()
    path = SERVICE.path(kubectl.namespace)

    async def one(index: int, spec: dict[str, Any]) -> None:
        created = index % (len(wanted) // real) == 1
        body = {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": f"fuzz-{index}"},
            "spec": few_pods(spec) if created else spec,
        }
        try:
            item = definitions.create(body)
        except Refused:
            item = {}
        if created:
            taken = bool(item)
            try:
                item = await api._call("POST", path, {"fieldValidation": "Strict"}, body)
            except ApiError as error:
                if error.status not in (400, 422) or not error.message:
                    raise
                item = {}
            if taken != bool(item):
                verdicts[OTHERWISE] += 1
        if not item:
            verdicts["refused"] += 1
            return
        verdicts["accepted"] += 1
        verdicts[f"{decide(item)}"] += 1

    limit = asyncio.Semaphore(8)

    async def bounded(index: int, spec: dict[str, Any]) -> None:
        async with limit:
            await one(index, spec)

    try:
        async with asyncio.TaskGroup() as group:
            for index, spec in enumerate(wanted):
                group.create_task(bounded(index, spec))
    finally:
        await api.close()
    return verdicts


def test_validate_refuses_what_the_server_refuses(definitions: Definitions) -> None:
    """``plimsoll validate`` has no server: it may refuse more, as the operator does, never less."""
    refused = 0
    for spec in specs(400, 7):
        item = {"apiVersion": "plimsoll.dev/v1alpha1", "kind": "InferenceService",
                "metadata": {"name": "s"}, "spec": spec}  # fmt: skip
        try:
            definitions.create(item)
        except Refused:
            refused += 1
            with pytest.raises(UsageError):
                check_object("m.yaml", item)
    assert 100 < refused < 400


def few_pods(spec: dict[str, Any]) -> dict[str, Any]:
    """``spec`` without the thousands of pods that it may ask for: other controllers make them, and
    under that flood nothing is seen of the operator."""
    spec = {**spec, "replicas": 1} if spec.get("replicas") == MAX_SERVICE_REPLICAS else spec
    scaling = spec.get("autoscaling")
    if isinstance(scaling, dict) and scaling.get("minReplicas") == MAX_SERVICE_REPLICAS:
        spec = {**spec, "autoscaling": scaling | {"minReplicas": 1}}
    return spec


def decide(item: dict[str, Any]) -> str:
    """The operator's decision, without a cluster: any other exception fails the test."""
    item["metadata"].setdefault("uid", "u")
    try:
        service = parse_service(item)
        plan = make_plan(service, {}, [], [], IMAGES)
    except InvalidSpecError as error:
        return "invalid" if "spec" in str(error) else "invalid, and no field is named"
    json.dumps(plan.desired)
    now = "2026-01-01T00:00:00Z"
    made = make_status(item, service, None, [], [], {}, None, now, plan=plan)
    assert made["conditions"]
    return "reconciled"


def undecided(kubectl: Any) -> list[str]:
    """Services that the operator has not said anything of yet."""
    found = []
    for item in kubectl.list("plinf"):
        seen = (item.get("status") or {}).get("conditions") or ()
        if not any(one["type"] == "Ready" for one in seen):
            found.append(item["metadata"]["name"])
    return found


def test_specs_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    assert json.dumps(specs(20, 7)) == json.dumps(specs(20, 7))
    assert len({json.dumps(spec) for spec in specs(200, 7)}) > 150
