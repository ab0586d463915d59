"""When the worker of a multi-node group may assume that its group serves.

Tests ``signals/other_pods.py``.
"""

from __future__ import annotations

import msgspec
import pytest

from plimsoll_api.admin import EngineState
from plimsoll_sidecar.signals.other_pods import (
    MIN_LEADER_READY_S,
    POLLING_IDLE_TIMEOUT_S,
    GroupLeader,
    GroupPages,
    make_leader_matcher,
)
from tests.lab.kube import eventually
from tests.unit.clients.api_server import ApiServer, endpoint
from tests.unit.signals.group_pods import OTHER, WORKER, Clock, free_port, serving

LEADER = WORKER


def page(state: EngineState | None) -> bytes:
    return msgspec.json.encode({"time": 1.0, "engine_state": state})


class Group:
    """A leader, ``llm-0``, and another group's, as a worker of the first sees them."""

    def __init__(self, api: ApiServer) -> None:
        self.port, self.clock = free_port(), Clock()
        self.api = api
        api.add("llm", [endpoint("llm-0", LEADER), endpoint("llm-1", OTHER)])
        rule = make_leader_matcher("LeaderWorkerSet", "llm-0-1")
        pages = GroupPages(api.endpoint_slices, "llm", rule, self.port)
        self.leader = GroupLeader(pages, self.clock)

    def poll(self, body: bytes) -> None:
        with serving(LEADER, self.port, body), serving(OTHER, self.port, page(EngineState.SERVING)):
            self.leader.poll()

    def is_serving(self) -> bool:
        """Without its thread, which would look by itself."""
        return self.leader.measure_ready_s() >= MIN_LEADER_READY_S


def test_a_group_serves_once_its_leader_has_been_ready_for_a_while(api: ApiServer) -> None:
    group = Group(api)
    group.poll(page(EngineState.SERVING))
    assert not group.is_serving(), "the leader may not have seen yet that its group restarts"
    group.clock.now += MIN_LEADER_READY_S
    group.poll(page(EngineState.SERVING))
    assert group.is_serving()
    group.poll(page(EngineState.STARTING))
    assert not group.is_serving()


@pytest.mark.parametrize(
    "body", [page(EngineState.STARTING), page(None), b"", b"{}", b"[" * 9999, b'{"engine_state":7}']
)
def test_a_leader_that_does_not_say_that_it_serves_is_not_ready(
    api: ApiServer, body: bytes
) -> None:
    group = Group(api)
    for _ in range(3):
        group.poll(body)
        group.clock.now += MIN_LEADER_READY_S
    assert not group.is_serving()


def test_without_endpoints_nobody_knows(api: ApiServer) -> None:
    group = Group(api)
    group.poll(page(EngineState.SERVING))
    group.clock.now += MIN_LEADER_READY_S
    group.api.answer = 403, {}, b"{}"
    group.poll(page(EngineState.SERVING))
    assert not group.is_serving()


def test_the_leader_is_asked_only_while_somebody_waits(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll_sidecar.signals.other_pods.POLL_PERIOD_S", 0.01)
    group = Group(api)
    with serving(LEADER, group.port, page(EngineState.SERVING)):
        assert not group.leader.is_serving(), "it never waits"
        eventually(lambda: group.leader.measure_ready_s() == 0.0, "it was asked")
        group.clock.now += MIN_LEADER_READY_S
        assert group.leader.is_serving()
        group.clock.now += POLLING_IDLE_TIMEOUT_S + 1
        eventually(lambda: group.leader.measure_ready_s() == float("-inf"), "nobody waits")
        asked = len(group.api.queries)
        assert not group.leader.is_serving(), "what was known then is not known now"
        eventually(lambda: len(group.api.queries) > asked, "asked again")


@pytest.mark.parametrize(
    ("kind", "worker", "leader", "others"),
    [
        ("LeaderWorkerSet", "llm-0-1", "llm-0", ["llm-0-2", "llm-1", "llm", ""]),
        ("LeaderWorkerSet", "a-7-b-3-12", "a-7-b-3", ["a-7", "a-7-b-4"]),
        ("RayCluster", "llm-gpu-worker-b2f9q", "llm-head-x7k2p", ["llm-gpu-worker-zzzzz", ""]),
        ("RayCluster", "llm-worker-a", "llm-head", ["llm-header-x"]),
    ],
)
def test_the_leader_is_known_by_its_name(
    kind: str, worker: str, leader: str, others: list[str]
) -> None:
    leads = make_leader_matcher(kind, worker)
    assert leads(leader)
    assert not any(map(leads, [*others, worker]))


def test_the_page_of_a_leader_of_a_later_version_is_read(api: ApiServer) -> None:
    """It is not ready as far as its worker can tell, and serves as soon as it says so."""
    group = Group(api)
    group.poll(b'{"engine_state":"hibernating","later":1}')
    group.poll(b'{"engine_state":"serving","later":1}')
    group.clock.now += MIN_LEADER_READY_S
    assert group.is_serving()
