"""Suspect revisions of a policy's workloads, and what its status says of each workload."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.engines import EngineType
from plimsoll_api.supervision import Action
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_SHOWN_WORKLOADS
from plimsoll_api.supervisor_config import EngineEndpoint, PodEngine, make_pod_config
from plimsoll_api.workloads import Membership, WorkloadRef
from plimsoll_operator.fleet.revisions import find_suspect_workloads
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.fleet.supervisor_metrics import SlowLeak, SupervisorMetrics
from plimsoll_operator.fleet.workloads import group_pods_by_workload, index_workload_statuses
from plimsoll_operator.kinds import parse_object
from plimsoll_operator.plans.policy import make_supervisor_config
from plimsoll_operator.plans.rolling_restart import SUSPECT_REVISION_MESSAGE, explain_manual_restart
from plimsoll_operator.status.events import make_suspect_notices
from plimsoll_operator.status.policy import make_status

VLLM, LLAMA = WorkloadRef("Deployment", "vllm"), WorkloadRef("StatefulSet", "llama")
BIG = WorkloadRef("LeaderWorkerSet", "big")


def at(minute: int) -> str:
    return f"2026-01-01T00:{minute:02}:00Z"


def item(**more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {"name": "engines", "namespace": "ml", "uid": "u", "generation": 1},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}},
    } | more


def pod(
    name: str, ref: WorkloadRef = VLLM, revision: str = "64d8", group: str = "", created: int = 0
) -> SelectedPod:
    member = Membership(ref, "apps", group, revision)
    return SelectedPod(
        name,
        "default",
        SupervisionState.SUPERVISED,
        member=member,
        may_hold_slot=True,
        created=at(created),
    )


def leak(pod: str, minute: int = 1, phase: str = "Confirmed", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": f"{pod}-{minute}", "creationTimestamp": at(minute)},
        "spec": {"pod": pod, "kind": "HostGrowth", "openedAt": at(minute)} | spec,
        "status": {"phase": phase, "attribution": {"segment": "anonymous"}},
    }


def found(pods: list[SelectedPod], incidents: list[Any], before: Any = None) -> dict[Any, Any]:
    return find_suspect_workloads(group_pods_by_workload(pods), incidents, before or {})


def test_most_replicas_of_one_revision_of_one_workload_make_it_suspect() -> None:
    pods = [*(pod(f"vllm-64d8-{n}") for n in range(3)), pod("vllm-aa11-9", revision="aa11")]
    pods += [pod(f"llama-{n}", LLAMA, "llama-7c") for n in range(3)]
    leaks = [leak("vllm-64d8-0", 1), leak("vllm-64d8-1", 2), leak("vllm-64d8-2", 3, "Open")]
    assert found(pods, leaks[:1]) == {}, "one replica's leak is an incident"
    assert found(pods, leaks) == {
        VLLM: {
            "revision": "64d8",
            "leak": "HostGrowth in anonymous",
            "since": at(2),
            "leakingReplicas": 2,
            "replicas": 3,
            "action": "Reported",
            "changed": [],
        }
    }
    # Leaks in two workloads, or in two revisions of one, are not one leak.
    apart = [leak("vllm-64d8-0"), leak("llama-0"), leak("vllm-aa11-9")]
    assert found(pods, apart) == {}


def test_a_pod_that_is_gone_counts_with_its_replica_set_alone() -> None:
    pods = [pod(f"vllm-64d8-{n}") for n in range(2)]
    suspect = found(pods[:1], [leak("vllm-64d8-0"), leak("vllm-64d8-gone")])[VLLM]
    assert (suspect["leakingReplicas"], suspect["replicas"]) == (2, 2), "never 2 of 1"
    assert VLLM in found(pods, [leak("vllm-64d8-0"), leak("vllm-64d8-gone")])
    assert found(pods, [leak("vllm-64d8-0"), leak("vllm-beef-gone")]) == {}
    # A StatefulSet's next pod has the name of the one before, and maybe another revision.
    sts = [pod("llama-0", LLAMA, "r2", created=30), pod("llama-1", LLAMA, "r2", created=30)]
    assert found(sts, [leak("llama-0", 10), leak("llama-1", 40)]) == {}
    assert LLAMA in found(sts, [leak("llama-0", 35), leak("llama-1", 40)])
    assert found(sts, [leak("llama-0", 35), leak("llama-7", 40)]) == {}


def test_leaks_in_the_pods_of_one_group_are_one_replicas() -> None:
    pods = [pod(f"big-0{n}", BIG, "5f", "0") for n in ("", "-1")]
    pods += [pod("big-1", BIG, "5f", "1")]
    assert found(pods, [leak("big-0"), leak("big-0-1")]) == {}
    assert found(pods, [leak("big-0"), leak("big-1")])[BIG]["replicas"] == 2


def test_a_revision_stays_suspect_while_its_pods_are_there() -> None:
    pods = [pod(f"vllm-64d8-{n}") for n in range(2)]
    leaks = [leak("vllm-64d8-0"), leak("vllm-64d8-1")]
    first = make_status(item(), pods, leaks, {}, None, at(5))
    (condition,) = [one for one in first["conditions"] if one["type"] == "SuspectRevision"]
    assert condition["status"] == "True"
    assert condition["message"] == (
        "Deployment/vllm: HostGrowth in anonymous in 2 of 2 replicas of revision 64d8 since "
        + at(1)
    )
    (notice,) = make_suspect_notices({}, first)
    assert (notice.type, notice.reason) == ("Warning", "SuspectRevision")
    assert "Deployment/vllm: 2 of 2 replicas of revision 64d8" in notice.message
    aged = make_status(item(status=first), pods, [], {}, None, at(6))
    assert aged["workloads"] == [first["workloads"][0] | {"openIncidents": 0}]
    assert make_suspect_notices(first, aged) == []
    held = make_status(
        item(status=first), pods, leaks, {}, None, at(6), {VLLM: SUSPECT_REVISION_MESSAGE}
    )
    assert held["workloads"][0]["suspectRevision"]["action"] == "Held"
    fresh = [pod("vllm-beef-0", revision="beef")]
    after = make_status(item(status=first), fresh, [], {}, None, at(7))
    assert "suspectRevision" not in after["workloads"][0]


def test_the_status_shows_the_workloads_that_matter_most() -> None:
    pods = [pod(f"w{n:02}-64d8-0", WorkloadRef("Deployment", f"w{n:02}")) for n in range(40)]
    pods.append(SelectedPod("bare", "default", SupervisionState.WAITING))
    metrics = {f"w{n:02}-64d8-0": SupervisorMetrics(host=n / 20, device=0.1) for n in range(30)}
    made = make_status(
        item(), pods, [leak("w39-64d8-0")], metrics, None, at(5), {None: "recreate them"}
    )
    assert made["workloadCount"] == 41
    shown = made["workloads"]
    assert len(shown) == MAX_SHOWN_WORKLOADS
    assert [one["name"] for one in shown[:2]] == ["w29", "w28"]
    assert shown[0] == {
        "apiGroup": "apps", "kind": "Deployment", "name": "w29", "selected": 1, "supervised": 1,
        "waitingForRestart": 0, "openIncidents": 0, "consumedPercent": 145,
    }  # fmt: skip
    few = make_status(
        item(),
        [pods[39], pods[-1]],
        [leak("w39-64d8-0")],
        None,
        None,
        at(5),
        {None: explain_manual_restart(None)},
    )
    assert [one["kind"] for one in few["workloads"]] == ["Deployment", "Pod"]
    assert few["workloads"][0]["openIncidents"] == 1
    assert few["workloads"][1]["message"] == explain_manual_restart(None)
    (ready,) = [one for one in few["conditions"] if one["type"] == "Ready"]
    assert ready["message"].endswith("to recreate their pods: pods without an owner")
    # Before the supervisors are asked, what is known of their memory stays.
    again = make_status(item(status=made), pods[:30], [], None, None, at(6))
    assert [one.get("consumedPercent") for one in again["workloads"][:2]] == [145, 140]
    for one in (made, few, again):
        SupervisionPolicy.model_validate(item(status=one))
    assert index_workload_statuses(few).keys() == {"Deployment/w39", "Pod/"}


def test_an_owners_name_is_any_text_and_shown_without_its_escapes() -> None:
    forged = WorkloadRef("Job\x1b[2J", "x\n\x1b[31m" + "y" * 250)
    made = make_status(
        item(), [pod("p", forged)], [], {}, None, at(5), {forged: explain_manual_restart(forged)}
    )
    SupervisionPolicy.model_validate(item(status=made))
    assert "\\x1b" not in repr(made)
    assert "\\n" not in repr(made)


@given(st.permutations(range(8)))
def test_the_order_of_pods_and_incidents_does_not_matter(order: list[int]) -> None:
    pods = [pod(f"vllm-64d8-{n}") for n in range(4)] + [
        pod(f"llama-{n}", LLAMA, "r1") for n in range(4)
    ]
    leaks = [leak(one.name, minute) for minute, one in enumerate(pods)]
    expected = make_status(item(), pods, leaks, {}, None, at(9))
    shuffled = [pods[n] for n in order], [leaks[n] for n in reversed(order)]
    assert make_status(item(), *shuffled, {}, None, at(9)) == expected


@pytest.mark.parametrize("workload", [None, VLLM])
def test_a_pod_that_nothing_would_create_anew_is_not_replaced(workload: WorkloadRef | None) -> None:
    manifest = item()
    manifest["spec"] |= {"supervision": {"ladder": ["Trim", "PodReplace"]}}
    common = make_supervisor_config(parse_object(SupervisionPolicy, manifest))
    url = "http://127.0.0.1:8000"
    own = PodEngine(EngineEndpoint(EngineType.VLLM, url, url), workload)
    ladder = make_pod_config(common, own).supervision.ladder
    assert (Action.POD_REPLACE in ladder) is (workload is not None)
    assert Action.TRIM in ladder


def test_a_slow_leak_of_a_pod_is_a_condition_of_its_policy() -> None:
    def condition(
        metrics: dict[str, SupervisorMetrics] | None, before: Any = None
    ) -> dict[str, Any] | None:
        shown = make_status(item(status=before or {}), [pod("vllm-0")], [], metrics, None, at(9))
        found = [one for one in shown["conditions"] if one["type"] == "SlowLeak"]
        return found[0] if found else None

    leaks = SupervisorMetrics(slow_leaks=(SlowLeak("device", "non_torch", 4000.0, 200 * 3600.0),))
    seen = condition({"vllm-0": leaks})
    assert seen is not None
    assert (seen["status"], seen["reason"]) == ("True", "MemoryKeepsGrowing")
    assert seen["message"] == (
        "vllm-0: device memory (non_torch) grows by 14.0 MiB an hour and reaches its limit in about"
        " 8 days"
    )
    assert condition(None, {"conditions": [seen]}) == seen, "it stays until the next scrape"
    assert (condition({"vllm-0": SupervisorMetrics(slow_leaks=())}) or {})["status"] == "False"
    assert (condition(None) or {})["status"] == "Unknown"
