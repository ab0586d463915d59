"""Rolling restarts that a policy asks for: once for each generation, and only where they help."""

from __future__ import annotations

import asyncio
import copy
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import Injection, InjectionStop
from plimsoll_api.workloads import Membership, WorkloadRef
from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_operator.controllers.rolling_restart import RollingRestarts
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.fleet.workloads import Workload, group_pods_by_workload
from plimsoll_operator.kinds import Key, Kind, Object, parse_object
from plimsoll_operator.plans import rolling_restart as rollout
from plimsoll_operator.runtime.client import Api, ApiError

NOW = "2026-01-01T00:00:00Z"
KEY = Key("ml", "engines", "SupervisionPolicy")
VLLM = WorkloadRef("Deployment", "vllm")


def policy(generation: int = 1, rollout: str = "Restart") -> SupervisionPolicy:
    manifest = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {
            "name": "engines",
            "namespace": "ml",
            "uid": "u",
            "generation": generation,
        },
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "rollout": rollout},
    }
    return parse_object(SupervisionPolicy, manifest)


def owned(
    ref: WorkloadRef | None, state: SupervisionState = SupervisionState.WAITING, api: str = "apps"
) -> Workload:
    member = Membership(ref, api if ref else "")
    (found,) = group_pods_by_workload([SelectedPod("vllm-a", "default", state, member=member)])
    return found


def live(kind: str = "Deployment", **spec: Any) -> Object:
    template = {"metadata": {"labels": {"app": "vllm"}}}
    status = {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "vllm", "namespace": "ml", "uid": "w", "generation": 1},
        "spec": {"template": template} | spec,
        "status": status,
    }


