"""Chaos: random edits, deletions and edits by others while the API server answers badly at times.

At the end every object is what its spec says, nothing is left over, and the operator is at rest.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll_operator.kinds import make_ref
from plimsoll_operator.plans.service import parse_service
from plimsoll_operator.render import Images, render_objects
from plimsoll_operator.render.compare import needs_apply
from tests.lab.faults import proxied
from tests.lab.operator import Operator

SERVICES = tuple(f"chaos-{letter}" for letter in "abcde")
IMAGES = Images("engine:1", "supervisor:1")
FLAGS = ("--engine-image=engine:1", "--supervisor-image=supervisor:1", "--resync", "5")
REST_S = 90.0
CHILDREN = ("configmap {}-supervisor", "deployment {}", "service {}", "role {}-supervisor")


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "length_s"),
    [
        (int(os.environ.get("PLIMSOLL_CHAOS_SEED", "1")), 20.0),
        *((seed, 120.0) for seed in range(2, 6)),
    ],
)
def test_in_the_end_everything_is_as_its_spec_says(
    kubectl: Any,
    operator_account: Path,
    manifest: dict[str, Any],
    eventually: Callable[..., Any],
    seed: int,
    length_s: float,
) -> None:
    with proxied(operator_account, seed) as (proxy, account):
        operator = Operator(account, kubectl.namespace, *FLAGS, warm=True)
        try:
            proxy.faulty = True
            turns = disturb(kubectl, manifest, random.Random(seed), length_s)
            proxy.faulty = False
            print(f"seed {seed}: {turns} turns, {dict(proxy.injected)}")
            assert len(proxy.injected) >= 5
            eventually(lambda: not wrong(kubectl), REST_S)
            at_rest(operator)
            assert wrong(kubectl) == []
        finally:
            print("\n".join(operator.log.read_text().splitlines()[-15:]))
            assert operator.stop() == 0
        lines = [json.loads(line) for line in operator.log.read_text().splitlines()]
        assert [line for line in lines if "traceback" in line] == []


def disturb(kubectl: Any, manifest: dict[str, Any], dice: random.Random, length_s: float) -> int:
    """Does things at random; returns how many."""
    deadline, turns = time.monotonic() + length_s, 0
    while time.monotonic() < deadline:
        turns += 1
        service = dice.choice(SERVICES)
        match dice.choice(["apply", "apply", "apply", "delete", "child", "edit", "pods"]):
            case "apply":
                spec = manifest["spec"] | any_spec(dice)
                kubectl.run(
                    "apply",
                    "-f",
                    "-",
                    stdin=json.dumps(manifest | {"metadata": {"name": service}, "spec": spec}),
                )
            case "delete":
                kubectl.run("delete", "plinf", service, "--wait=false")
            case "child":
                child = dice.choice(CHILDREN).format(service).split()
                kubectl.run("delete", *child, "--wait=false")
            case "edit":
                patch = dice.choice(['{"metadata":{"labels":null}}', '{"spec":{"replicas":7}}'])
                kubectl.run("patch", "deployment", service, "--type=merge", "-p", patch)
            case "pods":
                kubectl.run("delete", "pods", f"-l=plimsoll.dev/service={service}", "--wait=false")
    return turns


def any_spec(dice: random.Random) -> dict[str, Any]:
    spec: dict[str, Any] = {"replicas": dice.randrange(3)}
    spec["memory"] = {"host": {"growthBudget": f"{dice.randrange(1, 200)}Mi"}}
    spec["supervision"] = {"mode": "Recover", "maxUnavailable": dice.randrange(1, 4)}
    if dice.random() < 0.3:
        spec["restart"] = {"id": str(dice.randrange(3))}
    if dice.random() < 0.3:
        spec["networkPolicy"] = {"enabled": False}
    if dice.random() < 0.3:
        spec["service"] = {"headless": True}
    if dice.random() < 0.2:
        target = {"cpuPercent": 50}
        spec["autoscaling"] = {"minReplicas": 1, "maxReplicas": 2, "target": target}
    if dice.random() < 0.2:
        spec["disruption"] = {"enabled": False}
    return spec


def wrong(kubectl: Any) -> list[str]:
    """What is not as the specs say."""
    found = []
    services = {one["metadata"]["name"]: one for one in kubectl.list("plinf")}
    for name in SERVICES:
        live = {make_ref(item): item for item in kubectl.owned(name)}
        if name not in services:
            # The garbage collector has its own pace; what it will remove is not ours any more.
            continue
        service = parse_service(services[name])
        pinned = [item for where, item in live.items() if where.kind == "ControllerRevision"]
        wanted = render_objects(service, IMAGES)
        revision = next(item for item in wanted if item["kind"] == "ControllerRevision")
        same = [item for item in pinned if make_ref(item) == make_ref(revision)]
        wanted = render_objects(service, IMAGES, same[0]["data"] if same else None)
        found += [
            f"{name}: {make_ref(item)}"
            for item in wanted
            if needs_apply(item, live.get(make_ref(item)))
        ]
        extra = {where for where in live if where.kind not in ("ControllerRevision", "Pod")}
        extra -= {make_ref(item) for item in wanted}
        found += [f"{name}: {where} is left over" for where in extra]
        status = services[name].get("status") or {}
        if status.get("observedGeneration") != services[name]["metadata"]["generation"]:
            found.append(f"{name}: its status is old")
    return found


def at_rest(operator: Operator) -> None:
    """No reconcile runs or is due again: nothing is handled but what resyncs bring."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = operator.metric("plimsoll_operator_writes_total")
        time.sleep(6)
        if operator.metric("plimsoll_operator_writes_total") == before:
            assert operator.metric("plimsoll_operator_queue_length") == 0
            return
    raise AssertionError("the operator writes on and on")


@pytest.mark.long
def test_what_is_deleted_while_watches_begin_anew_is_noticed(
    kubectl: Any,
    operator_account: Path,
    manifest: dict[str, Any],
    eventually: Callable[..., Any],
) -> None:
    """A watch that begins anew tells of what is there, and not of what has gone."""
    with proxied(operator_account, seed=0) as (proxy, account):
        operator = Operator(account, kubectl.namespace, "--resync", "600", warm=True)
        try:
            for name in ("tiny", "other"):
                kubectl.apply(manifest | {"metadata": {"name": name}})
            eventually(lambda: kubectl.get("deployment", "tiny"))
            time.sleep(12)  # past the list that follows every start
            proxy.expired = True
            eventually(lambda: proxy.injected["watch expired"] > 20)
            kubectl("delete", "plinf", "tiny")
            proxy.expired = False
            eventually(lambda: operator.metric("plimsoll_operator_services") == 1, 30)
        finally:
            assert operator.stop() == 0, operator.log.read_text()
