"""A group that is created again and again is one crash loop, whichever pods it had.

Tests ``fleet/group_loops.py`` and its incidents in ``fleet/incidents.py``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from plimsoll_api.leakincident import LeakIncidentSpec, LeakIncidentStatus
from plimsoll_api.roles import PodRole
from plimsoll_api.workloads import Membership, WorkloadRef
from plimsoll_operator.fleet.group_loops import GroupHistory, GroupStarts
from plimsoll_operator.fleet.incidents import plan_incidents
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.kinds import POLICY, Key
from tests.lab.definitions import Definitions

KEY = Key("ml", "engines", POLICY.kind)
BIG = WorkloadRef("LeaderWorkerSet", "big")
POLICY_ITEM: dict[str, Any] = {
    "kind": "SupervisionPolicy",
    "metadata": {"name": "engines", "namespace": "ml", "uid": "u"},
}


def at(seconds: int) -> str:
    return f"2026-01-01T{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}Z"


def leader(
    created: int, ready: bool = False, state: SupervisionState = SupervisionState.SUPERVISED
) -> SelectedPod:
    view = None if ready else PodView.make_without_containers("big-0", "1", at(created), False)
    member = Membership(BIG, "leaderworkerset.x-k8s.io", "4a")
    return SelectedPod(
        "big-0", "default", state, member=member, created=at(created), view=view,
        role=PodRole.PREFILL,
    )  # fmt: skip


def worker(created: int) -> SelectedPod:
    member = Membership(BIG, "leaderworkerset.x-k8s.io", "4a", worker=True)
    return SelectedPod(
        "big-0-1", "default", SupervisionState.SUPERVISED, member=member, created=at(created)
    )


def starts(history: GroupHistory, *created: int, ready: bool = False) -> GroupStarts:
    for second in created:
        (found,) = history.record_starts(
            KEY, [leader(second, ready), worker(second + 1)], at(second + 2)
        )
    return found


def plan(group: GroupStarts, incidents: list[Any], now: int) -> Any:
    return plan_incidents(POLICY_ITEM, [], incidents, at(now), [group])


def opened(definitions: Definitions, group: GroupStarts, now: int) -> dict[str, Any]:
    """The incident as the API server takes it."""
    (made,) = plan(group, [], now).new
    msgspec.convert(made["spec"], LeakIncidentSpec)
    msgspec.convert(made["status"], LeakIncidentStatus)
    definitions.create({name: part for name, part in made.items() if name != "status"})
    made["metadata"] |= {"creationTimestamp": at(now), "uid": "i"}
    incident: dict[str, Any] = made
    return incident


def test_four_recreations_in_ten_minutes_are_one_incident(definitions: Definitions) -> None:
    history = GroupHistory()
    group = starts(history, 0, 20, 40, 60)
    assert (group.recreations, group.is_looping) == (3, False)
    group = starts(history, 80)
    assert group.is_looping
    made = opened(definitions, group, 82)
    spec = made["spec"]
    assert (spec["kind"], spec["podGroup"], spec["pod"]) == ("CrashLoop", "4a", "big-0")
    assert spec["workloadRef"]["name"] == "big"
    assert spec["target"] == {"role": "Prefill"}
    assert "recreated 4 times within 10 minutes" in made["status"]["message"]
    for second in range(100, 700, 20):
        later = plan(starts(history, second), [made], second + 2)
        assert not later.new, "one for the group"
        assert not later.updates, "it outlives each of its pods"


def test_a_status_that_was_not_written_is_written(definitions: Definitions) -> None:
    group = starts(GroupHistory(), 0, 20, 40, 60, 80)
    made = opened(definitions, group, 82)
    (update,) = plan(group, [made | {"status": {}}], 90).updates
    assert update["metadata"] == {"name": made["metadata"]["name"], "namespace": "ml"}
    assert update["status"]["message"] == made["status"]["message"]


def test_it_ends_when_the_group_is_ready_and_stays(definitions: Definitions) -> None:
    history = GroupHistory()
    made = opened(definitions, starts(history, 0, 20, 40, 60, 80), 82)
    (young,) = history.record_starts(KEY, [leader(100, ready=True)], at(130))
    assert plan(young, [made], 130).updates == []
    (settled,) = history.record_starts(KEY, [leader(100, ready=True)], at(221))
    (ended,) = plan(settled, [made], 221).updates
    assert (ended["status"]["phase"], ended["status"]["outcome"]) == ("Resolved", "Recovered")
    assert plan(settled, [], 221).new == []


def test_a_group_that_is_gone_ends_it_after_a_while(definitions: Definitions) -> None:
    made = opened(definitions, starts(GroupHistory(), 0, 20, 40, 60, 80), 82)
    assert plan_incidents(POLICY_ITEM, [], [made], at(100), []).updates == []
    (ended,) = plan_incidents(POLICY_ITEM, [], [made], at(700), []).updates
    assert ended["status"]["outcome"] == "PodGone"


def test_roll_outs_slow_restarts_and_other_pods_are_no_loop() -> None:
    slow = starts(GroupHistory(), *range(0, 3600, 200))
    assert slow.recreations <= 3
    same = GroupHistory()
    assert starts(same, 5, 5, 5, 5, 5, 5).recreations == 0
    for state in (SupervisionState.REFUSED, SupervisionState.WAITING):
        assert GroupHistory().record_starts(KEY, [leader(0, state=state)], at(1)) == []
    deployment = SelectedPod("a", "default", SupervisionState.SUPERVISED, created=at(0))
    assert GroupHistory().record_starts(KEY, [deployment], at(1)) == []


def test_the_history_is_bounded_and_forgets() -> None:
    history = GroupHistory()
    group = starts(history, *range(500))
    assert group.recreations == 31
    assert history.record_starts(KEY, [], at(600)) == []
    (later,) = history.record_starts(KEY, [leader(2000)], at(2001))
    assert later.recreations == 0
    history.forget(KEY)
    assert starts(history, 2010).recreations == 0