def partitioned(updated: int, ready: int = 3, partition: int = 2) -> Object:
    """Return a StatefulSet of three pods whose partition keeps two of them at the old revision."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"partition": partition}}
    status = {
        "observedGeneration": 1,
        "replicas": 3,
        "readyReplicas": ready,
        "updatedReplicas": updated,
        "updateRevision": "b",
        "currentRevision": "a",
    }
    return live("StatefulSet", replicas=3, updateStrategy=strategy) | {"status": status}


class Server:
    """Workloads by name, as an API server keeps them; ``asked`` has what was applied."""

    def __init__(self, *workloads: Object) -> None:
        self.workloads = {one["metadata"]["name"]: one for one in workloads}
        self.asked: list[tuple[str, Object]] = []
        self.gets, self.now = 0, 1000.0
        self.refusal: ApiError | None = None
        self.serves = True
        self.restarts = self.started()

    def started(self, webhook: bool = True) -> RollingRestarts:
        serves = (lambda: self.serves) if webhook else None
        return RollingRestarts(cast(Api, self), serves, lambda: self.now)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self.gets += 1
        return copy.deepcopy(self.workloads.get(name))

    async def apply(self, kind: Kind, item: Object, manager: str = "") -> None:
        if self.refusal:
            raise self.refusal
        found = self.workloads[item["metadata"]["name"]]
        assert item["metadata"]["uid"] == found["metadata"]["uid"]
        found["metadata"].setdefault("annotations", {}).update(item["metadata"]["annotations"])
        self.asked.append((manager, item))

    def turn(
        self, *workloads: Workload, generation: int = 1, suspects: tuple[WorkloadRef, ...] = (),
        mode: str = "Restart", injection: Injection | None = None,
    ) -> tuple[dict[WorkloadRef | None, str], list[WorkloadRef]]:  # fmt: skip
        wanted = policy(generation, mode)
        call = self.restarts.request(KEY, wanted, workloads, suspects, NOW, injection, 1)
        return asyncio.run(call)

    def settle(self, *workloads: Workload, **more: Any) -> Any:
        self.turn(*workloads, **more)
        self.now += DEFAULT_INTERVALS.rollout_settle
        return self.turn(*workloads, **more)


def test_one_workload_tries_the_supervisor_before_the_others() -> None:
    """Until a pod has run with it, few pods at once get one: the others would wait once more."""
    other = WorkloadRef("Deployment", "other")
    second = live()
    second["metadata"] |= {"name": "other", "uid": "o"}
    server = Server(live(), second)
    both = owned(other), owned(VLLM)
    unproven = Injection(images="s:1")
    said, asked = server.settle(*both, injection=unproven)
    assert (said, asked) == (
        {other: rollout.RESTART_REQUESTED_MESSAGE, VLLM: rollout.UNPROVEN_MESSAGE},
        [other],
    )
    server.restarts = server.started()
    assert server.settle(*both, injection=unproven) == (said, []), "another operator goes on"
    proven = Injection(images="s:1", proven=True)
    said, asked = server.settle(*both, injection=proven)
    assert said == {
        other: rollout.RESTART_REQUESTED_MESSAGE,
        VLLM: rollout.RESTART_REQUESTED_MESSAGE,
    }
    assert asked == [other, VLLM], "the first one has pods that got none in the trial"
    assert server.settle(*both, injection=proven)[1] == []
    stop = InjectionStop(pod="a", reason="x", time=NOW, generation=1)
    stopped = Injection(images="s:1", stopped=stop)
    said, asked = server.settle(*both, generation=2, injection=stopped)
    assert (set(said.values()), asked) == ({rollout.STOPPED_MESSAGE}, [])


def test_a_workload_is_asked_once_and_by_server_side_apply_of_two_annotations() -> None:
    server = Server(live())
    waits = owned(VLLM)
    assert server.turn(waits) == ({}, []), "the webhook must know of the policy first"
    server.now += DEFAULT_INTERVALS.rollout_settle
    assert server.turn(waits) == ({VLLM: rollout.RESTART_REQUESTED_MESSAGE}, [VLLM])
    ((manager, body),) = server.asked
    assert manager == "plimsoll-operator-rollout"
    assert body["spec"] == {"template": {"metadata": {"annotations": {
        "kubectl.kubernetes.io/restartedAt": NOW}}}}  # fmt: skip
    gets = server.gets
    for _ in range(3):
        server.now += DEFAULT_INTERVALS.rollout_again
        assert server.turn(waits) == ({VLLM: rollout.RESTART_REQUESTED_MESSAGE}, [])
    assert server.gets == gets, "a workload that was asked costs no request"
    # Another operator knows by the annotation, and so does this one when pods wait again.
    server.restarts = server.started()
    assert server.settle(waits) == ({VLLM: rollout.RESTART_REQUESTED_MESSAGE}, [])
    assert server.turn(owned(VLLM, SupervisionState.SUPERVISED)) == ({}, [])
    assert server.turn(waits) == ({VLLM: rollout.RESTART_REQUESTED_MESSAGE}, [])
    assert len(server.asked) == 1
    assert server.settle(waits, generation=2)[1] == [VLLM]
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (owned(None), "these pods belong to no workload"),
        (owned(WorkloadRef("Job", "j"), api="batch"), "request a rolling restart of a Job"),
        (
            owned(WorkloadRef("RayCluster", "r"), api="ray.io"),
            "request a rolling restart of a RayCluster",
        ),
        (
            owned(WorkloadRef("StatefulSet", "s"), api="apps.kruise.io"),
            "cannot request a rolling restart",
        ),
        (owned(WorkloadRef("ReplicaSet", "bare")), "request a rolling restart of a ReplicaSet"),
        (owned(WorkloadRef("Deployment", "../../../secrets/x")), "restart the workload yourself"),
    ],
)
def test_a_workload_without_a_rolling_restart_waits_for_somebody(
    workload: Workload, said: str
) -> None:
    server = Server()
    found, asked = server.settle(workload)
    assert said in found[workload.ref]
    assert (asked, server.gets) == ([], 0)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (live(paused=True), "the workload's rollout is paused"),
        (live("StatefulSet", updateStrategy={"type": "OnDelete"}), "updateStrategy is OnDelete"),
        (
            live(template={"metadata": {"labels": {"app": "other"}}}),
            "does not match the workload's pod temp",
        ),
        (live() | {"status": {"observedGeneration": 0}}, "current rollout is complete"),
        (
            live() | {"status": {"observedGeneration": 1, "replicas": 3, "updatedReplicas": 1}},
            "current rollout is complete",
        ),
        (
            live("StatefulSet")
            | {"status": {"observedGeneration": 1, "updateRevision": "b", "currentRevision": "a"}},
            "current rollout is complete",
        ),
        (partitioned(updated=0), "current rollout is complete"),
        (partitioned(updated=1, ready=2), "current rollout is complete"),
        (
            partitioned(updated=0, partition=3),
            "partition 3, which holds back all of its 3 replicas",
        ),
        (
            live("DaemonSet")
            | {
                "status": {
                    "observedGeneration": 1,
                    "desiredNumberScheduled": 3,
                    "updatedNumberScheduled": 2,
                }
            },
            "current rollout is complete",
        ),
    ],
)
def test_a_restart_waits_where_it_would_not_help(found: Object, said: str) -> None:
    ref = WorkloadRef(found["kind"], "vllm")
    server = Server(found)
    assert said in server.settle(owned(ref))[0][ref]
    assert server.asked == []
    gets = server.gets
    server.turn(owned(ref))
    assert server.gets == gets, "it looks again after a minute"
    server.workloads["vllm"] = live(found["kind"])
    server.now += DEFAULT_INTERVALS.rollout_again
    assert server.turn(owned(ref))[1] == [ref]


def test_a_rollout_is_complete_without_the_pods_that_a_partition_holds_back() -> None:
    """``currentRevision`` stays the old one then, for as long as there is a partition."""
    ref = WorkloadRef("StatefulSet", "vllm")
    for updated in (1, 2):
        server = Server(partitioned(updated))
        assert server.settle(owned(ref)) == ({ref: rollout.RESTART_REQUESTED_MESSAGE}, [ref])


def test_nothing_is_asked_for_a_suspect_revision_or_without_the_webhook() -> None:
    server = Server(live())
    assert server.settle(owned(VLLM), suspects=(VLLM,)) == (
        {VLLM: rollout.SUSPECT_REVISION_MESSAGE},
        [],
    )
    server.restarts = server.started(webhook=False)
    assert server.settle(owned(VLLM)) == ({VLLM: rollout.WEBHOOK_OFF_MESSAGE}, [])
    assert server.settle(owned(VLLM), mode="OnDelete") == ({}, [])
    assert server.gets == 0


def test_nothing_is_asked_while_the_webhook_would_miss_the_new_pods() -> None:
    server = Server(live())
    server.serves = False
    assert server.settle(owned(VLLM)) == ({VLLM: rollout.WEBHOOK_NOT_READY_MESSAGE}, [])
    server.serves = True
    assert server.turn(owned(VLLM))[1] == [VLLM]
    server.serves = False
    assert server.turn(owned(VLLM)) == ({VLLM: rollout.RESTART_REQUESTED_MESSAGE}, []), (
        "the restart goes on"
    )


def test_a_refusal_is_said_and_tried_again() -> None:
    server = Server(live())
    server.refusal = ApiError(403, "Forbidden", "cannot patch deployments")
    assert "cannot patch deployments" in server.settle(owned(VLLM))[0][VLLM]
    server.refusal = ApiError(503, "Unavailable", "later")
    server.now += DEFAULT_INTERVALS.rollout_again
    with pytest.raises(ApiError):
        server.turn(owned(VLLM))
    server.refusal = None
    assert server.turn(owned(VLLM))[1] == [VLLM]


class Restarts(RuleBasedStateMachine):
    """Whatever happens in whatever order, each generation restarts a workload once at most."""

    @initialize()
    def begin(self) -> None:
        self.server, self.generation, self.waits = Server(live()), 1, True

    @rule(seconds=st.floats(0, 200))
    def time_passes(self, seconds: float) -> None:
        self.server.now += seconds
        self.look()

    @rule()
    def look(self) -> None:
        state = SupervisionState.WAITING if self.waits else SupervisionState.SUPERVISED
        before = len(self.server.asked)
        said, asked = self.server.turn(owned(VLLM, state), generation=self.generation)
        assert len(self.server.asked) - before == len(asked) <= 1
        assert not (asked and not self.waits)
        assert said.keys() <= {VLLM}

    @rule()
    def the_policy_changes(self) -> None:
        self.generation += 1

    @rule(waits=st.booleans())
    def pods_come_and_go(self, waits: bool) -> None:
        self.waits = waits

    @rule(paused=st.booleans())
    def somebody_pauses_the_rollout(self, paused: bool) -> None:
        self.server.workloads["vllm"]["spec"]["paused"] = paused

    @rule()
    def the_operator_restarts(self) -> None:
        self.server.restarts = self.server.started()

    @invariant()
    def once_for_each_generation(self) -> None:
        marks = [
            body["metadata"]["annotations"][rollout.RESTARTED_FOR_ANNOTATION]
            for _, body in self.server.asked
        ]
        assert len(marks) == len(set(marks)) <= self.generation


Restarts.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
TestRestarts = Restarts.TestCase


@given(st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.text(max_size=5)))
def test_whatever_a_workload_looks_like_it_is_judged(spec: dict[str, Any]) -> None:
    found = live() | {"spec": spec}
    assert "does not match" in rollout.find_restart_obstacle(found, policy())
