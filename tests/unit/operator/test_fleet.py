"""Decisions over many replicas: bad revisions, roll-outs, the circuit breaker, pods' stories.

Tests ``fleet/revisions.py``, ``fleet/circuit_breaker.py`` and ``fleet/incidents.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_operator.fleet import revisions
from plimsoll_operator.fleet.circuit_breaker import OPERATOR_HOLDER, allocate_slots
from plimsoll_operator.fleet.incidents import IncidentChanges
from plimsoll_operator.fleet.incidents import plan_incidents as found_in
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.revisions import (
    diff_templates,
    find_suspect_revision,
    make_replica_pods,
)
from plimsoll_operator.kinds import make_ref
from plimsoll_operator.plans.service import make_plan, parse_service
from plimsoll_operator.render import Images
from plimsoll_operator.render.deployment import compute_pod_hash
from plimsoll_operator.status import conditions
from plimsoll_operator.status.service import make_status

IMAGES = Images("engine:1", "supervisor:1")
NOW = "2026-01-01T01:00:00Z"


def item(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "qwen", "namespace": "ml", "uid": "u-1", "generation": 2},
        "spec": {"model": {"uri": "file:///m"}} | spec,
    }


def pod(name: str, revision: str = "new", **container: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"plimsoll.dev/revision": revision}},
        "spec": {"containers": [{"name": "engine", "resources": {"limits": {"memory": "4Gi"}}}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "engine"} | container]},
    }


def of(service: str) -> dict[str, str]:
    return {"kind": "InferenceService", "name": service}


def incident(pod: str, opened: str = NOW, phase: str = "Confirmed", **more: Any) -> dict[str, Any]:
    spec = {"workloadRef": of("qwen"), "pod": pod, "container": "engine", "kind": "HostGrowth"}
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": f"i-{pod}", "namespace": "ml", "creationTimestamp": opened},
        "spec": spec | {"openedAt": opened},
        "status": {"phase": phase, "attribution": {"segment": "python_objects"}} | more,
    }


PODS = [pod(f"qwen-aaa-{n}") for n in range(4)]
VIEWS = [PodView.parse(one) for one in PODS]


def plan_incidents(
    service: Any, pods: list[Any], incidents: list[Any], now: str
) -> IncidentChanges:
    return found_in(service, [PodView.parse(one) for one in pods], incidents, now)


def at(minute: int) -> str:
    return f"2026-01-01T00:{minute:02}:00Z"


def test_most_replicas_with_the_same_leak_make_a_revision_suspect() -> None:
    leaks = [incident(f"qwen-aaa-{n}", at(n)) for n in range(4)]
    assert find_suspect_revision("new", make_replica_pods(VIEWS), leaks[:2]) is None, (
        "half is not most"
    )
    found = find_suspect_revision("new", make_replica_pods(VIEWS), leaks[:3])
    assert found is not None
    assert (found.leaking, found.replicas, found.since) == (3, 4, at(2))
    assert found.leak == "HostGrowth in python_objects"
    assert find_suspect_revision("old", make_replica_pods(VIEWS), leaks) is None
    assert find_suspect_revision("new", make_replica_pods(VIEWS[:1]), leaks[:1]) is None, (
        "one replica's leak is an incident"
    )


@pytest.mark.parametrize(
    "change",
    [{"phase": "Open"}, {"outcome": "Cleared"}, {"attribution": {"segment": "shared"}}],
)
def test_what_is_not_the_same_confirmed_leak_does_not_count(change: dict[str, Any]) -> None:
    leaks = [incident(f"qwen-aaa-{n}") for n in range(3)]
    leaks[1]["status"] |= change
    assert find_suspect_revision("new", make_replica_pods(VIEWS), leaks) is None


def test_a_replica_that_was_replaced_counts_with_its_revision() -> None:
    leaks = [incident("qwen-aaa-gone"), incident("qwen-aaa-0"), incident("qwen-aaa-1")]
    assert find_suspect_revision("new", make_replica_pods(VIEWS), leaks) is not None
    again = [incident("qwen-aaa-0")] * 3
    assert find_suspect_revision("new", make_replica_pods(VIEWS), again) is None, (
        "one replica three times is one"
    )


def service(**rollout: Any) -> Any:
    return parse_service(item(rollout=rollout))


def test_a_roll_out_under_way_is_held_and_a_finished_one_reported() -> None:
    suspect = find_suspect_revision(
        "new", make_replica_pods(VIEWS), [incident(f"qwen-aaa-{n}") for n in range(3)]
    )
    under_way = {"revisions": {"update": "new", "current": "old"}}
    done = {"revisions": {"update": "new", "current": "new", "previous": "old"}}
    known = {"old", "new"}
    held = revisions.decide_rollout(service(), under_way, "new", suspect, known)
    assert (held.revision, held.paused, held.action) == ("new", True, "Held")
    told = revisions.decide_rollout(service(), done, "new", suspect, known)
    assert (told.paused, told.action) == (False, "Reported")
    back = service(onLeak="Rollback")
    for status_ in (under_way, done):
        decision = revisions.decide_rollout(back, status_, "new", suspect, known)
        assert (decision.revision, decision.paused, decision.action) == ("old", False, "RolledBack")
    nowhere = revisions.decide_rollout(back, under_way, "new", suspect, {"new"})
    assert (nowhere.revision, nowhere.paused) == ("new", True)
    going_on = revisions.decide_rollout(
        service(onLeak="Continue"), under_way, "new", suspect, known
    )
    assert (going_on.revision, going_on.paused) == ("new", False)
    remembered = under_way | {"suspectRevision": {"revision": "new"}}
    assert revisions.decide_rollout(back, remembered, "new", None, known).action == "RolledBack"
    assert revisions.decide_rollout(back, remembered, "newer", None, known).action == "None"


def test_a_roll_back_runs_the_old_template_and_says_what_changed() -> None:
    old, new = item(), item(engine={"args": ["--x"]}, rollout={"onLeak": "Rollback"})
    hashes = [compute_pod_hash(parse_service(one)) for one in (old, new)]
    owned = {
        make_ref(one): one
        for spec in (old, new)
        for one in make_plan(parse_service(spec), {}, [], [], IMAGES).desired
    }
    pods = [PodView.parse(pod(f"qwen-aaa-{n}", hashes[1])) for n in range(3)]
    leaks = [incident(f"qwen-aaa-{n}") for n in range(3)]
    new["status"] = {"revisions": {"update": hashes[1], "current": hashes[0]}}
    plan = make_plan(parse_service(new), owned, pods, leaks, IMAGES, new["status"])
    deployment = next(one for one in plan.desired if one["kind"] == "Deployment")
    assert deployment["metadata"]["annotations"]["plimsoll.dev/pod-hash"] == hashes[0]
    assert "--x" not in str(deployment["spec"]["template"])
    assert any("containers[engine].command" in change for change in plan.changed)
    kept = [one for one in plan.surplus if one["kind"] == "ControllerRevision"]
    assert kept == [], "what is run and what is wanted are both kept"

    new["status"] = make_status(
        new, parse_service(new), None, pods, leaks, {}, None, NOW, plan=plan
    )
    said = new["status"]["suspectRevision"]
    assert (said["revision"], said["action"], said["leakingReplicas"]) == (
        hashes[1],
        "RolledBack",
        3,
    )
    conditions = {one["type"]: one for one in new["status"]["conditions"]}
    assert conditions["SuspectRevision"]["status"] == "True"
    assert conditions["Stalled"]["reason"] == "RolledBackForLeak"
    # With the bad pods gone and their incidents aged it stays, and nothing moves in the status.
    later = make_plan(parse_service(new), owned, [], [], IMAGES, new["status"])
    assert later.decision.revision == hashes[0]
    again = make_status(
        new, parse_service(new), None, [], [], {}, None, "2026-01-02T00:00:00Z", plan=later
    )
    times = {one["type"]: one["lastTransitionTime"] for one in again["conditions"]}
    assert times["Stalled"] == NOW


def test_a_person_goes_back_to_the_last_good_revision() -> None:
    asked = service(revision="LastGood")
    known = {"old", "new"}
    for known_revisions in ({"current": "old"}, {"current": "new", "previous": "old"}):
        decision = revisions.decide_rollout(
            asked, {"revisions": known_revisions}, "new", None, known
        )
        assert (decision.revision, decision.action, decision.requested) == (
            "old",
            "RolledBack",
            True,
        )
        assert conditions.make_last_good_conditions(decision, False) == [], (
            "while pods are replaced it progresses"
        )
        (done,) = conditions.make_last_good_conditions(decision, True)
        assert (done.type, done.status, done.reason) == (
            "Progressing",
            False,
            "RolledBackOnRequest",
        )
        (seen,) = conditions.make_suspect_revision_conditions(None, decision)
        assert seen.status is False, "no leak is blamed for what a person asked for"
    nowhere = revisions.decide_rollout(asked, {"revisions": {"current": "new"}}, "new", None, known)
    assert (nowhere.revision, nowhere.action) == ("new", "None")
    (stalled,) = conditions.make_last_good_conditions(nowhere, True)
    assert (stalled.type, stalled.reason) == ("Stalled", "NoGoodRevision")
    assert (
        conditions.make_last_good_conditions(
            revisions.decide_rollout(service(), {}, "new", None, known), True
        )
        == []
    )


def test_a_revision_that_was_gone_back_from_is_never_gone_back_to() -> None:
    done = revisions.make_revisions_status({"good": ["old"]}, "bad", "bad", "")
    assert done == {
        "update": "bad",
        "current": "bad",
        "previous": "old",
        "good": ["bad", "old"],
    }
    assert revisions.make_revisions_status(done, "bad", "", "") == done, (
        "under way nothing is decided"
    )
    leaving = revisions.make_revisions_status(done, "bad", "bad", "bad")
    assert leaving["good"] == ["old"], "it is bad from the decision on"
    back = revisions.make_revisions_status(leaving, "bad", "old", "bad")
    assert back == {"update": "bad", "current": "old", "good": ["old"]}
    mended = revisions.make_revisions_status(back, "newer", "old", "")
    assert revisions.find_rollback_revision(mended, "newer", {"old", "bad"}) == "old"


def test_differences_are_named_by_their_path() -> None:
    before = {"spec": {"containers": [{"name": "engine", "image": "a", "args": [1]}]}}
    after = {"spec": {"containers": [{"name": "engine", "image": "b", "args": [1]}], "x": 1}}
    assert diff_templates(before, after) == [
        "spec.containers[engine].image: a -> b",
        "spec.x: none -> 1",
    ]
    assert diff_templates(before, before) == []


def lease(service: str, holder: str = "") -> dict[str, Any]:
    return {
        "kind": "Lease",
        "metadata": {
            "name": f"{service}-restart-0",
            "namespace": "ml",
            "uid": service,
            "labels": {"plimsoll.dev/service": service},
        },
        "spec": {"holderIdentity": holder} if holder else {},
    }


@given(
    st.lists(st.sampled_from(["", "pod", OPERATOR_HOLDER]), max_size=12),
    st.sets(st.integers(0, 11)),
    st.integers(1, 5),
)
def test_the_breaker_leaves_no_more_slots_open_than_the_fleet_may_bear(
    holders: list[str], leaking: set[int], limit: int
) -> None:
    leases = [lease(f"s{n}", holder) for n, holder in enumerate(holders)]
    incidents = [incident(f"p{n}", at(n), "AwaitingSlot") for n in leaking]
    for one, n in zip(incidents, leaking, strict=True):
        one["spec"]["workloadRef"] = of(f"s{n}")
    found = allocate_slots(leases, incidents, limit)
    shut = {one["metadata"]["uid"] for one in found.close}
    freed = {one["metadata"]["uid"] for one in found.reopen}
    assert not shut & freed
    held = holders.count("pod")
    open_ = {
        f"s{n}"
        for n, holder in enumerate(holders)
        if n in leaking and holder != "pod" and f"s{n}" not in shut
    }
    assert held + len(open_) <= max(limit, held)
    quiet = {f"s{n}" for n in range(len(holders)) if n not in leaking}
    assert not shut & quiet, "a service without an incident costs no write"
    assert {f"s{n}" for n, h in enumerate(holders) if h == OPERATOR_HOLDER} <= shut | freed


def asking(
    service: str, created: str = NOW, namespace: str = "ml", phase: str = "AwaitingSlot"
) -> Any:
    found = incident(f"p-{service}", created, phase)
    found["metadata"]["namespace"], found["spec"]["workloadRef"] = namespace, of(service)
    return found


def shut(found: Any) -> set[str]:
    return {one["metadata"]["uid"] for one in found.close}


def in_namespace(namespace: str, service: str, holder: str = "") -> Any:
    found = lease(service, holder)
    found["metadata"]["namespace"] = namespace
    return found


def test_idle_incidents_do_not_shut_out_who_asks_for_a_slot() -> None:
    leases = [lease(f"s{n:02}", "") for n in range(11)]
    incidents = [asking(f"s{n:02}", at(n), phase="Confirmed") for n in range(10)]
    incidents.append(asking("s10", at(50)))
    found = allocate_slots(leases, incidents, 10)
    assert len(shut(found)) == 1
    assert "s10" not in shut(found)


def test_what_an_incident_says_of_its_beginning_does_not_put_it_first() -> None:
    incidents = [asking("s0", at(1)), asking("s1", at(2))]
    incidents[1]["spec"]["openedAt"] = "1970-01-01T00:00:00Z"
    assert shut(allocate_slots([lease("s0", ""), lease("s1", "")], incidents, 1)) == {"s1"}


def test_who_had_a_turn_waits_behind_those_who_had_none() -> None:
    leases, incidents = [lease("s0", ""), lease("s1", "")], [asking("s0", at(1)), asking("s1")]
    assert shut(allocate_slots(leases, incidents, 1)) == {"s1"}
    assert shut(allocate_slots(leases, incidents, 1, last_turn_ends={"s0": 5.0})) == {"s0"}


def test_a_dead_holder_counts_for_nobody_and_its_slot_can_be_shut() -> None:
    leases = [lease("dead", "gone-0"), lease("s1", "")]
    incidents = [asking("dead"), asking("s1", at(1))]
    assert shut(allocate_slots(leases, incidents, 1)) == {"s1"}
    found = allocate_slots(leases, incidents, 1, expired_uids={"dead"})
    assert (shut(found), found.held) == ({"dead"}, 0)
    held_on = allocate_slots(leases, incidents, 1, overlong_uids={"dead"})
    assert (shut(held_on), held_on.held) == (set(), 1), "it is left to its holder"


def test_a_namespace_and_a_service_count_for_half_of_the_limit() -> None:
    hostile = [in_namespace("a", f"s{n}", f"s{n}-0") for n in range(9)]
    other = in_namespace("b", "waits")
    incidents = [asking("waits", namespace="b")]
    assert shut(allocate_slots([*hostile, other], incidents, 10)) == set()
    assert shut(allocate_slots([*hostile[:4], other], incidents, 4)) == set()

    many = [lease("big", f"big-{n}") for n in range(9)]
    for n, one in enumerate(many):
        one["metadata"] |= {"name": f"big-restart-{n}", "uid": f"big-{n}"}
    assert shut(allocate_slots([*many, lease("small", "")], [asking("small")], 4)) == set()

    # Who alone has slots may use all of the limit, and nobody opens more than the limit.
    alone = [in_namespace("a", f"s{n}") for n in range(6)]
    asks = [asking(f"s{n}", namespace="a") for n in range(6)]
    assert len(shut(allocate_slots(alone, asks, 4))) == 2


def test_a_lease_that_is_no_slot_counts_for_nobody() -> None:
    forged = lease("qwen", "anybody")
    forged["metadata"] |= {"name": "qwen-forged", "uid": "forged"}
    found = allocate_slots([forged, lease("s1", "")], [asking("s1"), asking("qwen")], 1)
    assert (found.held, shut(found)) == (0, set())


@pytest.mark.parametrize(
    "opened", ["2026-01-01T00:59:00", "2026-01-01", "1970-01-01T23:59:60Z", "soon", ""]
)
def test_an_incident_with_an_odd_time_is_no_other_ones_affair(opened: str) -> None:
    odd = incident("qwen-aaa-0", at(59)) | {}
    odd["spec"] |= {"openedAt": opened, "kind": "OutOfMemoryKill"}
    killed = pod("qwen-aaa-0")
    container = {"name": "engine", "restartCount": 1, "lastState": KILLED}
    killed["status"] = {"containerStatuses": [container]}
    service = {"apiVersion": "v", "kind": "InferenceService"}
    meta = {"name": "qwen", "namespace": "ml", "uid": "u"}
    found = plan_incidents(service | {"metadata": meta}, [killed], [odd], "2026-01-01T01:05:00Z")
    assert [one["spec"]["kind"] for one in found.new] == ["OutOfMemoryKill"]


KILLED = {"terminated": {"reason": "OOMKilled", "exitCode": 137, "finishedAt": at(59)}}


def test_a_kill_for_memory_is_recorded_once() -> None:
    killed = pod("qwen-aaa-0", lastState=KILLED, restartCount=1)
    (new,) = plan_incidents(item(), [killed], [], NOW).new
    assert new["spec"]["kind"] == "OutOfMemoryKill"
    assert "limit of 4Gi" in new["status"]["message"]
    assert plan_incidents(item(), [killed], [new], NOW).new == []
    own = incident("qwen-aaa-0", "2026-01-01T00:58:30Z")
    own["spec"]["kind"] = "OutOfMemoryKill"
    assert plan_incidents(item(), [killed], [own], NOW).new == [], "its supervisor told it"


def test_the_supervisor_is_given_time_to_tell_of_its_engine() -> None:
    killed = pod("qwen-aaa-0", lastState=KILLED, restartCount=1)
    found = plan_incidents(item(), [killed], [], "2026-01-01T00:59:10Z")
    assert (found.new, found.requeue_s) == ([], 20.0)
    mine = pod("qwen-aaa-0", lastState=KILLED)
    mine["status"]["containerStatuses"][0]["name"] = "supervisor"
    assert plan_incidents(item(), [mine], [], "2026-01-01T00:59:10Z").new, "nobody else tells of it"


def test_a_crash_loop_begins_and_ends() -> None:
    ended = {"terminated": {"reason": "Error", "exitCode": 3, "finishedAt": at(50)}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    looping = pod("qwen-aaa-0", state=waiting, lastState=ended, restartCount=3)
    (new,) = plan_incidents(item(), [looping], [], NOW).new
    assert (new["spec"]["kind"], new["status"]["phase"]) == ("CrashLoop", "Confirmed")
    assert "exit code 3" in new["status"]["message"]
    well = pod("qwen-aaa-0", ready=True, restartCount=4)
    (end,) = plan_incidents(item(), [well], [new], NOW).updates
    assert end["status"]["outcome"] == "Recovered"
    first = pod("qwen-aaa-0", state=waiting, lastState=ended, restartCount=1)
    assert plan_incidents(item(), [first], [], NOW).new == []


def test_a_second_crash_loop_of_a_pod_is_another_incident() -> None:
    ended = {"terminated": {"reason": "Error", "exitCode": 3, "finishedAt": at(50)}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}

    def looping(restarts: int) -> dict[str, Any]:
        return pod("qwen-aaa-0", state=waiting, lastState=ended, restartCount=restarts)

    (first,) = plan_incidents(item(), [looping(3)], [], NOW).new
    first["metadata"]["creationTimestamp"] = at(59)
    assert plan_incidents(item(), [looping(4)], [first], NOW).new == [], "it goes on"
    well = pod("qwen-aaa-0", ready=True, restartCount=5)
    (end,) = plan_incidents(item(), [well], [first], NOW).updates
    over = first | {"status": end["status"]}
    assert plan_incidents(item(), [well], [over], NOW).updates == []
    (second,) = plan_incidents(item(), [looping(9)], [over], NOW).new
    assert second["metadata"]["name"] != first["metadata"]["name"]
    assert (second["spec"]["kind"], second["status"]["phase"]) == ("CrashLoop", "Confirmed")


def test_the_names_of_incidents_are_valid_however_long_a_pods_is() -> None:
    name = "p" * 253
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    for one in (pod(name, lastState=KILLED), pod(name, state=waiting, restartCount=2_000_000_000)):
        (new,) = plan_incidents(item(), [one], [], NOW).new
        assert len(new["metadata"]["name"]) <= 253
        assert new["metadata"]["name"].startswith("ppp")


def test_a_requested_replacement_is_done_and_recorded() -> None:
    steps = [{"step": "PodReplace", "outcome": "Requested"}]
    asks = incident("qwen-aaa-0", at(1), "AwaitingSlot", timeline=steps)
    assert [one.name for one in plan_incidents(item(), PODS, [asks], NOW).evict] == ["qwen-aaa-0"]
    gone = plan_incidents(item(), PODS[1:], [asks], NOW)
    assert gone.evict == []
    assert gone.updates[0]["status"]["outcome"] == "PodReplaced"
    orphan = incident("qwen-aaa-0", at(1))
    assert (
        plan_incidents(item(), PODS[1:], [orphan], NOW).updates[0]["status"]["outcome"] == "PodGone"
    )
    young = incident("qwen-aaa-9", NOW)
    assert plan_incidents(item(), PODS, [young], NOW).updates == []


def test_the_next_pod_of_a_stateful_set_is_another_pod() -> None:
    asks = incident("qwen-0", at(2), timeline=[{"step": "PodReplace", "outcome": "Requested"}])
    other = incident("qwen-0", at(2))
    here, successor = pod("qwen-0"), pod("qwen-0")
    here["metadata"]["creationTimestamp"] = at(1)
    successor["metadata"]["creationTimestamp"] = at(3)
    assert [one.name for one in plan_incidents(item(), [here], [asks], NOW).evict] == ["qwen-0"]
    assert plan_incidents(item(), [here], [asks, other], NOW).updates == []
    found = plan_incidents(item(), [successor], [asks, other], NOW)
    assert found.evict == [], "it would be evicted for ever"
    assert [one["status"]["outcome"] for one in found.updates] == ["PodReplaced", "PodGone"]


def test_an_incident_ends_at_once_where_its_pod_has_a_successor() -> None:
    opened, replaced, now = (f"2026-01-01T00:00:{second:02}Z" for second in (0, 5, 6))
    asks = incident("qwen-0", opened, timeline=[{"step": "PodReplace", "outcome": "Requested"}])
    successor = pod("qwen-0")
    successor["metadata"]["creationTimestamp"] = replaced
    (end,) = plan_incidents(item(), [successor], [asks], now).updates
    assert end["status"]["outcome"] == "PodReplaced"
    unseen = plan_incidents(item(), [], [asks], now)
    assert (unseen.updates, unseen.requeue_s) == ([], 24.0), "the pod may be younger than the store"


@pytest.mark.parametrize(
    ("group", "outcome", "end"),
    [("0", "Succeeded", "Resolved"), ("0", "Begun", "Resolved"), ("0", "Failed", "Unresolved"),
     (None, "Succeeded", "Unresolved")],
)  # fmt: skip
def test_a_group_that_its_restart_recreated_is_cured(
    group: str | None, outcome: str, end: str
) -> None:
    """Its supervisor ends with the group, and cannot tell."""
    steps = [{"step": "Drain", "outcome": "Succeeded"}]
    steps += [{"step": "EngineRestart", "outcome": outcome}]
    gone = incident("qwen-0", at(2), timeline=steps)
    gone["spec"]["workloadRef"] = {"kind": "LeaderWorkerSet", "name": "qwen"}
    if group is not None:
        gone["spec"]["podGroup"] = group
    (update,) = plan_incidents(item(), [], [gone], NOW).updates
    assert update["status"]["phase"] == end
