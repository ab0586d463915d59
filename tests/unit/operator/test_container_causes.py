"""Why a container is not ready, and whether it ends again and again: by what kubelets write.

Tests ``fleet/pods.py``.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from plimsoll_api.inferenceservice_status import ConditionType
from plimsoll_operator.controllers.pods import read_pod_events
from plimsoll_operator.fleet.pods import (
    BACKOFF_RESET_S,
    MIN_RECOVERY_RUN_S,
    PodView,
    compute_next_change_s,
)
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.status import conditions

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(second: float) -> str:
    return (START + timedelta(seconds=second)).strftime("%Y-%m-%dT%H:%M:%SZ")


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def ended(since: float, until: float, code: int = 1, **more: Any) -> dict[str, Any]:
    times = {"startedAt": at(since), "finishedAt": at(until)}
    return {"terminated": {"exitCode": code, "reason": "Error"} | times | more}


def container(name: str = "engine", **status: Any) -> dict[str, Any]:
    return {"name": name, "ready": False, "restartCount": 0} | status


def pod(
    engine: dict[str, Any] | None = None, *inits: dict[str, Any], scheduled: Any = None
) -> dict[str, Any]:
    well = container("supervisor", ready=True, started=True, state={"running": {}})
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(0)}
    return {
        "metadata": {"name": "qwen-1", "uid": "u", "creationTimestamp": at(0)},
        "spec": {},
        "status": {
            "conditions": [placed | (scheduled or {})],
            "containerStatuses": [engine] if engine else [],
            "initContainerStatuses": [*(inits or (well,))] if engine else [],
        },
    }


def any_looping(one: dict[str, Any], now: str) -> bool:
    return any(part.is_looping(now) for part in PodView.parse(one).containers)


PULL = 'failed to resolve "registry.example/engine:9": not found'
CREATING = waiting("PodInitializing")


@pytest.mark.parametrize(
    ("found", "reason", "said"),
    [
        (
            pod(scheduled={"status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}),
            "Unschedulable",
            "0/3 nodes",
        ),
        (pod(container(state=waiting("ErrImagePull", PULL))), "ImagePullBackOff", PULL),
        (
            pod(
                container(
                    state=waiting(
                        "ImagePullBackOff", f'Back-off pulling image "x": ErrImagePull: {PULL}'
                    )
                )
            ),
            "ImagePullBackOff",
            PULL,
        ),
        (
            pod(container(state=waiting("CreateContainerConfigError", 'secret "s" not found'))),
            "CreateContainerConfigError",
            'secret "s" not found',
        ),
        (
            pod(
                container(
                    state=waiting("CrashLoopBackOff", "back-off 5m0s restarting"),
                    lastState=ended(0, 3, 2, message="error: --model /m: config.json is missing\n"),
                    restartCount=4,
                )
            ),
            "ContainerExited",
            "exit code 2 (error: --model /m: config.json is missing)",
        ),
        (
            pod(container(state=ended(0, 3, 137, reason="OOMKilled"))),
            "OOMKilled",
            "OOMKilled",
        ),
        (
            pod(
                container(state=CREATING),
                container(
                    "model-download",
                    state=waiting("CrashLoopBackOff"),
                    lastState=ended(0, 1, 1, message="hf://a/b: 401 Unauthorized"),
                    restartCount=2,
                ),
                container("supervisor", state=CREATING),
            ),
            "ContainerExited",
            "model-download: ended: exit code 1 (hf://a/b: 401 Unauthorized)",
        ),
        (
            pod(
                container(state=CREATING),
                container("supervisor", state=waiting("ImagePullBackOff", "no such image")),
            ),
            "ImagePullBackOff",
            "supervisor: ImagePullBackOff (no such image)",
        ),
    ],
)
def test_the_cause_stands_in_the_condition(found: Any, reason: str, said: str) -> None:
    verdict = conditions.make_container_conditions([PodView.parse(found)], {}, at(60))[0]
    assert (verdict.type, verdict.status, verdict.reason) == ("EngineReady", False, reason)
    assert said in verdict.message
    assert verdict.message.startswith("qwen-1: ")


def test_a_container_that_only_starts_blocks_nothing() -> None:
    running = pod(container(state={"running": {"startedAt": at(0)}}))
    verdict = conditions.make_container_conditions([PodView.parse(running)], {}, at(9))[0]
    assert (verdict.reason, verdict.message) == (
        "ContainersNotReady",
        "qwen-1: the container is running but not ready",
    )


def test_what_blocks_comes_before_what_only_starts() -> None:
    starts = pod(container(state={"running": {"startedAt": at(0)}}))
    blocked = pod(container(state=waiting("CreateContainerConfigError", "no secret")))
    blocked["metadata"] = {"name": "qwen-2"}
    verdict = conditions.make_container_conditions(
        [PodView.parse(starts), PodView.parse(blocked)], {}, at(9)
    )[0]
    assert verdict.reason == "CreateContainerConfigError"
    assert verdict.message.startswith("qwen-2")


def deployment(ready: int, of: int = 1, **condition: str) -> dict[str, Any]:
    counts = {"readyReplicas": ready, "updatedReplicas": of, "replicas": of}
    refused = {"type": "ReplicaFailure", "status": "True"} | condition
    return {"status": counts | {"conditions": [refused] if condition else []}}


IMAGE = conditions.ConditionState(
    ConditionType.ENGINE_READY, False, "ImagePullBackOff", "qwen-1: ImagePullBackOff (not found)"
)
STARTS = conditions.ConditionState(
    ConditionType.ENGINE_READY,
    False,
    conditions.NOT_READY_REASON,
    "qwen-1: the container is running but not ready",
)


@pytest.mark.parametrize(
    ("seen", "trouble", "drained", "said"),
    [
        (deployment(1), None, [], ("ReplicasReady", "1 of 1 replicas are ready")),
        (deployment(0), STARTS, [], ("ReplicasNotReady", STARTS.message)),
        (deployment(0), IMAGE, [], ("ImagePullBackOff", IMAGE.message)),
        (deployment(0, of=0), IMAGE, [], ("ImagePullBackOff", IMAGE.message)),
        (deployment(1, of=2), IMAGE, [], ("ReplicasReady", "1 of 2 replicas are ready")),
        (
            deployment(0, of=0, reason="FailedCreate", message="exceeded quota"),
            None, [], ("FailedCreate", "0 of 1 replicas are ready; exceeded quota"),
        ),
        (deployment(0), STARTS, ["qwen-1"], ("ReplicasDrained", "drained by a person: qwen-1")),
        (deployment(0), IMAGE, ["qwen-1"], ("ImagePullBackOff", "drained by a person: qwen-1")),
        (deployment(1), None, ["qwen-2"], ("ReplicasReady", "drained by a person: qwen-2")),
    ],
)  # fmt: skip
def test_ready_carries_the_first_cause(
    seen: dict[str, Any], trouble: Any, drained: list[str], said: tuple[str, str]
) -> None:
    """It is what ``kubectl get`` shows in the column REASON."""
    wanted = max(1, seen["status"]["replicas"])
    ready = conditions.make_rollout_conditions(
        seen, wanted, 1 if wanted > 1 else 0, trouble, drained
    )[0]
    assert ready.reason == said[0]
    assert said[1] in ready.message


def event(reason: str, message: str, last: float = 100) -> dict[str, Any]:
    return {"metadata": {}, "reason": reason, "message": message, "lastTimestamp": at(last)}


MOUNT = 'MountVolume.SetUp failed for volume "keys" : secret "clients" not found'
TIMED_OUT = "Unable to attach or mount volumes: unmounted volumes=[keys]: timed out"


def test_a_volume_that_cannot_be_mounted_shows_in_its_events() -> None:
    stuck = PodView.parse(pod(container(state=CREATING), container("supervisor", state=CREATING)))
    assert compute_next_change_s([stuck], at(4)) == 6.0, "the kubelet gets some seconds first"
    assert compute_next_change_s([stuck], at(40)) is None
    old = event("FailedMount", "AAA was solved long ago", last=-1000)
    said = [event("FailedMount", TIMED_OUT), event("FailedMount", MOUNT, 90), old]
    found = stuck.find_cause("engine", said)
    assert found is not None
    assert (found.reason, found.message) == ("FailedMount", f"FailedMount ({MOUNT})")
    assert stuck.find_cause("engine", said[::-1]) == found, "in whatever order they come"
    foreign = [event("Unhealthy", "x"), event("FailedMount", "")]
    assert stuck.find_cause("engine", foreign) == stuck.find_cause("engine")


def test_a_pod_that_the_scheduler_ignores_names_the_claims_that_it_lacks() -> None:
    """As the API server has it: without a claim there is no condition and no container's status."""
    spec: dict[str, Any] = {
        "resourceClaims": [
            {"name": "gpu", "resourceClaimTemplateName": "one-gpu"},
            {"name": "link", "resourceClaimName": "fabric"},
        ]
    }
    waiting: dict[str, Any] = {
        "metadata": {"name": "a"},
        "spec": spec,
        "status": {"phase": "Pending"},
    }
    found = PodView.parse(waiting).find_cause("engine")
    assert found is not None
    assert found.reason == "ResourceClaimMissing"
    assert "ResourceClaimTemplate one-gpu and ResourceClaim fabric" in found.message
    assert not found.blocking, "a controller creates the claims of every new pod"
    assert PodView.parse(waiting).find_blocking_cause() is None
    claimed = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "a-gpu-x"}]}
    later = waiting | {"status": waiting["status"] | claimed}
    later_cause = PodView.parse(later).find_cause("engine")
    assert later_cause is not None
    assert "one-gpu" not in later_cause.message
    bound = waiting | {"spec": spec | {"nodeName": "n"}}
    assert PodView.parse(bound).find_cause("engine") != found


