"""What the leader of a multi-node group reads of its workers' supervisors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_sidecar.clients.kube import KubeError
from plimsoll_sidecar.signals.group_members import (
    MAX_EVIDENCE,
    STALE_S,
    GroupMembers,
    bounded,
    workers_of,
)
from plimsoll_sidecar.signals.group_pages import MAX_PODS, GroupPages
from tests.unit.signals.group_pods import OTHER, WORKER, Clock, Slices, endpoint, free_port, serving


def state(**suspicion: Any) -> bytes:
    found = [Suspicion(IncidentKind.HOST_GROWTH, Segment.SHARED, 0.5, 1.0, **suspicion)]
    assessment = Assessment(t=1.0, epoch=1, warm=True, suspicions=found)
    return msgspec.json.encode({"time": 1.0, "assessment": assessment, "open": []})


@pytest.fixture
def port() -> int:
    return free_port()


def members(kube: Slices, port: int, clock: Clock | None = None) -> GroupMembers:
    rule = workers_of("LeaderWorkerSet", "llm-0")
    return GroupMembers(GroupPages(kube, "ns", "llm", rule, port), clock or Clock())


def test_the_workers_of_the_own_group_are_asked_and_no_other_pod(port: int) -> None:
    kube = Slices(
        [
            endpoint("llm-0", WORKER),
            endpoint("llm-0-1", WORKER),
            endpoint("llm-1-1", WORKER),
            endpoint("llm-0-x", WORKER),
            endpoint("llm-0-2", "example.com"),
            {"addresses": []},
        ]
    )
    group = members(kube, port)
    with serving(WORKER, port, state(bytes=7)):
        group.ask()
    (query,) = kube.queries
    assert query == {
        "path": "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices",
        "labelSelector": "kubernetes.io/service-name=llm",
    }
    found = group.assessments()
    assert list(found) == ["llm-0-1"]
    assert found["llm-0-1"] is not None
    assert found["llm-0-1"].suspicions[0].bytes == 7


def test_the_workers_of_a_ray_cluster_are_all_other_pods_of_its_service(port: int) -> None:
    listed = ["llm-head-x7k2p", "llm-gpu-worker-b2f9q", "llm-head-x7k2p-1", ""]
    kube = Slices([*(endpoint(name, WORKER) for name in listed), {"addresses": [WORKER]}])
    rule = workers_of("RayCluster", "llm-head-x7k2p")
    group = GroupMembers(GroupPages(kube, "ns", "plimsoll-llm-0a", rule, port), Clock())
    with serving(WORKER, port, state(bytes=7)):
        group.ask()
    assert sorted(group.assessments()) == ["llm-gpu-worker-b2f9q", "llm-head-x7k2p-1"]


def test_a_ray_cluster_has_no_more_members_than_another_group(port: int) -> None:
    many = [endpoint(f"pod-{number}", WORKER) for number in range(4 * MAX_PODS)]
    rule = workers_of("RayCluster", "h")
    group = GroupMembers(GroupPages(Slices(many), "ns", "llm", rule, port), Clock())
    with serving(WORKER, port, state()):
        group.ask()
    assert len(group.assessments()) == MAX_PODS


def test_an_old_answer_and_a_pod_that_is_gone_say_nothing(port: int) -> None:
    kube, clock = Slices([endpoint("llm-0-1", WORKER), endpoint("llm-0-2", OTHER)]), Clock()
    group = members(kube, port, clock)
    with serving(WORKER, port, state()), serving(OTHER, port, state()):
        group.ask()
        assert None not in group.assessments().values()
        del kube.endpoints[0]
        group.ask()
    assert group.assessments()["llm-0-1"] is None
    assert group.assessments()["llm-0-2"] is not None
    clock.now += STALE_S
    kube.error = KubeError(503, "busy")
    group.ask()
    assert set(group.assessments().values()) == {None}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[" * 10_000,
        b"\xff",
        b'{"assessment": 1}',
        state() + b" " * (1 << 21),
        state(bytes=1 << 62),
    ],
)
def test_a_page_that_no_supervisor_writes_is_no_answer(port: int, body: bytes) -> None:
    group = members(Slices([endpoint("llm-0-1", WORKER)]), port)
    with serving(WORKER, port, body):
        group.ask()
    assert group.assessments() == {}


def test_an_error_page_is_no_answer(port: int) -> None:
    group = members(Slices([endpoint("llm-0-1", WORKER)]), port)
    with serving(WORKER, port, state(), status=500):
        group.ask()
    assert group.assessments() == {}


def test_more_members_than_a_group_has_are_not_asked(port: int) -> None:
    many = [endpoint(f"llm-0-{number}", WORKER) for number in range(1, 4 * MAX_PODS)]
    group = members(Slices(many), port)
    with serving(WORKER, port, state()):
        group.ask()
    assert len(group.assessments()) == MAX_PODS


def test_texts_are_cut() -> None:
    huge = Suspicion(
        IncidentKind.HOST_GROWTH, None, 9.0, 1.0, process="p" * 10_000, evidence=["e" * 10_000] * 99
    )
    theirs = Assessment(
        t=1.0, epoch=1, warm=True, host=BudgetState(current=5), suspicions=[huge] * 99
    )
    kept = bounded(theirs)
    assert len(kept.suspicions) <= MAX_EVIDENCE
    (one, *_) = kept.suspicions
    assert one.confidence == 1.0
    assert len(msgspec.json.encode(kept)) < 50_000
