"""Decisions over many replicas: bad revisions, roll-outs, the circuit breaker, pods' stories."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_operator.fleet import history
from plimsoll_operator.fleet.breaker import HOLDER, turns
from plimsoll_operator.fleet.pods import examine
from plimsoll_operator.fleet.suspect import changes, find
from plimsoll_operator.kinds import ref
from plimsoll_operator.reconcile import parse, reconcile
from plimsoll_operator.render import Images
from plimsoll_operator.render.deployment import pod_hash
from plimsoll_operator.status import conditions
from plimsoll_operator.status.build import status

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


def incident(pod: str, opened: str = NOW, phase: str = "Confirmed", **more: Any) -> dict[str, Any]:
    spec = {"service": "qwen", "pod": pod, "container": "engine", "kind": "HostGrowth"}
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": f"i-{pod}", "namespace": "ml", "creationTimestamp": opened},
        "spec": spec | {"openedAt": opened},
        "status": {"phase": phase, "attribution": {"segment": "python_objects"}} | more,
    }


PODS = [pod(f"qwen-aaa-{n}") for n in range(4)]


def at(minute: int) -> str:
    return f"2026-01-01T00:{minute:02}:00Z"


def test_most_replicas_with_the_same_leak_make_a_revision_suspect() -> None:
    leaks = [incident(f"qwen-aaa-{n}", at(n)) for n in range(4)]
    assert find("new", PODS, leaks[:2]) is None, "half is not most"
    found = find("new", PODS, leaks[:3])
    assert found is not None
    assert (found.leaking, found.replicas, found.since) == (3, 4, at(2))
    assert found.leak == "HostGrowth in python_objects"
    assert find("old", PODS, leaks) is None
    assert find("new", PODS[:1], leaks[:1]) is None, "one replica's leak is an incident"


@pytest.mark.parametrize(
    "change",
    [{"phase": "Open"}, {"outcome": "Cleared"}, {"attribution": {"segment": "shared"}}],
)
def test_what_is_not_the_same_confirmed_leak_does_not_count(change: dict[str, Any]) -> None:
    leaks = [incident(f"qwen-aaa-{n}") for n in range(3)]
    leaks[1]["status"] |= change
    assert find("new", PODS, leaks) is None


def test_a_replica_that_was_replaced_counts_with_its_revision() -> None:
    leaks = [incident("qwen-aaa-gone"), incident("qwen-aaa-0"), incident("qwen-aaa-1")]
    assert find("new", PODS, leaks) is not None
    again = [incident("qwen-aaa-0")] * 3
    assert find("new", PODS, again) is None, "one replica three times is one"


def service(**rollout: Any) -> Any:
    return parse(item(rollout=rollout))


def test_a_roll_out_under_way_is_held_and_a_finished_one_is_told() -> None:
    suspect = find("new", PODS, [incident(f"qwen-aaa-{n}") for n in range(3)])
    under_way = {"revisions": {"update": "new", "current": "old"}}
    done = {"revisions": {"update": "new", "current": "new", "previous": "old"}}
    known = {"old", "new"}
    held = history.course(service(), under_way, "new", suspect, known)
    assert (held.revision, held.paused, held.action) == ("new", True, "Held")
    told = history.course(service(), done, "new", suspect, known)
    assert (told.paused, told.action) == (False, "Reported")
    back = service(onLeak="Rollback")
    for status_ in (under_way, done):
        course = history.course(back, status_, "new", suspect, known)
        assert (course.revision, course.paused, course.action) == ("old", False, "RolledBack")
    nowhere = history.course(back, under_way, "new", suspect, {"new"})
    assert (nowhere.revision, nowhere.paused) == ("new", True)
    going_on = history.course(service(onLeak="Continue"), under_way, "new", suspect, known)
    assert (going_on.revision, going_on.paused) == ("new", False)
    remembered = under_way | {"suspectRevision": {"revision": "new"}}
    assert history.course(back, remembered, "new", None, known).action == "RolledBack"
    assert history.course(back, remembered, "newer", None, known).action == "None"


def test_a_roll_back_runs_the_old_template_and_says_what_changed() -> None:
    old, new = item(), item(engine={"args": ["--x"]}, rollout={"onLeak": "Rollback"})
    hashes = [pod_hash(parse(one)) for one in (old, new)]
    owned = {
        ref(one): one
        for spec in (old, new)
        for one in reconcile(parse(spec), {}, [], [], IMAGES, 10).desired
    }
    pods = [pod(f"qwen-aaa-{n}", hashes[1]) for n in range(3)]
    leaks = [incident(f"qwen-aaa-{n}") for n in range(3)]
    new["status"] = {"revisions": {"update": hashes[1], "current": hashes[0]}}
    plan = reconcile(parse(new), owned, pods, leaks, IMAGES, 10, new["status"])
    deployment = next(one for one in plan.desired if one["kind"] == "Deployment")
    assert deployment["metadata"]["annotations"]["plimsoll.dev/pod-hash"] == hashes[0]
    assert "--x" not in str(deployment["spec"]["template"])
    assert any("containers[engine].command" in change for change in plan.changed)
    revisions = [one for one in plan.surplus if one["kind"] == "ControllerRevision"]
    assert revisions == [], "what is run and what is wanted are both kept"

    new["status"] = status(new, parse(new), None, pods, leaks, {}, None, NOW, plan=plan)
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
    later = reconcile(parse(new), owned, [], [], IMAGES, 10, new["status"])
    assert later.course.revision == hashes[0]
    again = status(new, parse(new), None, [], [], {}, None, "2026-01-02T00:00:00Z", plan=later)
    times = {one["type"]: one["lastTransitionTime"] for one in again["conditions"]}
    assert times["Stalled"] == NOW


def test_a_person_goes_back_to_the_last_good_revision() -> None:
    asked = service(revision="LastGood")
    known = {"old", "new"}
    for revisions in ({"current": "old"}, {"current": "new", "previous": "old"}):
        course = history.course(asked, {"revisions": revisions}, "new", None, known)
        assert (course.revision, course.action, course.requested) == ("old", "RolledBack", True)
        assert conditions.requested(course, False) == [], "while pods are replaced it progresses"
        (done,) = conditions.requested(course, True)
        assert (done.type, done.status, done.reason) == (
            "Progressing",
            False,
            "RolledBackOnRequest",
        )
        (seen,) = conditions.suspicion(None, course)
        assert seen.status is False, "no leak is blamed for what a person asked for"
    nowhere = history.course(asked, {"revisions": {"current": "new"}}, "new", None, known)
    assert (nowhere.revision, nowhere.action) == ("new", "None")
    (stalled,) = conditions.requested(nowhere, True)
    assert (stalled.type, stalled.reason) == ("Stalled", "NoGoodRevision")
    assert conditions.requested(history.course(service(), {}, "new", None, known), True) == []


def test_a_revision_that_was_gone_back_from_is_never_gone_back_to() -> None:
    done = history.advanced({"current": "old"}, "bad", "bad")
    assert done == {"update": "bad", "current": "bad", "previous": "old"}
    assert history.advanced(done, "bad", "") == done, "under way nothing is decided"
    back = history.advanced(done, "bad", "old")
    assert back == {"update": "bad", "current": "old"}
    mended = history.advanced(back, "newer", "old")
    assert history.last_good(mended, "newer") == "old"


def test_differences_are_named_by_their_path() -> None:
    before = {"spec": {"containers": [{"name": "engine", "image": "a", "args": [1]}]}}
    after = {"spec": {"containers": [{"name": "engine", "image": "b", "args": [1]}], "x": 1}}
    assert changes(before, after) == ["spec.containers[engine].image: a -> b", "spec.x: none -> 1"]
    assert changes(before, before) == []


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
    st.lists(st.sampled_from(["", "pod", HOLDER]), max_size=12),
    st.sets(st.integers(0, 11)),
    st.integers(1, 5),
)
def test_the_breaker_leaves_no_more_slots_open_than_the_fleet_may_bear(
    holders: list[str], leaking: set[int], limit: int
) -> None:
    leases = [lease(f"s{n}", holder) for n, holder in enumerate(holders)]
    incidents = [incident(f"p{n}", at(n), "AwaitingSlot") for n in leaking]
    for one, n in zip(incidents, leaking, strict=True):
        one["spec"]["service"] = f"s{n}"
    found = turns(leases, incidents, limit)
    shut = {one["metadata"]["uid"] for one in found.take}
    freed = {one["metadata"]["uid"] for one in found.give}
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
    assert {f"s{n}" for n, h in enumerate(holders) if h == HOLDER} <= shut | freed


KILLED = {"terminated": {"reason": "OOMKilled", "exitCode": 137, "finishedAt": at(59)}}


def test_a_kill_for_memory_is_told_once() -> None:
    killed = pod("qwen-aaa-0", lastState=KILLED, restartCount=1)
    (new,) = examine(item(), [killed], [], NOW).new
    assert new["spec"]["kind"] == "OutOfMemoryKill"
    assert "limit of 4Gi" in new["status"]["message"]
    assert examine(item(), [killed], [new], NOW).new == []
    own = incident("qwen-aaa-0", "2026-01-01T00:58:30Z")
    own["spec"]["kind"] = "OutOfMemoryKill"
    assert examine(item(), [killed], [own], NOW).new == [], "its supervisor told it"


def test_the_supervisor_is_given_time_to_tell_of_its_engine() -> None:
    killed = pod("qwen-aaa-0", lastState=KILLED, restartCount=1)
    found = examine(item(), [killed], [], "2026-01-01T00:59:10Z")
    assert (found.new, found.again_s) == ([], 20.0)
    mine = pod("qwen-aaa-0", lastState=KILLED)
    mine["status"]["containerStatuses"][0]["name"] = "supervisor"
    assert examine(item(), [mine], [], "2026-01-01T00:59:10Z").new, "nobody else tells of it"


def test_a_crash_loop_begins_and_ends() -> None:
    ended = {"terminated": {"reason": "Error", "exitCode": 3, "finishedAt": at(50)}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    looping = pod("qwen-aaa-0", state=waiting, lastState=ended, restartCount=3)
    (new,) = examine(item(), [looping], [], NOW).new
    assert (new["spec"]["kind"], new["status"]["phase"]) == ("CrashLoop", "Confirmed")
    assert "status 3" in new["status"]["message"]
    well = pod("qwen-aaa-0", ready=True, restartCount=4)
    (end,) = examine(item(), [well], [new], NOW).updates
    assert end["status"]["outcome"] == "Recovered"
    first = pod("qwen-aaa-0", state=waiting, lastState=ended, restartCount=1)
    assert examine(item(), [first], [], NOW).new == []


def test_a_replacement_that_is_asked_for_is_done_and_told() -> None:
    steps = [{"step": "PodReplace", "outcome": "Requested"}]
    asks = incident("qwen-aaa-0", at(1), "AwaitingSlot", timeline=steps)
    assert examine(item(), PODS, [asks], NOW).evict == ["qwen-aaa-0"]
    gone = examine(item(), PODS[1:], [asks], NOW)
    assert gone.evict == []
    assert gone.updates[0]["status"]["outcome"] == "PodReplaced"
    orphan = incident("qwen-aaa-0", at(1))
    assert examine(item(), PODS[1:], [orphan], NOW).updates[0]["status"]["outcome"] == "PodGone"
    young = incident("qwen-aaa-9", NOW)
    assert examine(item(), PODS, [young], NOW).updates == []
