"""A policy's pods: what is added, what is refused, and pods at random.

Tests ``injection/policy.py``.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from plimsoll_api.names import POLICY_LABEL, REFUSED
from plimsoll_api.supervision import POD_ENGINE_ENV, EngineType
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.injection.policy import ALLOW_GROUP_RESTARTS, Admitted, admit
from plimsoll_operator.render.containers import Images
from tests.pod_specs import SELECTED, pods, policies, policy, without_supervisor

IMAGES = Images("engine:1", "supervisor:1")
Object = dict[str, Any]


def vllm(**fields: Any) -> Object:
    return {"name": "engine", "image": "vllm/vllm-openai:v0.24.0"} | fields


def pod(*containers: Object, labels: Object | None = None, **spec: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "vllm-", "labels": SELECTED | (labels or {})},
        "spec": {"containers": list(containers or (vllm(),))} | spec,
    }


def supervisor(admitted: Admitted) -> Object:
    assert admitted.refusal is None, admitted.refusal
    found: Object = admitted.pod["spec"]["initContainers"][-1]
    return found


def engine_of(admitted: Admitted) -> Object:
    (text,) = [one["value"] for one in supervisor(admitted)["env"] if one["name"] == POD_ENGINE_ENV]
    found: Object = json.loads(text.replace("$$", "$"))
    return found


def test_an_engine_gets_its_supervisor_and_the_supervisor_its_engine() -> None:
    owner = {"kind": "ReplicaSet", "name": "vllm-7f9c", "controller": True}
    given = pod(
        vllm(args=["--port=9000", "--model", "m"], resources={"limits": {"memory": "20Gi"}}),
        labels={"pod-template-hash": "7f9c"},
    )
    given["metadata"]["ownerReferences"] = [owner]
    before = copy.deepcopy(given)
    made = admit(given, policy(), IMAGES)
    assert given == before, "the argument is not changed"
    assert engine_of(made) == {
        "engine": {
            "admin_url": "http://127.0.0.1:9000",
            "container": "engine",
            "model": "m",
            "serves": True,
            "serving_url": "http://127.0.0.1:9000",
            "type": "vllm",
            "version": "",
        },
        "memory_limit_bytes": 20 << 30,
        "workload": {"kind": "Deployment", "name": "vllm"},
    }
    assert made.pod["metadata"]["labels"][POLICY_LABEL] == "fuzz"
    volumes = {one["name"]: one for one in made.pod["spec"]["volumes"]}
    assert volumes["plimsoll-config"]["configMap"] == {"name": "fuzz.policy"}
    mounts = {one["name"]: one["mountPath"] for one in supervisor(made)["volumeMounts"]}
    assert mounts["plimsoll-token"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert set(mounts) <= set(volumes)


def test_a_dollar_in_a_models_name_is_no_reference_to_a_variable() -> None:
    made = admit(pod(vllm(args=["--model", "$(MODEL)"])), policy(), IMAGES)
    assert engine_of(made)["engine"]["model"] == "$(MODEL)"
    (text,) = [one["value"] for one in supervisor(made)["env"] if one["name"] == POD_ENGINE_ENV]
    assert "$$(MODEL)" in text


def test_the_policy_says_the_engine_where_the_pod_does_not() -> None:
    router = {"name": "router", "image": "router:1"}
    wanted = policy(engine={"type": "custom", "port": 18_000})
    found = engine_of(admit(pod(router), wanted, IMAGES))["engine"]
    assert found["type"] == EngineType.CUSTOM.value
    assert found["serving_url"] == "http://127.0.0.1:18000"
    named = policy(engine={"type": "vllm", "container": "b"})
    made = admit(pod({"name": "a", "image": "x"}, {"name": "b", "image": "y"}), named, IMAGES)
    assert engine_of(made)["engine"]["container"] == "b"
    assert engine_of(made)["engine"]["type"] == "vllm"


@pytest.mark.parametrize(
    ("refused", "spec", "reason"),
    [
        (pod(hostPID=True), {}, "spec.hostPID: true"),
        (pod({"name": "web", "image": "nginx"}), {}, "no container runs vLLM or SGLang"),
        (pod({"name": "web", "image": "nginx"}), {"engine": {"container": "web"}}, "type: custom"),
        (pod(vllm(args=["--port=9464"])), {}, "needs ports 9464 and 9465"),
        (
            pod(vllm(), {"name": "x", "image": "x", "ports": [{"containerPort": 9465}]}),
            {},
            "spec.containers[x].ports[0].containerPort: the supervisor needs",
        ),
        (
            pod(initContainers=[{
                "name": "x", "image": "x", "restartPolicy": "Always",
                "ports": [{"containerPort": 9464}],
            }]),
            {},
            "the supervisor needs ports",
        ),
        (pod(vllm(), vllm(name="other")), {}, "which container is the engine? Use the policy's"),
        (pod(vllm(), {"name": "supervisor", "image": "x"}), {}, "spec.containers[supervisor]"),
        (pod(volumes=[{"name": "plimsoll-run", "emptyDir": {}}]), {}, "volumes[plimsoll-run]"),
        (pod(vllm(securityContext={"runAsNonRoot": True})), {}, "runAsUser is not set"),
        (
            pod(vllm(volumeMounts=[{"name": "x", "mountPath": "/opt/plimsoll-probe"}])),
            {"probe": {"enabled": True}},
            "volumeMounts[/opt/plimsoll-probe]: the probe is mounted there",
        ),
        (pod(os={"name": "windows"}), {}, "spec.os.name: windows"),
        (pod(resources={"limits": {"memory": "1Gi"}}), {}, "spec.resources bounds"),
        (
            pod(vllm(resources={"limits": {"memory": "1Gi"}})),
            {"memory": {"host": {"growthBudget": "2Gi"}}},
            "less than the policy's spec.memory.host.growthBudget",
        ),
        (pod(labels={"leaderworkerset.sigs.k8s.io/name": "g"}), {}, "recreates the whole group"),
        (
            pod(labels={"leaderworkerset.sigs.k8s.io/worker-index": "1"}),
            {},
            "recreates the whole group",
        ),
        (pod(labels={"ray.io/node-type": "worker"}), {}, "serve no port"),
    ],
)  # fmt: skip
def test_what_cannot_be_supervised_safely_is_left_alone_and_says_why(
    refused: Object, spec: Object, reason: str
) -> None:
    made = admit(refused, policy(**spec), IMAGES)
    assert made.refusal is not None
    assert reason in made.refusal
    assert made.pod["metadata"]["annotations"] == {REFUSED: made.refusal}
    assert made.pod["spec"] == refused["spec"]


def test_a_group_that_consents_is_supervised() -> None:
    leader = pod(labels={"leaderworkerset.sigs.k8s.io/name": "g"})
    leader["metadata"]["annotations"] = {ALLOW_GROUP_RESTARTS: "true"}
    assert admit(leader, policy(), IMAGES).refusal is None


@pytest.mark.parametrize(
    ("labels", "annotations", "worker"),
    [
        ({"leaderworkerset.sigs.k8s.io/worker-index": "0"}, {}, False),
        ({"leaderworkerset.sigs.k8s.io/worker-index": "2"}, {}, True),
        # Before the admission of LeaderWorkerSets has labelled it.
        ({}, {"leaderworkerset.sigs.k8s.io/leader-name": "g-1"}, True),
    ],
)
def test_a_pod_of_a_group_knows_its_place(
    labels: Object, annotations: Object, worker: bool
) -> None:
    prefix = "leaderworkerset.sigs.k8s.io"
    given = pod(labels={f"{prefix}/name": "g", f"{prefix}/group-index": "1"} | labels)
    given["metadata"]["annotations"] = {ALLOW_GROUP_RESTARTS: "true"} | annotations
    given["spec"]["subdomain"] = "g"
    found = engine_of(admit(given, policy(), IMAGES))
    place = {"index": "1", "subdomain": "g"}
    assert found["group"] == place | ({"worker": True} if worker else {})
    assert found["engine"]["serves"] is not worker


def test_a_pod_that_may_not_be_root_gets_no_root() -> None:
    made = admit(pod(securityContext={"runAsNonRoot": True, "runAsUser": 2000}), policy(), IMAGES)
    context = supervisor(made)["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (2000, True)


def examine(before: Object, wanted: SupervisionPolicy) -> None:
    kept = copy.deepcopy(before)
    made = admit(before, wanted, IMAGES)
    assert before == kept
    assert admit(made.pod, wanted, IMAGES) == made, "injecting twice is injecting once"
    if made.refusal is not None:
        assert made.pod["spec"] == before["spec"]
        added = made.pod["metadata"].get("annotations", {}).keys()
        assert set(added) - set(before["metadata"].get("annotations", {})) <= {REFUSED}
        return
    assert without_supervisor(made.pod) == without_supervisor(before), "nothing else is added"
    (found,) = [one for one in made.pod["spec"]["initContainers"] if one["name"] == "supervisor"]
    volumes = {one["name"] for one in made.pod["spec"]["volumes"]}
    assert {one["name"] for one in found["volumeMounts"]} <= volumes


@given(pods(), policies())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_pods_at_random(before: Object, wanted: SupervisionPolicy) -> None:
    examine(before, wanted)


@pytest.mark.long
@given(pods(), policies())
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
def test_2000_pods_at_random(before: Object, wanted: SupervisionPolicy) -> None:
    examine(before, wanted)
