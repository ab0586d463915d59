"""The circuit breaker of injection: what it decides, and what the webhook does by it.

Tests ``plans/injection.py``, and for it ``fleet/selected_pods.py`` and ``admission/review.py``.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from plimsoll_api.names import POLICY_LABEL
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.supervision_policy_status import Injection, InjectionStop
from plimsoll_api.workloads import Membership, WorkloadRef
from plimsoll_operator.admission.review import STATUS_COUNT_DELAY_S, PolicyCache, Reviewer
from plimsoll_operator.fleet.refused_creations import RefusedCreation
from plimsoll_operator.fleet.selected_pods import (
    SelectedPod,
    StartState,
    SupervisionState,
    summarize_pod,
)
from plimsoll_operator.injection.policy import INJECTED_IMAGES_ANNOTATION, format_images, inject_pod
from plimsoll_operator.plans.injection import (
    RETRY_ANNOTATION,
    decide_injection,
    find_skip_reason,
    parse_injection,
)
from plimsoll_operator.render.containers import Images
from plimsoll_operator.status.events import make_injection_notices
from plimsoll_operator.status.policy import make_status

Object = dict[str, Any]
IMAGES = Images("engine:1", "supervisor:1")
NOW, EARLIER, LATER = "2026-11-26T10:00:00Z", "2026-11-26T09:00:00Z", "2026-11-26T10:05:00Z"
WHY = "container supervisor, image supervisor:1: ErrImagePull: not found"
SELECTED = {"app": "llm"}


def manifest(generation: int = 1, retry: str | None = None, **spec: Any) -> Object:
    metadata: Object = {"name": "engines", "namespace": "ml", "uid": "u", "generation": generation}
    if retry is not None:
        metadata["annotations"] = {RETRY_ANNOTATION: retry}
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "SupervisionPolicy",
        "metadata": metadata,
        "spec": {"selector": {"matchLabels": SELECTED}} | spec,
    }


def policy(generation: int = 1, retry: str | None = None, **spec: Any) -> SupervisionPolicy:
    return SupervisionPolicy.model_validate(manifest(generation, retry, **spec))


def one(
    name: str,
    ran: bool = False,
    stuck: str = "",
    images: str = "supervisor:1",
    created: str = EARLIER,
    state: SupervisionState = SupervisionState.SUPERVISED,
    member: Membership | None = None,
    node: str = "",
) -> SelectedPod:
    start = StartState(images, ran, stuck)
    return SelectedPod(
        name, "default", state, created=created, start=start, member=member or Membership(),
        node=node,
    )  # fmt: skip


def stop(generation: int = 1, retry: str = "") -> Injection:
    stopped = InjectionStop(pod="a", reason=WHY, time=NOW, generation=generation, retry=retry)
    return Injection(images="supervisor:1", waiting=2, stopped=stopped)


GROUP = Membership(WorkloadRef("LeaderWorkerSet", "l"), "leaderworkerset.x-k8s.io", "0")
PROVEN = Injection(images="supervisor:1", proven=True)
AGAIN = Injection(images="supervisor:1", since=NOW)


@pytest.mark.parametrize(
    ("before", "now", "pods", "expected"),
    [
        pytest.param(None, policy(), [], {"waiting": 0}, id="no pod"),
        pytest.param(None, policy(), [one("a")], {"waiting": 1}, id="a pod starts"),
        pytest.param(None, policy(), [one("a", stuck=WHY)], {"waiting": 1}, id="one is stuck"),
        pytest.param(
            None,
            policy(),
            [one("b", stuck=WHY), one("a", stuck=WHY), one("c")],
            {"waiting": 3, "stopped": "a"},
            id="two are stuck",
        ),
        pytest.param(
            PROVEN,
            policy(),
            [one("a", stuck=WHY), one("b", stuck=WHY), one("c", ran=True)],
            {"waiting": 2, "stopped": "a"},
            id="two are stuck beside one that runs",
        ),
        pytest.param(
            PROVEN,
            policy(),
            [
                one("a", stuck=WHY, node="x"),
                one("b", stuck=WHY, node="x"),
                one("c", ran=True, node="y"),
            ],
            {"waiting": 2, "proven": True},
            id="two are stuck on one node beside one that runs on another",
        ),
        pytest.param(
            PROVEN,
            policy(),
            [
                one("a", stuck=WHY, node="x"),
                one("b", stuck=WHY, node="z"),
                one("c", ran=True, node="y"),
            ],
            {"waiting": 2, "stopped": "a"},
            id="two are stuck on two nodes beside one that runs on a third",
        ),
        pytest.param(
            PROVEN,
            policy(),
            [
                one("a", stuck=WHY, node="x"),
                one("b", stuck=WHY, node="x"),
                one("c", ran=True, node="x"),
            ],
            {"waiting": 2, "stopped": "a"},
            id="two are stuck on the only node, where one ran before",
        ),
        pytest.param(
            PROVEN,
            policy(),
            [one("a", stuck=WHY, node="x"), one("b", stuck=WHY, node="x")],
            {"waiting": 2, "stopped": "a"},
            id="two are stuck on one node and none runs any more",
        ),
        pytest.param(None, policy(), [one("a", ran=True)], {"proven": True}, id="one ran"),
        pytest.param(PROVEN, policy(), [], {"proven": True}, id="it ran once"),
        pytest.param(
            Injection(images="supervisor:0", proven=True), policy(), [], {}, id="another image"
        ),
        pytest.param(stop(), policy(), [], {"stopped": "a"}, id="the stuck pods are gone"),
        pytest.param(
            stop(), policy(), [one("c", ran=True)], {"stopped": "a"}, id="one runs after all"
        ),
        pytest.param(
            stop(),
            policy(generation=2),
            [one("a", stuck=WHY), one("b", stuck=WHY), one("c", ran=True)],
            {"since": NOW},
            id="the policy changed: older pods prove nothing",
        ),
        pytest.param(
            stop(), policy(retry="again"), [one("a", stuck=WHY)], {"since": NOW}, id="a person asks"
        ),
        pytest.param(
            stop(retry="again"), policy(retry="again"), [], {"stopped": "a"}, id="that was before"
        ),
        pytest.param(
            AGAIN,
            policy(generation=2),
            [one("a", stuck=WHY), *(one(name, stuck=WHY, created=LATER) for name in ("d", "e"))],
            {"since": NOW, "waiting": 2, "stopped": "d"},
            id="the next try fails too",
        ),
        pytest.param(
            AGAIN,
            policy(generation=2),
            [one("d", ran=True, created=LATER)],
            {"since": NOW, "proven": True},
            id="the next try succeeds",
        ),
        pytest.param(
            None,
            policy(),
            [
                one("a", stuck=WHY, images="supervisor:0"),
                one("b", stuck=WHY, state=SupervisionState.LEAVING),
                one("c", stuck=WHY),
            ],
            {"waiting": 1},
            id="others do not count",
        ),
        pytest.param(
            None,
            policy(),
            [one("l-0", member=GROUP), one("l-0-1", member=GROUP)],
            {"waiting": 1},
            id="a group is one replica",
        ),
    ],
)
def test_a_decision(
    before: Injection | None, now: SupervisionPolicy, pods: list[SelectedPod], expected: Object
) -> None:
    found = decide_injection(before, now, "supervisor:1", pods, 2, NOW)
    short = {key: value for key, value in found.items() if value and key != "images"}
    if "stopped" in found:
        short["stopped"] = found["stopped"]["pod"]
    assert short == {key: value for key, value in expected.items() if value}
    kept = parse_injection({"injection": found})
    assert decide_injection(kept, now, "supervisor:1", pods, 2, LATER) == found, (
        "it survives a restart"
    )


@pytest.mark.parametrize(
    ("before", "now", "tried", "held"),
    [
        (None, policy(), 0, ""),
        (None, policy(), 1, ""),
        (None, policy(), 2, "no pod has run with supervisor:1 yet, and 2 replicas"),
        (
            Injection(images="supervisor:1", waiting=2),
            policy(),
            0,
            "no pod has run with supervisor:1 yet, and 2",
        ),
        (Injection(images="supervisor:0", waiting=2), policy(), 1, ""),
        (PROVEN, policy(), 9, ""),
        (
            stop(),
            policy(),
            0,
            "the injection of supervisors is stopped, because pod a cannot start",
        ),
        (stop(), policy(retry="again"), 0, ""),
        (stop(), policy(generation=2), 2, "no pod has run with supervisor:1 yet, and 2"),
    ],
)
def test_a_pod_is_held_back(
    before: Injection | None, now: SupervisionPolicy, tried: int, held: str
) -> None:
    said = find_skip_reason(now, before, "supervisor:1", tried, 2)
    assert said.startswith(held)
    assert bool(said) == bool(held)


def no(at: str, key: str = "u-1/a") -> RefusedCreation:
    return RefusedCreation(
        "ReplicaSet theirs-5d", "must specify limits.cpu for: supervisor", at, key
    )


def test_a_refusal_to_create_a_pod_stops_the_injection_and_the_status_names_the_rule() -> None:
    found = decide_injection(PROVEN, policy(), "supervisor:1", [], 2, NOW, [no(EARLIER)])
    assert found["stopped"]["pod"] == "ReplicaSet theirs-5d"
    kept = parse_injection({"injection": found})
    assert "rejects pods of ReplicaSet theirs-5d" in find_skip_reason(
        policy(), kept, "supervisor:1", 0, 2
    )
    assert not find_skip_reason(policy(retry="again"), kept, "supervisor:1", 0, 2)
    after = make_status(manifest(), [], [], None, None, NOW, injection=found)
    held = {one["type"]: one for one in after["conditions"]}
    assert (held["InjectionStopped"]["status"], held["Ready"]["status"]) == ("True", "False")
    for kind in ("InjectionStopped", "Ready"):
        assert held[kind]["reason"] == "PodsRefused"
        assert "must specify limits.cpu for: supervisor" in held[kind]["message"]
    alone = decide_injection(
        kept, policy(), "supervisor:1", [one("a", state=SupervisionState.WAITING)], 2, LATER, ()
    )
    assert alone["stopped"] == found["stopped"], "the pod that came without one changes nothing"


def test_a_refusal_that_goes_on_without_a_supervisor_resumes_the_injection() -> None:
    stopped = parse_injection(
        {"injection": decide_injection(None, policy(), "supervisor:1", [], 2, NOW, [no(NOW)])}
    )
    soon = decide_injection(
        stopped, policy(), "supervisor:1", [], 2, LATER, [no("2026-11-26T10:00:09Z")]
    )
    assert "stopped" in soon, "a webhook may not know of the stop yet"
    other = decide_injection(stopped, policy(), "supervisor:1", [], 2, LATER, [no(LATER, "u-2/a")])
    assert "stopped" in other, "another owner's pods say nothing of this one's"
    found = decide_injection(stopped, policy(), "supervisor:1", [], 2, LATER, [no(LATER, "u-1/b")])
    assert "stopped" not in found
    assert found["refusedAnyway"] == ["u-1/a"]
    kept, at = parse_injection({"injection": found}), "2026-11-26T10:06:00Z"
    again = decide_injection(kept, policy(), "supervisor:1", [], 2, at, [no(at)])
    assert "stopped" not in again, "the same answer to the same owner"
    fresh = decide_injection(kept, policy(), "supervisor:1", [], 2, at, [no(at, "u-1/c")])
    assert "stopped" in fresh, "another answer"


def test_a_retry_counts_younger_refusals_only() -> None:
    stopped = parse_injection(
        {"injection": decide_injection(None, policy(), "supervisor:1", [], 2, NOW, [no(NOW)])}
    )
    retried = policy(retry="again")
    found = decide_injection(stopped, retried, "supervisor:1", [], 2, LATER, [no(NOW)])
    assert "stopped" not in found
    kept = parse_injection({"injection": found})
    assert "stopped" in decide_injection(
        kept, retried, "supervisor:1", [], 2, LATER, [no("2026-11-26T10:06:00Z")]
    )


def pod(name: str = "vllm-1", **status: Any) -> Object:
    container = {"name": "engine", "image": "vllm/vllm-openai:v0.24.0"}
    metadata = {"name": name, "labels": SELECTED, "creationTimestamp": EARLIER}
    made: Object = {"metadata": metadata, "spec": {"containers": [container]}}
    return made | ({"status": status} if status else {})


def injected(**said: Any) -> SelectedPod:
    """A pod with the supervisor and the probe, of whose containers the kubelet says this."""
    wanted = policy(probe={"enabled": True})
    made = inject_pod(pod(), wanted, IMAGES).pod
    assert made["metadata"]["labels"][POLICY_LABEL] == "engines"
    listed = [{"name": name.replace("_", "-")} | one for name, one in said.items()]
    engine = [one for one in listed if one["name"] == "engine"]
    status = {
        "containerStatuses": engine,
        "initContainerStatuses": [one for one in listed if one not in engine],
    }
    return summarize_pod(made | {"status": status}, wanted, ["engines"], IMAGES, NOW)


def waiting(reason: str, message: str = "", **more: Any) -> Object:
    return {"state": {"waiting": {"reason": reason, "message": message}}} | more


DONE = {"state": {"terminated": {"exitCode": 0}}, "restartCount": 0}
FAILED = {"terminated": {"exitCode": 1, "message": "no module"}}


@pytest.mark.parametrize(
    ("said", "ran", "stuck"),
    [
        ({}, False, ""),
        ({"supervisor": waiting("PodInitializing")}, False, ""),
        (
            {"plimsoll_probe": waiting("ErrImagePull", "not\u202e found"),
             "supervisor": waiting("PodInitializing")},
            False,
            "container plimsoll-probe, image supervisor:1: ImagePullBackOff (not found)",
        ),
        (
            {"plimsoll_probe": DONE, "supervisor": waiting("ImagePullBackOff", "no such host")},
            False,
            "container supervisor, image supervisor:1: ImagePullBackOff (no such host)",
        ),
        (
            {"supervisor": waiting("CrashLoopBackOff", "back-off", lastState=FAILED,
                                   restartCount=3)},
            False,
            "container supervisor, image supervisor:1: ended: exit code 1 (no module)",
        ),
        (
            {"supervisor": {"state": FAILED, "restartCount": 2, "started": False}},
            False,
            "container supervisor, image supervisor:1: ended: exit code 1 (no module)",
        ),
        ({"supervisor": {"state": FAILED, "restartCount": 0, "started": False}}, False, ""),
        (
            {"plimsoll_probe": DONE, "supervisor": {"state": {"running": {}}, "started": True},
             "engine": waiting("ImagePullBackOff")},
            True,
            "",
        ),
        (
            {"supervisor": waiting("CrashLoopBackOff", started=False, restartCount=9),
             "engine": waiting("CrashLoopBackOff", lastState=FAILED)},
            True,
            "",
        ),
    ],
)  # fmt: skip
def test_how_far_a_pod_got(said: Object, ran: bool, stuck: str) -> None:
    start = injected(**said).start
    assert (start.images, start.has_run, start.stuck) == ("supervisor:1", ran, stuck)


def ends(ran_s: int = 1, **more: Any) -> Object:
    times = {"startedAt": EARLIER, "finishedAt": f"2026-11-26T09:00:{ran_s:02}Z"}
    last = {"terminated": {"exitCode": 1, "message": "can only run as PID 1"} | times}
    return waiting("CrashLoopBackOff", lastState=last, restartCount=3) | more


def test_an_engine_that_ends_at_once_at_each_start_beside_its_supervisor() -> None:
    beside = {"state": {"running": {}}, "started": True}
    start = injected(supervisor=beside, engine=ends()).start
    assert "container engine exits immediately after each start" in start.stuck
    assert "can only run as PID 1" in start.stuck
    assert (start.is_engine_failure, start.has_run) == (True, False)
    for other in (ends(ran_s=20), ends(restartCount=1), ends(ready=True)):
        assert injected(supervisor=beside, engine=other).start == StartState(
            "supervisor:1", has_run=True
        )


def test_an_engine_that_is_a_native_sidecar_may_end_at_once_too() -> None:
    wanted, made = policy(), pod()
    (engine,) = made["spec"]["containers"]
    made["spec"] = {
        "initContainers": [engine | {"restartPolicy": "Always"}],
        "containers": [{"name": "job", "image": "job:1"}],
    }
    made = inject_pod(made, wanted, IMAGES).pod
    listed = [
        {"name": "supervisor", "state": {"running": {}}, "started": True},
        {"name": "engine"} | ends(),
    ]
    status = {
        "containerStatuses": [{"name": "job"} | waiting("PodInitializing")],
        "initContainerStatuses": listed,
    }
    start = summarize_pod(made | {"status": status}, wanted, ["engines"], IMAGES, NOW).start
    assert "container engine exits immediately after each start" in start.stuck
    assert start.is_engine_failure


def test_such_engines_stop_the_injection_of_a_policy_of_which_no_pod_ran() -> None:
    pods = [
        replace(one(name), start=StartState("supervisor:1", stuck=WHY, is_engine_failure=True))
        for name in "ab"
    ]
    assert decide_injection(None, policy(), "supervisor:1", pods, 2, NOW)["stopped"]["pod"] == "a"
    assert "stopped" not in decide_injection(PROVEN, policy(), "supervisor:1", pods, 2, NOW)
    beside = [*pods, one("c", ran=True)]
    assert "stopped" not in decide_injection(None, policy(), "supervisor:1", beside, 2, NOW)


def test_an_image_that_other_admission_wrote_anew_is_still_ours() -> None:
    wanted = policy()
    made = inject_pod(pod(), wanted, IMAGES).pod
    assert made["metadata"]["annotations"][INJECTED_IMAGES_ANNOTATION] == format_images(
        wanted, IMAGES
    )
    made["spec"]["initContainers"][0]["image"] = "mirror.example/supervisor@sha256:1"
    said = {"initContainerStatuses": [{"name": "supervisor", "started": True}]}
    start = summarize_pod(made | {"status": said}, wanted, ["engines"], IMAGES, NOW).start
    assert (start.images, start.has_run) == ("supervisor:1", True)


def test_a_young_pod_is_not_stuck_and_a_foreign_one_says_nothing() -> None:
    wanted = policy()
    made = inject_pod(pod(), wanted, IMAGES).pod
    made["metadata"]["creationTimestamp"] = NOW
    failed = {"initContainerStatuses": [{"name": "supervisor"} | waiting("ErrImagePull")]}
    young = summarize_pod(made | {"status": failed}, wanted, ["engines"], IMAGES, NOW)
    assert (young.start.images, young.start.stuck) == ("supervisor:1", "")
    plain = summarize_pod(pod(), wanted, ["engines"], IMAGES, NOW)
    assert plain.start == StartState()


def test_the_images_are_those_that_a_new_pod_gets() -> None:
    own = Images("e", "s:1", "p:1")
    assert format_images(policy(), own) == "s:1"
    assert format_images(policy(probe={"enabled": True}), own) == "s:1, p:1"
    assert format_images(policy(probe={"enabled": True}), IMAGES) == "supervisor:1"


def test_the_status_and_an_event_say_what_a_person_can_do() -> None:
    item = manifest()
    pods = [one(name, stuck=WHY) for name in ("a", "b")]
    found = decide_injection(None, policy(), "supervisor:1", pods, 2, NOW)
    after = make_status(item, pods, [], None, None, NOW, injection=found)
    (condition,) = [c for c in after["conditions"] if c["type"] == "InjectionStopped"]
    assert (condition["status"], condition["reason"]) == ("True", "PodsDoNotStart")
    assert WHY in condition["message"]
    assert f"set the annotation {RETRY_ANNOTATION} to a new value" in condition["message"]
    (notice,) = make_injection_notices({}, after)
    assert (notice.reason, notice.type) == ("InjectionStopped", "Warning")
    assert make_injection_notices(after, after) == []
    invalid = make_status(item | {"status": after}, None, [], None, None, NOW)
    assert invalid["injection"] == found, "what is known stays while the spec is invalid"
    lone = decide_injection(None, policy(), "supervisor:1", pods[:1], 2, NOW)
    after = make_status(item, pods[:1], [], None, None, NOW, injection=lone)
    (condition,) = [c for c in after["conditions"] if c["type"] == "InjectionStopped"]
    assert (condition["status"], condition["reason"]) == ("False", "PodDoesNotStart")
    assert WHY in condition["message"]
    (notice,) = make_injection_notices({}, after)
    assert (notice.reason, notice.type) == ("PodDoesNotStart", "Warning")


class Webhook:
    """A replica's webhook with one policy, at a time that the test sets."""

    def __init__(self, **found: Any) -> None:
        self.now, self.count = 0.0, 0
        self.policies, self.results = PolicyCache(), list[str]()
        self.show(**found)
        self._review = Reviewer(
            self.policies, IMAGES, self.results.append, limit=2, clock=lambda: self.now
        )

    def show(self, version: str = "1", **found: Any) -> None:
        item = manifest()
        item["metadata"]["resourceVersion"] = version
        self.policies.update(item | {"status": found}, deleted=False)

    def create(self, wanted: Object | None = None, **request: Any) -> Object:
        self.count += 1
        wanted = wanted or pod()
        whole = {
            "uid": f"{self.count}",
            "operation": "CREATE",
            "kind": {"kind": "Pod"},
            "namespace": "ml",
            "object": wanted,
        }
        answer: Object = self._review.respond({"request": whole | request})["response"]
        assert answer["allowed"]
        return answer


