"""Which pods count as replicas, and which of them may leak."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_api.learned import LEARNED_FILE
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervisor_config import CONFIG_FILE
from plimsoll_api.workloads import Membership, WorkloadRef
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.replicas import (
    Replica,
    list_pods_with_growth,
    list_policy_replicas,
    list_service_replicas,
)
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.plans.policy import render_objects as render_policy
from plimsoll_operator.plans.service import make_plan, parse_service
from plimsoll_operator.render import Images


def pod(name: str, revision: str = "64d8") -> dict[str, Any]:
    labels = {"plimsoll.dev/revision": revision} if revision else {}
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels}}


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
def test_a_pod_grows_while_an_incident_of_growth_is_open(
    phase: str, kind: str, counts: bool
) -> None:
    incident = {"spec": {"pod": "qwen-0", "kind": kind}, "status": {"phase": phase}}
    assert list_pods_with_growth([incident]) == ({"qwen-0"} if counts else set())


def test_an_incident_without_a_status_has_just_begun() -> None:
    assert list_pods_with_growth([{"spec": {"pod": "qwen-0", "kind": "HostGrowth"}}]) == {"qwen-0"}


def test_a_pod_of_unknown_revision_is_no_replica() -> None:
    pods = [PodView.parse(pod("a")), PodView.parse(pod("b", ""))]
    assert list_service_replicas(pods) == [Replica("a", "64d8")]


def test_the_replicas_of_a_policy_are_its_supervised_pods_of_a_known_workload() -> None:
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
        of("bare", None),
        of("waits", "a", SupervisionState.WAITING),
        of("worker", "a", group="0"),
        of("unknown", "a", revision=""),
    ]
    assert list_policy_replicas(pods) == [
        Replica("a-0", "1", "Deployment/a"),
        Replica("a-1", "2", "Deployment/a"),
        Replica("b-0", "1", "Deployment/b"),
    ]


def test_supervisors_find_a_file_beside_their_configuration() -> None:
    item = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "qwen", "namespace": "ml", "uid": "u-1", "generation": 2},
        "spec": {"model": {"uri": "file:///m"}},
    }
    policy = SupervisionPolicy.model_validate(
        item | {"kind": "SupervisionPolicy", "spec": {"selector": {"matchLabels": {"a": "b"}}}}
    )

    def objects(beside: dict[str, str]) -> list[list[dict[str, Any]]]:
        plan = make_plan(parse_service(item), {}, [], [], Images("e:1", "s:1"), extra_files=beside)
        return [plan.desired, render_policy(policy, [], extra_files=beside)]

    for quiet, told in zip(objects({}), objects({LEARNED_FILE: "[]\n"}), strict=True):
        (before,) = [one for one in quiet if one["kind"] == "ConfigMap"]
        (after,) = [one for one in told if one["kind"] == "ConfigMap"]
        assert set(before["data"]) == {CONFIG_FILE}
        assert after["data"] == before["data"] | {LEARNED_FILE: "[]\n"}
        changed = [one["kind"] for one, other in zip(quiet, told, strict=True) if one != other]
        assert changed == ["ConfigMap"], "no pod is replaced for it"
