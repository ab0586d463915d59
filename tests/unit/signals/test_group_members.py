"""What the leader of a multi-node group reads of its workers' supervisors.

Tests ``signals/other_pods.py``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from plimsoll_api.assessment import Assessment, BudgetState, Segment, Suspicion
from plimsoll_api.incidents import IncidentKind
from plimsoll_sidecar.signals import other_pods
from plimsoll_sidecar.signals.other_pods import (
    MAX_EVIDENCE_LINES,
    MAX_PAGE_AGE_S,
    MAX_PODS,
    MIN_ABSENCE_S,
    PAGE_TIMEOUT_S,
    GroupMembers,
    GroupPages,
    make_worker_matcher,
    truncate_assessment,
)
from tests.unit.clients.api_server import ApiServer, endpoint
from tests.unit.signals.group_pods import OTHER, WORKER, Clock, free_port, serving


def state(**suspicion: Any) -> bytes:
    found = [Suspicion(IncidentKind.HOST_GROWTH, Segment.SHARED, 0.5, 1.0, **suspicion)]
    assessment = Assessment(t=1.0, epoch=1, warm=True, suspicions=found)
    return msgspec.json.encode({"time": 1.0, "assessment": assessment, "open": []})


@pytest.fixture
def port() -> int:
    return free_port()


def members(api: ApiServer, port: int, clock: Callable[[], float] | None = None) -> GroupMembers:
    rule = make_worker_matcher("LeaderWorkerSet", "llm-0")
    return GroupMembers(GroupPages(api.endpoint_slices, "llm", rule, port), clock or Clock())


def test_the_workers_of_the_own_group_are_asked_and_no_other_pod(api: ApiServer, port: int) -> None:
    api.add(
        "llm",
        [
            endpoint("llm-0", WORKER),
            endpoint("llm-0-1", WORKER),
            endpoint("llm-1-1", WORKER),
            endpoint("llm-0-x", WORKER),
            endpoint("llm-0-2", "example.com"),
            {"addresses": []},
        ],
    )
    group = members(api, port)
    with serving(WORKER, port, state(bytes=7)):
        group.poll()
    (query,) = api.queries
    assert query == {"labelSelector": "kubernetes.io/service-name in (llm)", "limit": "64"}
    found = group.read_assessments()
    assert list(found) == ["llm-0-1"]
    assert found["llm-0-1"] is not None
    assert found["llm-0-1"].suspicions[0].bytes == 7


def test_the_workers_of_a_ray_cluster_are_all_other_pods_of_its_service(
    api: ApiServer, port: int
) -> None:
    listed = ["llm-head-x7k2p", "llm-gpu-worker-b2f9q", "llm-head-x7k2p-1", ""]
    service = "plimsoll-llm-0a"
    api.add(service, [*(endpoint(name, WORKER) for name in listed), {"addresses": [WORKER]}])
    rule = make_worker_matcher("RayCluster", "llm-head-x7k2p")
    group = GroupMembers(GroupPages(api.endpoint_slices, service, rule, port), Clock())
    with serving(WORKER, port, state(bytes=7)):
        group.poll()
    assert sorted(group.read_assessments()) == ["llm-gpu-worker-b2f9q", "llm-head-x7k2p-1"]


def test_a_ray_cluster_has_no_more_members_than_another_group(api: ApiServer, port: int) -> None:
    api.add("llm", [endpoint(f"pod-{number}", WORKER) for number in range(4 * MAX_PODS)])
    rule = make_worker_matcher("RayCluster", "h")
    group = GroupMembers(GroupPages(api.endpoint_slices, "llm", rule, port), Clock())
    with serving(WORKER, port, state()):
        group.poll()
    assert len(group.read_assessments()) == MAX_PODS


def test_an_old_answer_and_a_pod_that_is_gone_say_nothing(api: ApiServer, port: int) -> None:
    api.add("llm", [endpoint("llm-0-1", WORKER), endpoint("llm-0-2", OTHER)])
    clock = Clock()
    group = members(api, port, clock)
    with serving(WORKER, port, state()), serving(OTHER, port, state()):
        group.poll()
        assert None not in group.read_assessments().values()
        del api.slices[0]["endpoints"][0]
        group.poll()
    assert group.read_assessments()["llm-0-1"] is None
    assert group.read_assessments()["llm-0-2"] is not None
    clock.now += MAX_PAGE_AGE_S
    api.answer = 503, {}, b"{}"
    group.poll()
    assert set(group.read_assessments().values()) == {None}


def test_a_pod_is_gone_after_the_api_server_has_not_listed_it_for_a_while(
    api: ApiServer, port: int
) -> None:
    api.add("llm", [endpoint("llm-0-1", WORKER), endpoint("llm-0-2", OTHER)])
    clock = Clock()
    group = members(api, port, clock)
    clock.now += MIN_ABSENCE_S
    assert not group.is_gone("llm-0-9"), "nothing is known before the first list"
    group.poll()
    del api.slices[0]["endpoints"][0]
    clock.now += MIN_ABSENCE_S - 1
    group.poll()
    assert not group.is_gone("llm-0-1")
    answer, api.answer = api.answer, (503, {}, b"{}")
    clock.now += 10
    group.poll()
    assert not group.is_gone("llm-0-1"), "a list that failed shows nothing"
    api.answer = answer
    group.poll()
    assert group.is_gone("llm-0-1")
    assert group.is_gone("llm-0-9"), "an earlier supervisor knew it"
    assert not group.is_gone("llm-0-2"), "it exists, though it does not report"
    api.slices[0]["endpoints"].append(endpoint("llm-0-1", WORKER))
    group.poll()
    assert not group.is_gone("llm-0-1"), "LeaderWorkerSet gives a new pod the same name"


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
def test_a_page_that_no_supervisor_writes_is_no_answer(
    api: ApiServer, port: int, body: bytes
) -> None:
    api.add("llm", [endpoint("llm-0-1", WORKER)])
    group = members(api, port)
    with serving(WORKER, port, body):
        group.poll()
    assert group.read_assessments() == {}


def test_an_error_page_is_no_answer(api: ApiServer, port: int) -> None:
    api.add("llm", [endpoint("llm-0-1", WORKER)])
    group = members(api, port)
    with serving(WORKER, port, state(), status=500):
        group.poll()
    assert group.read_assessments() == {}


def test_more_members_than_a_group_has_are_not_asked(api: ApiServer, port: int) -> None:
    api.add("llm", [endpoint(f"llm-0-{number}", WORKER) for number in range(1, 4 * MAX_PODS)])
    group = members(api, port)
    with serving(WORKER, port, state()):
        group.poll()
    assert len(group.read_assessments()) == MAX_PODS


def test_texts_are_cut() -> None:
    huge = Suspicion(
        IncidentKind.HOST_GROWTH, None, 9.0, 1.0, process="p" * 10_000, evidence=["e" * 10_000] * 99
    )
    theirs = Assessment(
        t=1.0, epoch=1, warm=True, host=BudgetState(current=5), suspicions=[huge] * 99
    )
    kept = truncate_assessment(theirs)
    assert len(kept.suspicions) <= MAX_EVIDENCE_LINES
    (one, *_) = kept.suspicions
    assert one.confidence == 1.0
    assert len(msgspec.json.encode(kept)) < 50_000


def test_silent_pods_do_not_make_the_answers_of_others_old(
    api: ApiServer, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked one after another, seven silent pods take longer than an answer stands for."""
    monkeypatch.setattr(other_pods, "PAGE_TIMEOUT_S", 0.5)
    silent = [endpoint(f"llm-0-{number}", OTHER) for number in range(2, MAX_PODS + 1)]
    api.add("llm", [*silent, endpoint("llm-0-1", WORKER)])
    found = members(api, port, time.monotonic)
    with socket.create_server((OTHER, port), backlog=MAX_PODS), serving(WORKER, port, state()):
        begin = time.monotonic()
        found.poll()
        took = time.monotonic() - begin
    assert took < MAX_PODS * 0.5 / 3
    assert found.read_assessments()["llm-0-1"] is not None


def test_the_longest_round_is_shorter_than_an_answer_stands_for() -> None:
    assert (
        MAX_PODS / other_pods.MAX_CONCURRENT_REQUESTS * PAGE_TIMEOUT_S + other_pods.POLL_PERIOD_S
        < MAX_PAGE_AGE_S
    )