def test_the_webhook_gives_a_supervisor_to_few_pods_until_one_ran() -> None:
    webhook = Webhook()
    for _ in range(3):
        webhook.create(dryRun=True)
    first = webhook.create()
    webhook.create()
    third = webhook.create()
    assert webhook.results == ["injected"] * 5 + ["held"]
    assert "patch" not in third
    assert "no pod has run with supervisor:1 yet" in third["warnings"][0]
    # Another webhook changed the pod, and the API server asks again.
    operations = json.loads(base64.b64decode(first["patch"]))
    again = pod() | {"spec": pod()["spec"] | {
        one["path"].removeprefix("/spec/"): one["value"]
        for one in operations if one["path"].startswith("/spec/")
    }}  # fmt: skip
    webhook.create(again)
    assert webhook.results[-1] == "injected"
    webhook.now = STATUS_COUNT_DELAY_S
    webhook.create()
    assert webhook.results[-1] == "injected", "the status says that none waits"
    webhook.show("2", injection={"images": "supervisor:1", "waiting": 2})
    webhook.create()
    assert webhook.results[-1] == "held"
    webhook.show("3", injection={"images": "supervisor:1", "proven": True})
    for _ in range(9):
        webhook.create()
    assert webhook.results[-9:] == ["injected"] * 9


