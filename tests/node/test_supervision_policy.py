"""A SupervisionPolicy over workloads of two replicas that know nothing of it.

New pods are injected, a leak in one of them is cured, and the other one serves all the while.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import table
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.operator import Operator
from tests.node import owners, supervised_engines
from tests.node.owners import Owner
from tests.node.supervised import (
    AFTER,
    LISTED_S,
    POLICY,
    counts,
    ended_incident,
    held_slots,
    injects,
    older_pod,
    policy,
    ready_since,
    restarts,
    status,
    step_time,
    supervised,
    unix,
    warm,
)
from tests.node.supervised_engines import Engine
from tests.node.visits import Visits

Start = Callable[..., Operator]


class Replicas:
    """The pods of an owner's Service."""

    def __init__(self, kube: Kube, owner: Owner) -> None:
        self._kube, self._owner = kube, owner

    def pods(self) -> dict[str, dict[str, Any]]:
        found = self._kube.list("pods", self._owner.selector)
        return {pod["metadata"]["name"]: pod for pod in found}

    def ready(self, count: int) -> bool:
        pods = self.pods().values()
        return len(pods) == count and all(map(ready_since, pods))

    def start(self, engine: Engine) -> None:
        """One after the other: engines that start share the machine's processors."""
        self._kube.apply(self._owner.document, self._owner.service)
        for count in (1, 2):
            self._kube("scale", self._owner.scaled, f"--replicas={count}")
            what = f"{count} ready"
            eventually(partial(self.ready, count), what, engine.start_s)
        for name, pod in self.pods().items():
            eventually(partial(warm, pod), f"a baseline of {name}", engine.start_s)

    @property
    def url(self) -> str:
        service = self._kube.get("service", self._owner.service["metadata"]["name"]) or {}
        return f"http://{service['spec']['clusterIP']}"


REAL = [pytest.mark.long, pytest.mark.timeout(5400)]
CASES = [
    pytest.param(supervised_engines.standin, owners.deployment, id="standin-deployment"),
    pytest.param(
        supervised_engines.standin, owners.stateful_set, id="standin-statefulset",
        marks=pytest.mark.long,
    ),
    pytest.param(
        supervised_engines.standin, owners.kserve, id="standin-kserve", marks=pytest.mark.long
    ),
    pytest.param(supervised_engines.vllm, owners.deployment, id="vllm-deployment", marks=REAL),
    pytest.param(supervised_engines.vllm, owners.stateful_set, id="vllm-statefulset", marks=REAL),
    pytest.param(supervised_engines.vllm, owners.kserve, id="vllm-kserve", marks=REAL),
]  # fmt: skip


@pytest.mark.parametrize(("make_engine", "make_owner"), CASES)
def test_a_leak_in_one_pod_is_cured_while_the_other_serves(
    node: Lab,
    kube: Kube,
    operator: Start,
    webhook: tuple[str, ...],
    tmp_path: Path,
    make_engine: Callable[[Lab], Engine],
    make_owner: Callable[[Engine], Owner],
) -> None:
    engine = make_engine(node)
    supervised_engines.install(node, engine)
    owner = make_owner(engine)
    older = older_pod(node, owner.selected)
    for one in (engine, supervised_engines.standin(node)):
        one.prepare(kube, tmp_path)
    kube.apply(older)
    kube("wait", "pod/older", "--for=condition=Ready", "--timeout=180s")
    operator(*webhook)
    kube.apply(policy(owner.selected, engine.memory))
    eventually(lambda: injects(kube, older), "new pods are injected", LISTED_S)

    replicas = Replicas(kube, owner)
    replicas.start(engine)
    eventually(lambda: counts(kube) == (3, 2, 1, 0), "both pods are supervised", LISTED_S)
    before = replicas.pods()
    assert all(map(supervised, before.values()))
    assert {pod["metadata"]["labels"]["plimsoll.dev/policy"] for pod in before.values()} == {POLICY}
    assert not supervised(kube.get("pod", "older") or {})

    leaking, other = sorted(before)
    with Visits(partial(engine.ask, replicas.url)) as visits:
        since = time.time()
        kube("exec", leaking, "-c", owner.container, "--", "sh", "-c", engine.leak)
        eventually(lambda: leaking in held_slots(kube), "it has the slot", engine.story_s)
        incident = eventually(lambda: ended_incident(kube), "the incident ends", engine.story_s)
        goal = visits.answered + AFTER
        eventually(lambda: visits.answered >= goal, "answers after the incident", engine.story_s)
        eventually(partial(replicas.ready, 2), "both are ready again", engine.start_s)
    assert incident is not None
    print(json.dumps(incident, indent=1))
    seconds = unix(incident["status"]["confirmedAt"]) - since
    restarted = unix(step_time(incident, "EngineRestart"))
    started = unix(ready_since(replicas.pods()[leaking])) - restarted
    told = (
        f"from SIGTERM to ready {started:.0f} s, {visits.answered} requests through the Service,"
        f" {len(visits.failures)} failed"
    )
    print(f"confirmed after {seconds:.0f} s; {told}")
    assert visits.failures == []

    the_story_is_whole(incident, leaking, owner)
    after = replicas.pods()
    assert {name: pod["metadata"]["uid"] for name, pod in after.items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    assert restarts(after[leaking]) == {owner.container: 1, "supervisor": 0}
    assert restarts(after[other]) == {owner.container: 0, "supervisor": 0}
    assert ready_since(after[other]) == ready_since(before[other]) != ""

    eventually(lambda: not held_slots(kube), "the slot is free again", LISTED_S)
    eventually(lambda: status(kube).get("openIncidents") == 0, "it is over", LISTED_S)
    assert counts(kube) == (3, 2, 1, 0)
    if engine.peer is not None:
        case = f"policy: leak in one of two pods of a {owner.title}, cured"
        told = f"to Confirmed, {told}"
        peer = engine.peer
        table.write(table.Ran(peer.type.value, peer.version, case, round(seconds, 1), told))


def the_story_is_whole(incident: dict[str, Any], pod: str, owner: Owner) -> None:
    """Resolved by a restart of the engine after a drain, in the name of the policy."""
    spec, found = incident["spec"], incident["status"]
    assert (found["phase"], found["outcome"]) == ("Resolved", "EngineRestart")
    assert (spec["kind"], spec["pod"], spec["container"]) == ("HostGrowth", pod, owner.container)
    assert spec["policyRef"] == {"name": POLICY}
    workload = spec["workloadRef"]
    assert (workload["kind"], workload["name"]) == (owner.kind, owner.workload)
    steps = [one["step"] for one in found["timeline"]]
    assert steps.index("Drain") < steps.index("EngineRestart")
    assert found["returnedBytes"] >= 0.9 * found["attribution"]["bytes"]
