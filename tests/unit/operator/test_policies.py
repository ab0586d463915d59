"""From policies and pods to objects and status, without a cluster.

Tests ``fleet/selected_pods.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.names import POLICY_LABEL, REFUSED_ANNOTATION
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_REFUSED_PODS, MAX_STATUS_REASON_CHARS
from plimsoll_api.supervisor_config import (
    EngineEndpoint,
    GroupMember,
    PodEngine,
    SupervisorConfig,
    make_pod_config,
)
from plimsoll_api.workloads import WorkloadRef, make_members_service_name
from plimsoll_operator.config import DEFAULT_IMAGES
from plimsoll_operator.fleet.selected_pods import (
    SelectedPod,
    SupervisionState,
    find_matching_policies,
    parse_policies,
    summarize_pod,
)
from plimsoll_operator.fleet.supervisor_metrics import SupervisorMetrics
from plimsoll_operator.kinds import InvalidSpecError, Key, find_key, parse_object
from plimsoll_operator.plans.policy import render_objects
from plimsoll_operator.plans.service import Failure
from plimsoll_operator.status.policy import make_status

NOW = "2026-01-01T00:00:00Z"
LATER = "2026-01-01T01:00:00Z"


def item(name: str = "engines", created: str = NOW, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-{name}",
            "generation": 3,
            "creationTimestamp": created,
        },
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}} | spec,
    }


def policy(**spec: Any) -> SupervisionPolicy:
    return parse_object(SupervisionPolicy, item(**spec))


ENGINE = {"name": "server", "args": ["vllm", "serve", "m"]}


def pod(name: str = "vllm-0", supervisor: str = "", **spec: Any) -> dict[str, Any]:
    """A pod that a policy selects; ``supervisor`` is the policy that its supervisor is of."""
    sidecar = [{"name": "supervisor"}] if supervisor else []
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "labels": {"app": "vllm"} | ({POLICY_LABEL: supervisor} if supervisor else {}),
        },
        "spec": {
            "initContainers": sidecar,
            "containers": [{"name": "server", "args": ["vllm", "serve", "m"]}],
        }
        | spec,
    }


def config_of(objects: list[dict[str, Any]]) -> SupervisorConfig:
    (found,) = [one for one in objects if one["kind"] == "ConfigMap"]
    return supervisor_config.decode_config(found["data"]["supervisor.json"].encode())


def test_the_objects_of_a_policy() -> None:
    made = render_objects(policy(supervision={"maxUnavailable": 2}), ["vllm", "default"])
    names = [(one["kind"], one["metadata"]["name"]) for one in made]
    assert names == [
        ("ConfigMap", "engines.policy"),
        ("Lease", "engines.policy-restart-0"),
        ("Lease", "engines.policy-restart-1"),
        ("Role", "engines.policy"),
        ("RoleBinding", "engines.policy"),
        ("Service", make_members_service_name("engines")),
    ]
    assert made == render_objects(policy(supervision={"maxUnavailable": 2}), ["default", "vllm"])
    for one in made:
        assert find_key(one) == Key("ml", "engines", "SupervisionPolicy")
        (owner,) = one["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("uid-engines", True)
    subjects = made[-2]["subjects"]
    assert [one["name"] for one in subjects] == ["default", "vllm"]
    assert {one["namespace"] for one in subjects} == {"ml"}
    config = config_of(made)
    assert config.slots == ("engines.policy-restart-0", "engines.policy-restart-1")
    assert (config.service.name, config.service.kind) == ("engines", "SupervisionPolicy")


def test_nobody_has_rights_before_a_supervisor_runs() -> None:
    assert "RoleBinding" not in {one["kind"] for one in render_objects(policy(), [])}


def test_a_pods_supervisor_reads_its_policy_and_its_own_engine() -> None:
    memory = {"host": {"growthBudget": "2Gi", "window": "12h"}}
    common = config_of(render_objects(policy(memory=memory, supervision={"mode": "Recover"}), []))
    url = "http://127.0.0.1:30000"
    own = PodEngine(
        EngineEndpoint(EngineType.SGLANG, url, url, "m", container="server"),
        WorkloadRef("StatefulSet", "sglang"),
        memory_limit_bytes=8 << 30,
        shared_device=True,
    )
    config = make_pod_config(common, own)
    assert config.engine.type is EngineType.SGLANG
    assert config.service.workload == WorkloadRef("StatefulSet", "sglang")
    assert config.supervision.mode == "Recover"
    assert config.memory.shared_device
    host = config.memory.host
    assert host is not None
    assert (host.growth_bytes, host.limit_bytes, host.window_s) == (2 << 30, 8 << 30, 43_200)
    small = make_pod_config(common, PodEngine(own.engine, memory_limit_bytes=1 << 30)).memory.host
    assert small is not None
    assert small.growth_bytes == small.limit_bytes == 1 << 30, "no budget beyond the limit"


@pytest.mark.parametrize("worker", [True, False])
def test_the_supervisor_of_a_worker_only_looks(worker: bool) -> None:
    common = config_of(render_objects(policy(supervision={"mode": "Recover"}), []))
    url = "http://127.0.0.1:8000"
    own = PodEngine(
        EngineEndpoint(EngineType.VLLM, url, url, serves=not worker),
        WorkloadRef("LeaderWorkerSet", "llm"),
        GroupMember("0", worker, "llm"),
    )
    config = make_pod_config(common, own)
    assert config.service.group == own.group
    assert config.service.is_worker is worker
    assert config.supervision.mode == ("Observe" if worker else "Recover")
    assert bool(config.slots) is not worker, "the slot is the leader's"


def test_the_older_policy_has_the_pod() -> None:
    young, old = item("a", LATER), item("z", NOW)
    twin = item("b", NOW)
    assert [one.metadata.name for one in parse_policies([young, old, twin])] == ["b", "z", "a"]
    leaving = item("gone", "2025-01-01T00:00:00Z")
    leaving["metadata"]["deletionTimestamp"] = NOW
    invalid = item("bad", "2025-01-01T00:00:00Z", selector={})
    elsewhere = item("other", NOW, selector={"matchLabels": {"app": "sglang"}})
    order = parse_policies([young, old, leaving, invalid, elsewhere])
    assert [one.metadata.name for one in find_matching_policies(order, {"app": "vllm"})] == [
        "z",
        "a",
    ]


@pytest.mark.parametrize(
    ("changed", "state", "reason"),
    [
        (pod(), SupervisionState.WAITING, ""),
        (pod(supervisor="engines"), SupervisionState.SUPERVISED, ""),
        (pod(supervisor="former"), SupervisionState.WAITING, ""),
        (
            pod(initContainers=[{"name": "supervisor"}]),
            SupervisionState.REFUSED,
            "contains a container",
        ),
        (pod(hostPID=True), SupervisionState.REFUSED, "spec.hostPID: true"),
        (
            pod(containers=[{"name": "nginx"}]),
            SupervisionState.REFUSED,
            "no container runs vLLM or SGLang",
        ),
    ],
)
def test_where_a_pod_stands(changed: dict[str, Any], state: SupervisionState, reason: str) -> None:
    found = summarize_pod(changed, policy(), ["engines"], DEFAULT_IMAGES)
    assert found.state is state
    assert reason in found.reason
    assert (found.account, found.is_oldest_policy, found.other_policies) == ("default", True, ())


def test_a_label_alone_is_no_supervisor() -> None:
    claimed = pod(supervisor="engines", initContainers=[])
    assert (
        summarize_pod(claimed, policy(), ["engines"], DEFAULT_IMAGES).state
        is SupervisionState.WAITING
    )


def test_what_a_pod_says_of_itself_is_bounded() -> None:
    forged = pod()
    forged["metadata"]["annotations"] = {REFUSED_ANNOTATION: "\x1b[31m" + "a\n" * 100_000}
    found = summarize_pod(forged, policy(), ["engines"], DEFAULT_IMAGES)
    assert found.state is SupervisionState.REFUSED
    assert len(found.reason) <= MAX_STATUS_REASON_CHARS
    assert "\n" not in found.reason
    assert "\x1b" not in found.reason


def test_pods_of_others_are_left_to_them() -> None:
    ours = pod()
    labels = {"plimsoll.dev/service": "qwen", "app.kubernetes.io/managed-by": "plimsoll-operator"}
    ours["metadata"]["labels"] |= labels
    found = summarize_pod(ours, policy(), ["engines"], DEFAULT_IMAGES)
    assert found.state is SupervisionState.REFUSED
    assert "InferenceService qwen" in found.reason
    shared = summarize_pod(pod(), policy(), ["older", "engines"], DEFAULT_IMAGES)
    assert shared.state is SupervisionState.REFUSED
    assert "the older SupervisionPolicy older also selects" in shared.reason
    assert (shared.is_oldest_policy, shared.other_policies) == (False, ("older",))
    kept = summarize_pod(pod(supervisor="engines"), policy(), ["older", "engines"], DEFAULT_IMAGES)
    assert kept.state is SupervisionState.SUPERVISED, (
        "its supervisor keeps its rights until it ends"
    )


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_pods_that_ended_count_for_nothing(phase: str) -> None:
    ended = pod(supervisor="engines") | {"status": {"phase": phase}}
    found = summarize_pod(ended, policy(), ["engines"], DEFAULT_IMAGES)
    assert found.state is SupervisionState.LEAVING
    assert make_status(item(), [found], [], {}, None, NOW)["selected"] == 0


def seen(count: int, state: SupervisionState, **more: Any) -> list[SelectedPod]:
    return [
        SelectedPod(f"{state.name.lower()}-{at:04}", "default", state, **more)
        for at in range(count)
    ]


def condition(found: dict[str, Any], type_: str) -> dict[str, Any]:
    one: dict[str, Any]
    (one,) = [one for one in found["conditions"] if one["type"] == type_]
    return one


def test_the_status_counts_and_names_few() -> None:
    pods = [
        *seen(3, SupervisionState.SUPERVISED),
        *seen(2, SupervisionState.WAITING),
        *reversed(seen(40, SupervisionState.REFUSED, reason="hostPID")),
        *seen(1, SupervisionState.LEAVING),
    ]
    found = make_status(
        item(), pods, [], {"supervised-0001": SupervisorMetrics(host=0.52)}, None, NOW
    )
    counts = [found[key] for key in ("selected", "supervised", "waitingForRestart", "refused")]
    assert counts == [45, 3, 2, 40]
    assert len(found["refusals"]) == MAX_REFUSED_PODS
    assert found["refusals"][0] == {"pod": "refused-0000", "reason": "hostPID"}
    assert found["memory"] == {"hostConsumedPercent": 50, "replica": "supervised-0001"}
    assert found["observedGeneration"] == 3
    ready = condition(found, "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "PartlySupervised")
    assert ready["message"] == (
        "3 of 45 selected pods are supervised; 2 get a supervisor when they are recreated;"
        " 40 were refused (see status.refusals)"
    )
    assert condition(found, "Conflicting")["status"] == "False"
    # The same again, later and in another order, is the same status: nothing is written.
    again = item() | {"status": found}
    assert make_status(again, pods[::-1], [], None, None, LATER) == found
    SupervisionPolicy.model_validate(again)


def test_both_policies_say_that_they_conflict() -> None:
    older = make_status(
        item(), seen(6, SupervisionState.SUPERVISED, other_policies=("newer",)), [], {}, None, NOW
    )
    newer = make_status(
        item("newer"),
        seen(1, SupervisionState.REFUSED, other_policies=("engines",), is_oldest_policy=False),
        [],
        {},
        None,
        NOW,
    )
    for found, name in ((older, "newer"), (newer, "engines")):
        conflict = condition(found, "Conflicting")
        assert (conflict["status"], conflict["reason"]) == ("True", "PodsSelectedTwice")
        assert conflict["message"].startswith(f"{name} also selects ")
    assert "and 2 more: this policy is older" in condition(older, "Conflicting")["message"]


def test_an_incident_counts_only_for_a_supervised_pod() -> None:
    """Any pod with the account of a supervised one may write one in the policy's name."""

    def incident(pod: str, phase: str) -> dict[str, Any]:
        spec = {"policyRef": {"name": "engines"}, "pod": pod}
        return {"kind": "LeakIncident", "spec": spec, "status": {"phase": phase}}

    pods = [*seen(1, SupervisionState.SUPERVISED), *seen(1, SupervisionState.WAITING)]
    incidents = [
        incident("supervised-0000", "Confirmed"),
        incident("supervised-0000", "Resolved"),
        incident("waiting-0000", "Confirmed"),
        incident("elsewhere", "Confirmed"),
    ]
    assert make_status(item(), pods, incidents, {}, None, NOW)["openIncidents"] == 1


def test_an_invalid_policy_keeps_what_is_known_of_its_pods() -> None:
    known = make_status(item(), seen(2, SupervisionState.SUPERVISED), [], {}, None, NOW)
    bad = item(selector={}) | {"status": known}
    with pytest.raises(InvalidSpecError, match=r"spec\.selector: .*must not be empty"):
        parse_object(SupervisionPolicy, bad)
    failure = Failure("InvalidSpec", "spec.selector: must not be empty", is_lasting=True)
    found = make_status(bad, None, [], None, failure, LATER)
    assert (found["selected"], found["supervised"]) == (2, 2)
    ready = condition(found, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert ready["lastTransitionTime"] == LATER
    assert condition(found, "Conflicting")["lastTransitionTime"] == NOW
