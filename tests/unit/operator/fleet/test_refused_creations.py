"""Tests ``fleet/refused_creations.py``: whether a supervisor is why a pod is refused.

The answers are those of an API server 1.34.
"""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.fleet.refused_creations import (
    RefusedCreation,
    find_owner_kind,
    find_supervisor_refusal,
    parse_refusal_event,
)
from plimsoll_operator.render.containers import Images

Object = dict[str, Any]
IMAGES = Images("engine:1", "supervisor:1")
AT = "2026-11-26T10:00:00Z"


def event(message: str, kind: str = "ReplicaSet", **more: Any) -> Object:
    about = {"apiVersion": "apps/v1", "kind": kind, "name": "theirs-5d", "uid": "u-1"}
    return {"reason": "FailedCreate", "message": message, "involvedObject": about} | (
        more or {"lastTimestamp": AT}
    )


def creating(answer: str, pod: str = "theirs-5d-x7k2p") -> Object:
    return event(f'Error creating: pods "{pod}" is forbidden: {answer}')


def owner(labels: Object | None = None, **container: Any) -> Object:
    engine = {"name": "engine", "image": "vllm/vllm-openai:v0.24.0"} | container
    template = {"metadata": {"labels": labels or {"app": "llm"}}, "spec": {"containers": [engine]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "theirs-5d", "uid": "u-1"},
        "spec": {"template": template},
    }


def policy(**spec: Any) -> SupervisionPolicy:
    return SupervisionPolicy.model_validate(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "SupervisionPolicy",
            "metadata": {"name": "p", "namespace": "ml", "uid": "u", "generation": 1},
            "spec": {"selector": {"matchLabels": {"app": "llm"}}} | spec,
        }
    )


def ours(answer: str, made: Object | None = None, **spec: Any) -> RefusedCreation | None:
    refused = parse_refusal_event(creating(answer))
    assert refused is not None
    return find_supervisor_refusal(refused, made or owner(), policy(**spec), IMAGES)


PSS = 'violates PodSecurity "restricted:latest": '


@pytest.mark.parametrize(
    "answer",
    [
        "failed quota: q: must specify limits.cpu for: supervisor",
        "failed quota: q: must specify limits.cpu for: supervisor; limits.memory for: supervisor",
        f'{PSS}seccompProfile (pod or container "supervisor" must set seccompProfile.type)',
        "[maximum cpu usage per Container is 100m, but limit is 200m]",
        "minimum memory usage per Pod is 8Gi, but request is 100663296",
        "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no native sidecars here",
        'admission webhook "v.example.org" denied the request: image supervisor:1 is not signed',
        "exceeded quota: q, requested: requests.memory=1120Mi, used: requests.memory=3Gi,"
        " limited: requests.memory=4Gi",
        "exceeded quota: q, requested: cpu=1020m,limits.memory=1280Mi, used: cpu=3,"
        "limits.memory=3Gi, limited: cpu=4,limits.memory=4Gi",
    ],
)
def test_what_a_supervisor_may_be_the_cause_of(answer: str) -> None:
    found = ours(answer)
    assert found is not None
    assert (found.owner, found.reported_at) == ("ReplicaSet theirs-5d", AT)
    assert found.reason == answer, "the rule is named, and not the pod, whose name is made up"


@pytest.mark.parametrize(
    "answer",
    [
        "failed quota: q: must specify limits.cpu for: engine,supervisor",
        f'{PSS}privileged (container "engine" must not set securityContext.privileged=true)',
        f'{PSS}x (containers "engine", "supervisor" must set x), y (container "supervisor" must y)',
        "exceeded quota: q, requested: requests.memory=2Gi, used: requests.memory=3Gi,"
        " limited: requests.memory=4Gi",
        "exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4",
        "exceeded quota: q, requested: requests.nvidia.com/gpu=1, used:"
        " requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4",
    ],
)
def test_a_pod_that_would_be_refused_without_one(answer: str) -> None:
    assert ours(answer) is None