def test_the_webhook_injects_a_group_as_a_whole_and_no_policy_that_is_stopped() -> None:
    webhook = Webhook()
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "r", "controller": True}
    head = pod()
    head["metadata"] |= {
        "ownerReferences": [owner],
        "labels": SELECTED | {"ray.io/cluster": "r", "ray.io/node-type": "head"},
    }
    for _ in range(5):
        webhook.create(head)
    webhook.create()
    assert webhook.results == ["injected"] * 6
    webhook = Webhook()
    for name in ("l-0", "l-0-1", "l-0-2", "l-0-3"):
        member = pod(name)
        member["metadata"]["labels"] = SELECTED | {"leaderworkerset.sigs.k8s.io/name": "l"}
        leader = {} if name == "l-0" else {"leaderworkerset.sigs.k8s.io/leader-name": "l-0"}
        consent = {"plimsoll.dev/allow-group-restarts": "true"}
        member["metadata"]["annotations"] = consent | leader
        webhook.create(member)
    webhook.create()
    webhook.create()
    assert webhook.results == ["injected"] * 5 + ["held"]
    stopped = stop().model_dump(mode="json", by_alias=True, exclude_none=True)
    webhook = Webhook(injection=stopped)
    answer = webhook.create()
    assert webhook.results == ["held"]
    assert (
        "the injection of supervisors is stopped, because pod a cannot start"
        in answer["warnings"][0]
    )
    assert parse_injection({"injection": {"images": 7}}) is None
