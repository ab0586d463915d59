"""A service on several nodes, with the real controller of LeaderWorkerSets.

No kubelet runs: the tests write the status of the pods. The service is the one in
``examples/integrations``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from docs.tools.blocks import ROOT
from tests.cluster.operator.test_fleet_safety import leaking
from tests.cluster.test_examples import GROUPS
from tests.lab.errors import MissingError
from tests.lab.lab import Lab
from tests.lab.leader_worker_set import LeaderWorkerSets

EXAMPLE = ROOT / "examples" / "integrations" / "parallelism.yaml"
INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
KEY = "leaderworkerset.sigs.k8s.io/group-key"
SLOT = "qwen-restart-0"
OWN = "plimsoll.dev/service=qwen"


@pytest.fixture
def groups(cluster: Lab) -> Iterator[LeaderWorkerSets]:
    """Not started. Other tests need a cluster without the kind, and this one at first."""
    try:
        made = LeaderWorkerSets(cluster)
    except MissingError as missing:
        pytest.skip(str(missing))
    cluster.kube("delete", "crd", "--ignore-not-found", GROUPS)
    yield made
    made.stop()
    cluster.kube("delete", "crd", "--ignore-not-found", GROUPS)


def service() -> dict[str, Any]:
    """The example, on no node even where there is one."""
    loaded: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    loaded["spec"]["podTemplate"] = {"spec": {"nodeSelector": {"plimsoll.dev/no-node": "true"}}}
    return loaded


def pods(kubectl: Any) -> dict[str, dict[str, Any]]:
    """Those that are not being deleted, by name."""
    found = kubectl.list("pods", OWN)
    return {
        one["metadata"]["name"]: one
        for one in found
        if not one["metadata"].get("deletionTimestamp")
    }


def names(*groups: int) -> set[str]:
    return {f"qwen-lws-{index}{worker}" for index in groups for worker in ("", "-1")}


def serving(kubectl: Any, *groups: int) -> bool:
    """Whether exactly these groups are there and count as ready, after a turn of the kubelet."""
    kubectl.play_kubelet("qwen")
    status = kubectl.get("plinf", "qwen")["status"]
    ready = status.get("readyReplicas") == status.get("replicas") == len(groups)
    return set(pods(kubectl)) == names(*groups) and ready


def test_a_service_on_two_nodes_over_its_life(
    kubectl: Any,
    groups: LeaderWorkerSets,
    start: Callable[..., Any],
    eventually: Callable[..., Any],
) -> None:
    start("--resync", "2")
    kubectl.apply(service())
    ready = eventually(lambda: kubectl.condition("qwen", "Ready") or None)
    assert (ready["status"], ready["reason"]) == ("False", "APINotInstalled")
    assert "2 nodes" in ready["message"]
    assert "LeaderWorkerSet" in ready["message"]
    assert kubectl.condition("qwen", "Stalled")["status"] == "True"
    assert kubectl.owned("qwen") == [], "nothing half made"

    groups.start()
    eventually(lambda: serving(kubectl, 0, 1), 60)
    eventually(lambda: kubectl.holds("qwen", Ready="ReplicasReady", Progressing="False"))
    eventually(lambda: kubectl.holds("qwen", Stalled="False", ObjectsComplete="True"))
    found = pods(kubectl)
    assert kubectl.get("deployment", "qwen") is None
    for name, pod in found.items():
        spec = pod["spec"]
        assert [one["name"] for one in spec["initContainers"]][-1] == "supervisor"
        (engine,) = spec["containers"]
        worker = pod["metadata"]["labels"][INDEX] != "0"
        assert ("--headless" in engine["command"]) == worker, name
        env = {one["name"]: one.get("value") for one in engine["env"]}
        leader = name.removesuffix("-1") if worker else name
        assert env["LWS_LEADER_ADDRESS"] == f"{leader}.qwen-lws.{kubectl.namespace}"
        assert (env["LWS_GROUP_SIZE"], env["LWS_WORKER_INDEX"]) == ("2", "1" if worker else "0")
    keys = {pod["metadata"]["labels"][KEY] for pod in found.values()}
    assert len(keys) == 2
    front = kubectl.get("service", "qwen")["spec"]["selector"]
    selected = {n for n, pod in found.items() if front.items() <= pod["metadata"]["labels"].items()}
    assert selected == {"qwen-lws-0", "qwen-lws-1"}, "the leaders alone"

    kubectl("scale", "plinf", "qwen", "--replicas=3")
    eventually(lambda: serving(kubectl, 0, 1, 2), 40)
    kubectl("scale", "leaderworkerset", "qwen-lws", "--replicas=1")
    eventually(lambda: kubectl.get("leaderworkerset", "qwen-lws")["spec"]["replicas"] == 3)
    kubectl("scale", "plinf", "qwen", "--replicas=2")
    eventually(lambda: serving(kubectl, 0, 1), 40)

    restarts = {"metadata": {"annotations": {"plimsoll.dev/restarts": "qwen-lws-0 1"}}}
    kubectl.patch("lease", SLOT, restarts)
    slot, before = kubectl.get("lease", SLOT)["metadata"], kubectl.get("plinf", "qwen")["status"]
    kubectl.patch("plinf", "qwen", {"spec": {"restart": {"id": "2"}}})

    def rolled_out() -> bool:
        revisions = kubectl.get("plinf", "qwen")["status"]["revisions"]
        return serving(kubectl, 0, 1) and revisions["current"] != before["revisions"]["current"]

    eventually(rolled_out, 90)
    after = pods(kubectl)
    assert not {p["metadata"]["uid"] for p in after.values()} & {
        p["metadata"]["uid"] for p in found.values()
    }
    kept = kubectl.get("lease", SLOT)["metadata"]
    assert kept["uid"] == slot["uid"], "restart budgets survive a roll-out"
    assert kept["annotations"]["plimsoll.dev/restarts"] == "qwen-lws-0 1"
    revisions = kubectl.get("plinf", "qwen")["status"]["revisions"]
    assert before["revisions"]["current"] in revisions["good"]

    kubectl.delete("plinf", "qwen")
    eventually(lambda: kubectl.get("leaderworkerset", "qwen-lws") is None, 40)
    eventually(lambda: pods(kubectl) == {}, 60)


def test_leaks_are_counted_by_group(
    kubectl: Any,
    groups: LeaderWorkerSets,
    start: Callable[..., Any],
    eventually: Callable[..., Any],
) -> None:
    """Replicas are counted by group: two leaders that leak are two replicas of three."""
    groups.start()
    start("--resync", "2")
    wanted = service()
    wanted["spec"]["replicas"] = 3
    kubectl.apply(wanted)
    eventually(lambda: serving(kubectl, 0, 1, 2), 60)
    for index in (0, 1):
        leaking(kubectl, f"leak-{index}", f"qwen-lws-{index}", service="qwen")
    suspect = eventually(lambda: kubectl.get("plinf", "qwen")["status"].get("suspectRevision"))
    assert (suspect["leakingReplicas"], suspect["replicas"]) == (2, 3)
    assert kubectl.get("leaderworkerset", "qwen-lws")["spec"]["replicas"] == 3
