"""What a policy should have, by what its pods, Leases and incidents are."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_api.names import POLICY_LABEL, SERVICE_RESTARTS_ANNOTATION
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.workloads import Membership, WorkloadRef
from plimsoll_operator.config import DEFAULT_IMAGES
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState, summarize_pod
from plimsoll_operator.fleet.supervisor_metrics import SupervisorMetrics
from plimsoll_operator.kinds import Object, Ref, make_ref, parse_object
from plimsoll_operator.plans.policy import MAX_SERVICE_ACCOUNTS, PolicyPlan, make_plan
from plimsoll_operator.plans.service import Failure
from plimsoll_operator.status.policy import make_status

NOW = "2026-01-01T12:00:00Z"
ITEM = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "SupervisionPolicy",
    "metadata": {"name": "engines", "namespace": "ml", "uid": "u", "generation": 1},
    "spec": {"selector": {"matchLabels": {"app": "vllm"}}},
}
POLICY = parse_object(SupervisionPolicy, ITEM)
VLLM = Membership(workload=WorkloadRef("Deployment", "vllm"), api_group="apps", revision="a")


def pod(
    name: str,
    state: SupervisionState = SupervisionState.SUPERVISED,
    account: str = "vllm",
    holds: bool | None = None,
) -> SelectedPod:
    holds = state is SupervisionState.SUPERVISED if holds is None else holds
    return SelectedPod(name, account, state, member=VLLM, may_hold_slot=holds)


def plan(*pods: SelectedPod, owned: list[Object] | None = None, **more: Any) -> Any:
    known = {make_ref(one): one for one in owned or []}
    return make_plan(POLICY, known, pods, more.pop("incidents", []), NOW, **more)


def lease(name: str, holder: str = "", restarts: str = "", at: str = NOW, uid: str = "u") -> Object:
    return {
        "kind": "Lease",
        "metadata": {
            "name": name,
            "ownerReferences": [{"controller": True, "uid": uid}],
            "annotations": {SERVICE_RESTARTS_ANNOTATION: restarts} if restarts else {},
        },
        "spec": {"holderIdentity": holder, "renewTime": at},
    }


def subjects(found: PolicyPlan) -> list[str]:
    (binding,) = [one for one in found.desired if one["kind"] == "RoleBinding"] or [{}]
    return [one["name"] for one in binding.get("subjects", ())]


@pytest.mark.parametrize(
    ("pods", "accounts"),
    [
        ((), []),
        ((pod("a", SupervisionState.WAITING),), []),
        ((pod("a", SupervisionState.REFUSED),), []),
        ((pod("a"),), ["vllm"]),
        ((pod("a"), pod("b", account="other")), ["other", "vllm"]),
        # The last pod of an account still gives its slot back and closes its incident.
        ((pod("a", SupervisionState.LEAVING, holds=True),), ["vllm"]),
        (
            (pod("a", account="other"), pod("b", SupervisionState.LEAVING, holds=True)),
            ["other", "vllm"],
        ),
        # Of one that has ended nothing runs any more.
        ((pod("a", SupervisionState.LEAVING, holds=False),), []),
    ],
)
def test_accounts_have_rights_while_a_supervisor_runs(
    pods: tuple[SelectedPod, ...], accounts: list[str]
) -> None:
    assert subjects(plan(*pods)) == accounts


def test_more_accounts_than_a_binding_may_name_are_a_failure_that_says_so() -> None:
    found = plan(*(pod(f"p-{n}", account=f"a-{n:03}") for n in range(MAX_SERVICE_ACCOUNTS + 1)))
    assert len(subjects(found)) == MAX_SERVICE_ACCOUNTS
    assert found.failure.reason == "TooManyServiceAccounts"
    assert f"a-{MAX_SERVICE_ACCOUNTS:03}" in found.failure.message


@pytest.mark.parametrize(
    ("item", "goes"),
    [
        (lease("old-restart-0"), True),
        (lease("old-restart-0", holder="a"), False),  # its holder still exists
        (lease("old-restart-0", holder="gone"), True),
        (lease("old-restart-0", restarts="3"), False),  # its restarts still count
        (lease("old-restart-0", restarts="3", at="2025-01-01T00:00:00Z"), True),
        (lease("old-restart-0", restarts="3", at="no time"), True),
        (lease("old-restart-0", uid="somebody else's"), False),
    ],
)
def test_a_lease_goes_once_nobody_holds_it_and_nothing_counts(item: Object, goes: bool) -> None:
    found = plan(pod("a"), owned=[item])
    assert [one["metadata"]["name"] for one in found.surplus] == (["old-restart-0"] if goes else [])


def test_a_held_lease_stays_in_the_role() -> None:
    found = plan(pod("a"), owned=[lease("old-restart-0", holder="a")])
    (role,) = [one for one in found.desired if one["kind"] == "Role"]
    (leases,) = [one for one in role["rules"] if one["resources"] == ["leases"]]
    assert "old-restart-0" in leases["resourceNames"]


def test_the_same_observation_gives_the_same_plan() -> None:
    pods = [
        pod("b"),
        pod("a", SupervisionState.WAITING),
        pod("c", SupervisionState.LEAVING, holds=True),
    ]
    first = plan(*pods)
    owned = [
        one
        | {"metadata": one["metadata"] | {"ownerReferences": [{"controller": True, "uid": "u"}]}}
        for one in first.desired
    ]
    again = plan(*reversed(pods), owned=owned)
    assert again.desired == first.desired
    assert again.surplus == []
    assert Ref("ConfigMap", "engines.policy") in {make_ref(one) for one in again.desired}


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        ((), ("True", "NoPods")),
        ((pod("a"),), ("True", "Supervised")),
        ((pod("a"), pod("b", SupervisionState.WAITING)), ("True", "PartlySupervised")),
        (
            tuple(pod(f"p-{n}", SupervisionState.WAITING) for n in range(50)),
            ("False", "NoPodSupervised"),
        ),
        ((pod("a", SupervisionState.REFUSED),), ("False", "NoPodSupervised")),
    ],
)
def test_a_policy_is_ready_only_where_a_supervisor_runs(
    pods: tuple[SelectedPod, ...], said: tuple[str, str]
) -> None:
    found = make_status(ITEM, pods, [], None, None, NOW)
    (ready,) = [one for one in found["conditions"] if one["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == said


def test_a_pod_whose_supervisor_does_not_see_its_engine_is_not_supervised() -> None:
    """The policy said Ready, Supervised while the supervisor could read nothing of the engine."""
    metrics = {
        "a": SupervisorMetrics(missing_signals=(("engine", "EngineSilent"),)),
        "b": SupervisorMetrics(missing_signals=()),
    }
    found = make_status(ITEM, (pod("a"), pod("b"), pod("c")), [], metrics, None, NOW)
    (ready,) = [one for one in found["conditions"] if one["type"] == "Ready"]
    assert (found["supervised"], found["selected"]) == (2, 3)
    assert sum(one["supervised"] for one in found["workloads"]) == 2
    assert (ready["status"], ready["reason"]) == ("True", "EngineSilent")
    assert "cannot observe their engines: a" in ready["message"]
    alone = make_status(ITEM, (pod("a"),), [], metrics, None, NOW)
    (ready,) = [one for one in alone["conditions"] if one["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "EngineSilent")


def supervised(name: str, *containers: dict[str, Any], **status_: Any) -> SelectedPod:
    """A pod with a supervisor whose server's container is as told."""
    item = {
        "metadata": {"name": name, "uid": name, "labels": {POLICY_LABEL: "engines"}},
        "spec": {"initContainers": [{"name": "supervisor"}], "containers": [{"name": "server"}]},
        "status": {"containerStatuses": list(containers)} | status_,
    }
    return summarize_pod(item, POLICY, ["engines"], DEFAULT_IMAGES)