def crashing(run_s: float, pause_s: float, times: int) -> list[tuple[float, dict[str, Any]]]:
    """The statuses of a container that runs for ``run_s`` and waits ``pause_s``, at their times."""
    found, now = [], 0.0
    last: dict[str, Any] = {}
    for count in range(times):
        running = {"running": {"startedAt": at(now)}}
        for share in (0.0, 0.5, 1.0):
            seen = container(state=running, lastState=last, restartCount=count)
            found.append((now + share * run_s, seen))
        last = ended(now, now + run_s)
        now += run_s
        found.append((now, container(state=last, restartCount=count)))
        wait = waiting("CrashLoopBackOff")
        found.append((now, container(state=wait, lastState=last, restartCount=count)))
        now += pause_s
    return found


@pytest.mark.parametrize(("run_s", "pause_s"), [(0, 10), (2, 300), (60, 20), (400, 10)])
def test_crash_looping_does_not_flap(run_s: float, pause_s: float) -> None:
    verdicts = [any_looping(pod(one), at(now)) for now, one in crashing(run_s, pause_s, 6)]
    first = verdicts.index(True)
    assert all(verdicts[first:]), "once it loops it does so between restarts, too"
    assert 1 < first < 12, "one end is no loop, the second is"


def test_a_container_that_outlives_its_last_run_has_recovered() -> None:
    back = container(
        ready=True,
        state={"running": {"startedAt": at(100)}},
        lastState=ended(0, 2),
        restartCount=5,
    )
    assert any_looping(pod(back), at(100 + MIN_RECOVERY_RUN_S - 1))
    assert (
        compute_next_change_s([PodView.parse(pod(back))], at(100 + MIN_RECOVERY_RUN_S - 7)) == 7.0
    ), "somebody looks then"
    assert not any_looping(pod(back), at(100 + MIN_RECOVERY_RUN_S))
    assert compute_next_change_s([PodView.parse(pod(back))], at(100 + MIN_RECOVERY_RUN_S)) is None


