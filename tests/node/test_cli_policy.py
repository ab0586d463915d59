"""Actions by a person on the pods of a SupervisionPolicy: one after the other, by workload."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.operator import Operator
from tests.node import owners, supervised_engines
from tests.node.supervised import LISTED_S, POLICY, counts, injects, older_pod, policy, restarts
from tests.node.test_cli_actions import plimsoll
from tests.node.test_supervision_policy import Replicas
from tests.node.visits import Visits

Start = Callable[..., Operator]


@pytest.mark.timeout(900)
def test_a_person_restarts_a_workload_pod_by_pod_while_its_service_answers(
    node: Lab, kube: Kube, operator: Start, webhook: tuple[str, ...], tmp_path: Path
) -> None:
    engine = supervised_engines.standin(node)
    owner = owners.deployment(engine)
    engine.prepare(kube, tmp_path)
    operator(*webhook)
    kube.apply(policy(owner.selected, engine.memory))
    eventually(
        lambda: injects(kube, older_pod(node, owner.selected)), "new pods are injected", LISTED_S
    )
    replicas = Replicas(kube, owner)
    replicas.start(engine)
    eventually(lambda: counts(kube) == (2, 2, 0, 0), "both pods are supervised", LISTED_S)

    row = next(line for line in plimsoll(kube, "top").stdout.splitlines() if POLICY in line)
    assert row.split()[:3] == [f"{kube.namespace}/{POLICY}", "SupervisionPolicy", "2/2"]
    with Visits(partial(engine.ask, replicas.url)) as visits:
        restarted = plimsoll(kube, "restart", f"deployment/{owner.workload}", "--yes")
    print(restarted.output, visits.answered, visits.failures)
    assert restarted.exit_code == 0, restarted.exception or restarted.output
    assert visits.failures == []
    assert [line.split(":")[0] for line in restarted.stdout.splitlines()] == [
        f"restart {name}" for name in sorted(replicas.pods())
    ]

    def each_once() -> bool:
        found = [restarts(pod) for pod in replicas.pods().values()]
        return found == [{owner.container: 1, "supervisor": 0}] * 2

    eventually(each_once, "each engine restarted once", engine.start_s)
    resumed = plimsoll(kube, "resume", f"plsp/{POLICY}", "--yes", "--service")
    assert resumed.exit_code == 0, resumed.exception or resumed.output
    assert resumed.stdout.count("back in service") == 2
    assert resumed.stdout.count("from the slot Leases") == 2

    recorded = eventually(lambda: by_hand(kube), "each action has its record")
    assert {one["spec"]["workloadRef"]["name"] for one in recorded} == {owner.workload}


def by_hand(kube: Kube) -> list[dict[str, dict[str, dict[str, str]]]]:
    """The records of the restarts and of the resumes, once all are there."""
    found = kube.list("leakincidents")
    wanted = ("ManualRestart", "ManualResume")
    done = [one for one in found if one.get("status", {}).get("outcome") in wanted]
    return done if len(done) >= 4 else []