def server(ready: bool = False, **waiting: str) -> dict[str, Any]:
    state = {"waiting": waiting} if waiting else {"running": {}}
    return {"name": "server", "ready": ready, "restartCount": 0, "state": state}


PULL = server(reason="ErrImagePull", message="not found")
NO_CLAIM = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
    "message": 'persistentvolumeclaim "models" not found',
}  # fmt: skip
NO_CONFIG = {
    "metadata": {}, "reason": "FailedMount", "message": 'configmap "c" not found',
    "lastTimestamp": NOW,
}  # fmt: skip


@pytest.mark.parametrize(
    ("pods", "events", "said"),
    [
        ([supervised("a", server(ready=True))], {}, ("True", "Supervised", "")),
        ([supervised("a", server())], {}, ("True", "Supervised", "")),
        (
            [supervised("a", PULL)], {},
            ("False", "ImagePullBackOff", "a: server: ImagePullBackOff (not found)"),
        ),
        (
            [supervised("a", PULL), supervised("b", server(ready=True))], {},
            ("True", "Supervised", "a: server: ImagePullBackOff (not found)"),
        ),
        (
            [supervised("a", conditions=[NO_CLAIM])], {},
            ("False", "Unschedulable", 'a: persistentvolumeclaim "models" not found'),
        ),
        (
            [supervised("a", server(reason="ContainerCreating"))], {"a": [NO_CONFIG]},
            ("False", "FailedMount", 'a: FailedMount (configmap "c" not found)'),
        ),
        (
            [supervised("a", PULL), supervised("b", PULL)], {},
            ("False", "ImagePullBackOff", "a (and 1 more): server: ImagePullBackOff"),
        ),
    ],
)  # fmt: skip
def test_a_policys_ready_carries_the_first_cause_of_its_pods(
    pods: list[SelectedPod], events: dict[str, Any], said: tuple[str, str, str]
) -> None:
    found = make_status(ITEM, pods, [], None, None, NOW, events=events)
    (ready,) = [one for one in found["conditions"] if one["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == said[:2]
    assert said[2] in ready["message"]


def test_drained_pods_are_counted_and_named() -> None:
    pods = [pod("a"), pod("b")]
    metrics = {"a": SupervisorMetrics(drained=True), "b": SupervisorMetrics(drained=False)}
    found = make_status(ITEM, pods, [], metrics, None, NOW)
    assert found["drained"] == 1
    (ready,) = [one for one in found["conditions"] if one["type"] == "Ready"]
    assert "drained by a person: a" in ready["message"]
    unknown = make_status(ITEM, pods, [], {"a": SupervisorMetrics()}, None, NOW)
    assert "drained" not in unknown, "unknown is not none"
    kept = make_status(ITEM | {"status": found}, pods, [], None, None, NOW)
    assert kept["drained"] == 1


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (None, ("False", "False")),
        (Failure("ApplyFailed", "etcd is slow", is_lasting=False), ("True", "False")),
        (Failure("InvalidSpec", "spec.x: no", is_lasting=True), ("False", "True")),
    ],
)
def test_tools_that_know_kstatus_see_whether_waiting_helps(
    failure: Failure | None, said: tuple[str, str]
) -> None:
    found = make_status(ITEM, [pod("a")], [], None, failure, NOW)
    told = {one["type"]: one["status"] for one in found["conditions"]}
    assert (told["Reconciling"], told["Stalled"]) == said