def test_an_end_after_a_long_run_stands_for_itself() -> None:
    """A planned restart of an engine, however many there were before."""
    restarted = container(
        state={"running": {"startedAt": at(9001)}}, lastState=ended(0, 9000, 0), restartCount=9
    )
    assert not any_looping(pod(restarted), at(9002))


def test_an_engine_that_ends_after_a_long_start_loops_all_the_same() -> None:
    run_s = 2 * BACKOFF_RESET_S
    looping = pod(
        container(
            state={"running": {"startedAt": at(5000)}}, lastState=ended(0, run_s), restartCount=3
        )
    )
    assert not any_looping(looping, at(5001))
    probe = {"periodSeconds": 2, "failureThreshold": 700}
    looping["spec"] = {"containers": [{"name": "engine", "startupProbe": probe}]}
    assert any_looping(looping, at(5001))


@pytest.mark.parametrize(("status", "lasting"), [(500, False), (429, False), (403, True)])
def test_events_that_cannot_be_read_are_not_taken_for_none(status: int, lasting: bool) -> None:
    """The condition would lose its reason for one reconcile; without the right it never has one."""

    class Refusing:
        async def list_object_events(self, namespace: str, uid: str) -> list[dict[str, Any]]:
            raise ApiError(status, "Refused", "events is refused")

    stuck = PodView.parse(pod(container(state=CREATING), container("supervisor", state=CREATING)))
    reading = read_pod_events(cast("Api", Refusing()), "ns", [stuck], at(60))
    if lasting:
        assert asyncio.run(reading)[0] == {"qwen-1": []}
    else:
        with pytest.raises(ApiError):
            asyncio.run(reading)