def test_pods_that_get_no_supervisor_are_refused_for_something_else() -> None:
    answer = "minimum cpu usage per Container is 100m, but request is 20m"
    assert ours(answer) is not None
    assert ours(answer, owner({"app": "web"})) is None
    assert ours(answer, owner(image="nginx")) is None
    hook = {"preStop": {"exec": {"command": ["kill", "1"]}}}
    assert ours(answer, owner(lifecycle=hook)) is None


@pytest.mark.parametrize(
    "message",
    [
        'Error creating: pods "a" is forbidden: error looking up service account ml/x: not found',
        'Error creating: pods "a" is forbidden: unable to create new content in namespace ml'
        " because it is being terminated",
        "Error creating: Internal error occurred: failed calling webhook",
        'Error creating: pods "a" already exists',
        "Error creating: etcdserver: request timed out",
    ],
)
def test_failures_that_are_no_refusal(message: str) -> None:
    assert parse_refusal_event(event(message)) is None


def test_another_try_with_the_same_answer_is_the_same_refusal() -> None:
    answer = "minimum cpu usage per Container is 100m, but request is 20m"
    first, second = (
        parse_refusal_event(creating(answer, f"theirs-5d-{end}")) for end in ("abc", "xyz")
    )
    assert first is not None
    assert second is not None
    assert first.key == second.key
    other = parse_refusal_event(creating(answer.replace("100m", "200m")))
    assert other is not None
    assert other.key != first.key
    assert other.key.split("/")[0] == first.key.split("/")[0] == "u-1"


def ray_cluster(head: Object, *workers: Object) -> Object:
    def template(container: Object) -> Object:
        labels = {"app": container.pop("app", "llm")}
        spec = {"containers": [{"name": "ray", "image": "rayproject/ray-llm:2.46.0"} | container]}
        return {"template": {"metadata": {"labels": labels}, "spec": spec}}

    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "llm", "uid": "u-1"},
        "spec": {
            "headGroupSpec": template(head),
            "workerGroupSpecs": [template(one) for one in workers],
        },
    }


@pytest.mark.parametrize(
    ("reason", "message", "labels", "found"),
    [
        ("FailedToCreateHeadPod", "Failed to create head Pod ml/, ", ("llm", "web"), True),
        ("FailedToCreateHeadPod", "Failed to create head Pod ml/, ", ("web", "llm"), False),
        ("FailedToCreateWorkerPod", "Failed to create worker Pod for the cluster ml/llm, ",
         ("web", "llm"), True),
        ("FailedToCreateWorkerPod", "Failed to create worker Pod for the cluster ml/llm, ",
         ("llm", "web"), False),
        ("FailedToDeleteWorkerPod", "Failed deleting worker Pod, ", ("llm", "llm"), None),
    ],
)  # fmt: skip
def test_a_pod_that_kuberay_could_not_create(
    reason: str, message: str, labels: tuple[str, str], found: bool | None
) -> None:
    """KubeRay gives a template the labels and the command by which its pods are known."""
    rule = "failed quota: q: must specify limits.cpu for: supervisor"
    told = event(f'{message}pods "llm-gpu-worker-b2f9q" is forbidden: {rule}')
    told["reason"] = reason
    told["involvedObject"] |= {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "llm"}
    refused = parse_refusal_event(told)
    assert (refused is None) is (found is None)
    if refused is None:
        return
    kind = find_owner_kind(told)
    assert kind is not None
    assert (kind.plural, refused.owner, refused.reason) == ("rayclusters", "RayCluster llm", rule)
    head, worker = ({"app": one} for one in labels)
    made = ray_cluster(head | {"command": ["vllm", "serve", "m"]}, {"app": "db"}, worker)
    assert (find_supervisor_refusal(refused, made, policy(), IMAGES) == refused) is found


def test_a_stateful_set_and_an_event_with_a_series() -> None:
    text = (
        'create Pod theirs-0 in StatefulSet theirs failed error: pods "theirs-0" is forbidden:'
        " exceeded quota: q, requested: cpu=1, used: cpu=4, limited: cpu=4"
    )
    series = {"lastObservedTime": "2026-11-26T10:01:00.5Z"}
    found = parse_refusal_event(event(text, "StatefulSet", eventTime=AT, series=series))
    assert found is not None
    assert found.reason.startswith("exceeded quota: q")
    assert found.reported_at == "2026-11-26T10:01:00.5Z"
