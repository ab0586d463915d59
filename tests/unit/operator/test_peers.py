"""What the operator publishes to supervisors about their peers, when, and how much.

Tests ``fleet/peers.py`` and ``scraper.py``.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from plimsoll_api.peers import MAX_PEERS, PEERS_FILE, Peer, PeerGrowth, decode_peers
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervisor_config import CONFIG_FILE
from plimsoll_api.workloads import Membership, WorkloadRef
from plimsoll_operator.config import DEFAULT_INTERVALS
from plimsoll_operator.fleet.peers import (
    PeersFileCache,
    list_pods_with_growth,
    list_policy_peers,
    list_service_peers,
    make_peers_file,
)
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.fleet.supervisor_figures import SupervisorFigures
from plimsoll_operator.kinds import Key
from plimsoll_operator.plans.policy import render_objects as render_policy
from plimsoll_operator.plans.service import make_plan, parse_service
from plimsoll_operator.render import Images
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.scraper import Scraper

KEY = Key("ml", "qwen")
GROWN = PeerGrowth(1 << 20, 60, 7)
NAMES = ("qwen-0", "qwen-1", "qwen-2")
FIGURES = {name: SupervisorFigures(host_growth=GROWN) for name in NAMES}


def pod(name: str, revision: str = "64d8") -> dict[str, Any]:
    labels = {"plimsoll.dev/revision": revision} if revision else {}
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels}}


def incident(name: str, phase: str = "Open", kind: str = "HostGrowth") -> dict[str, Any]:
    return {"spec": {"pod": name, "kind": kind}, "status": {"phase": phase}}


PODS = list_service_peers([PodView.parse(pod(name)) for name in NAMES])


@pytest.mark.parametrize(
    ("phase", "kind", "counts"),
    [
        ("Open", "HostGrowth", True),
        ("Verifying", "DeviceGrowth", True),
        ("Resolved", "HostGrowth", False),
        ("Suppressed", "HostGrowth", False),
        ("Open", "Stall", False),
    ],
)
def test_growth_is_compared_while_its_incident_is_open(phase: str, kind: str, counts: bool) -> None:
    assert list_pods_with_growth([incident("qwen-0", phase, kind)]) == (
        {"qwen-0"} if counts else set()
    )
    text = PeersFileCache(time.monotonic).make_text(
        KEY, PODS, [incident("qwen-0", phase, kind)], FIGURES
    )
    assert bool(text) is counts


def test_an_incident_without_a_status_has_just_begun() -> None:
    assert list_pods_with_growth([{"spec": {"pod": "qwen-0", "kind": "HostGrowth"}}]) == {"qwen-0"}


def test_a_summary_has_each_replica_that_says_what_it_grew_by() -> None:
    figures = FIGURES | {
        "qwen-1": SupervisorFigures(host=0.4),
        "gone": SupervisorFigures(host_growth=GROWN),
    }
    found = decode_peers(
        PeersFileCache(time.monotonic).make_text(KEY, PODS, [incident("qwen-0")], figures).encode()
    )
    assert found == (
        Peer("qwen-0", "64d8", host=GROWN),
        Peer("qwen-2", "64d8", host=GROWN),
    )


def test_pods_of_unknown_revision_are_nobodys_peers() -> None:
    assert list_service_peers([PodView.parse(pod("a")), PodView.parse(pod("b", ""))]) == [
        Peer("a", "64d8")
    ]


def test_one_replica_has_nobody_to_be_compared_with() -> None:
    assert make_peers_file([Peer("qwen-0", "64d8", host=GROWN)], {"qwen-0"}) == ""


def test_a_large_service_tells_of_so_many_and_of_the_suspected_first() -> None:
    peers = [Peer(f"qwen-{n:03}", "64d8", host=GROWN) for n in range(200)]
    file = make_peers_file(peers, {"qwen-150", "qwen-199"}).encode()
    found = [one.pod for one in decode_peers(file)]
    assert len(found) == MAX_PEERS
    assert found == sorted(found)
    assert {"qwen-000", "qwen-061", "qwen-150", "qwen-199"} <= set(found)


def test_a_policy_compares_the_supervised_replicas_of_one_workload() -> None:
    def of(
        name: str,
        workload: str | None,
        state: SupervisionState = SupervisionState.SUPERVISED,
        **member: Any,
    ) -> Any:
        ref = WorkloadRef("Deployment", workload) if workload else None
        return SelectedPod(
            name, "default", state, member=Membership(ref, "apps", **({"revision": "1"} | member))
        )

    pods = [
        of("a-0", "a"),
        of("a-1", "a", revision="2"),
        of("b-0", "b"),
        of("b-1", "b"),
        of("bare", None),
        of("waits", "a", SupervisionState.WAITING),
        of("worker", "a", group="0"),
        of("unknown", "a", revision=""),
    ]
    peers = list_policy_peers(pods)
    assert [one.pod for one in peers] == ["a-0", "a-1", "b-0", "b-1"]
    figures = {one.pod: SupervisorFigures(device_growth=GROWN) for one in peers}
    found = decode_peers(
        PeersFileCache(time.monotonic).make_text(KEY, peers, [incident("a-1")], figures).encode()
    )
    assert found == (
        Peer("a-0", "1", "Deployment/a", device=GROWN),
        Peer("a-1", "2", "Deployment/a", device=GROWN),
    )


def test_a_text_is_kept_for_a_minute_and_a_quiet_service_has_none() -> None:
    now = 0.0
    summaries = PeersFileCache(lambda: now)
    opened = [incident("qwen-0")]
    assert summaries.make_text(KEY, PODS, opened, {}) == "", "nobody was asked yet"
    assert summaries.compute_next_s(KEY) is None
    first = summaries.make_text(KEY, PODS, opened, FIGURES)
    grown = {name: SupervisorFigures(host_growth=PeerGrowth(2 << 20, 120, 9)) for name in NAMES}
    now = DEFAULT_INTERVALS.publish - 1
    assert summaries.make_text(KEY, PODS, opened, grown) == first
    assert summaries.compute_next_s(KEY) == 1
    now = DEFAULT_INTERVALS.publish
    file = summaries.make_text(KEY, PODS, opened, grown).encode()
    assert decode_peers(file)[0].host == PeerGrowth(2 << 20, 120, 9)
    assert summaries.make_text(KEY, PODS, [incident("qwen-0", "Resolved")], grown) == ""
    assert summaries.compute_next_s(KEY) is None


def test_supervisors_find_it_beside_their_configuration() -> None:
    item = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "qwen", "namespace": "ml", "uid": "u-1", "generation": 2},
        "spec": {"model": {"uri": "file:///m"}},
    }
    policy = SupervisionPolicy.model_validate(
        item | {"kind": "SupervisionPolicy", "spec": {"selector": {"matchLabels": {"a": "b"}}}}
    )
    text = make_peers_file([Peer(name, "64d8", host=GROWN) for name in NAMES], {"qwen-0"})

    def objects(beside: dict[str, str]) -> list[list[dict[str, Any]]]:
        plan = make_plan(parse_service(item), {}, [], [], Images("e:1", "s:1"), extra_files=beside)
        return [plan.desired, render_policy(policy, [], extra_files=beside)]

    for quiet, told in zip(objects({}), objects({PEERS_FILE: text}), strict=True):
        (before,) = [one for one in quiet if one["kind"] == "ConfigMap"]
        (after,) = [one for one in told if one["kind"] == "ConfigMap"]
        assert set(before["data"]) == {CONFIG_FILE}
        assert after["data"] == before["data"] | {PEERS_FILE: text}
        changed = [one["kind"] for one, other in zip(quiet, told, strict=True) if one != other]
        assert changed == ["ConfigMap"], "no pod is replaced for it"


def test_growth_is_as_new_as_the_last_round_and_changes_no_status() -> None:
    changed: list[Key] = []
    scraper = Scraper(Store(), changed.append)
    assert scraper.get_latest(KEY) == {}
    scraper.publish(KEY, {"qwen-0": SupervisorFigures(host=0.1)})
    newer = {"qwen-0": SupervisorFigures(host=0.1, host_growth=GROWN)}
    scraper.publish(KEY, newer)
    assert scraper.get_latest(KEY) == newer
    assert changed == [KEY], "once, for the share of the budget"
    scraper.forget(KEY)
    assert scraper.get_latest(KEY) == {}
