"""What people read when something happens: conditions with a cause, and Events. On a real API
server, whose scheduler and Deployment controller do their part."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

SELECTOR = "plimsoll.dev/service=tiny"
SLOW_S = 150.0
"""Each look takes half a dozen kubectls, seconds each on a busy machine."""


def events(kubectl: Any, reason: str) -> list[dict[str, Any]]:
    """Events of one reason on the service."""
    uid = kubectl.get("plinf", "tiny")["metadata"]["uid"]
    found = kubectl.list("events")
    return [
        one for one in found if one["involvedObject"].get("uid") == uid and one["reason"] == reason
    ]


def progress(kubectl: Any, eventually: Any) -> None:
    """Plays the kubelet until the roll-out is complete."""

    def complete() -> bool:
        kubectl.play_kubelet("tiny")
        item = kubectl.get("plinf", "tiny")
        conditions = (item.get("status") or {}).get("conditions", [])
        found = next((one for one in conditions if one["type"] == "Progressing"), None)
        if found is None:
            return False  # the first status is not written yet
        seen = found["observedGeneration"] == item["metadata"]["generation"]
        return bool(seen and found["reason"] in ("RolloutComplete", "RolledBackOnRequest"))

    eventually(complete, SLOW_S)


def test_a_roll_out_that_serves_stays_ready_and_is_told_in_events(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    operator = start()
    # The list of variables may hold one HOME only: the manifest's takes the place of ours.
    manifest["spec"]["engine"]["env"] = [{"name": "HOME", "value": "/tmp"}]
    kubectl.apply(manifest)
    eventually(lambda: kubectl.list("pods", SELECTOR))
    progress(kubectl, eventually)
    since = kubectl.condition("tiny", "Ready")["lastTransitionTime"]
    eventually(lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") > since)
    eventually(lambda: len(events(kubectl, "RolloutFinished")) == 1)
    assert events(kubectl, "RolloutStarted") == [], "creating a service is no rollout"

    kubectl.patch("plinf", "tiny", {"spec": {"restart": {"id": "on Sunday"}}})
    eventually(lambda: kubectl.condition("tiny", "Reconciling")["status"] == "True")
    assert kubectl.condition("tiny", "Ready")["status"] == "True"
    progress(kubectl, eventually)
    kubectl("wait", "plinf", "tiny", "--for=condition=Progressing=False", "--timeout=60s")
    eventually(lambda: kubectl.holds("tiny", Progressing="False", Reconciling="False"))
    ready = kubectl.condition("tiny", "Ready")
    assert (ready["status"], ready["lastTransitionTime"]) == ("True", since), "it never changed"
    eventually(lambda: len(events(kubectl, "RolloutFinished")) == 2)
    assert len(events(kubectl, "RolloutStarted")) == 1
    (asked,) = events(kubectl, "RestartRequested")
    assert "'on Sunday'" in asked["message"]
    assert asked["source"]["component"] == "plimsoll-operator"
    described = kubectl("describe", "plinf", "tiny")
    assert "RestartRequested" in described

    eventually(lambda: operator.metric("plimsoll_operator_queue_length") == 0)
    before = operator.metric("plimsoll_operator_writes_total")
    done = operator.metric("plimsoll_operator_reconciles_total")
    # Pods' events bring reconciles, and none of them has anything to write.
    kubectl.play_kubelet("tiny", "10.9.9.9")
    eventually(lambda: operator.metric("plimsoll_operator_reconciles_total") > done)
    eventually(lambda: operator.metric("plimsoll_operator_queue_length") == 0)
    assert operator.metric("plimsoll_operator_writes_total") == before


def stuck(kubectl: Any) -> dict[str, Any]:
    """The service's pod as the kubelet leaves it while it cannot mount a volume."""
    (pod,) = kubectl.list("pods", SELECTOR)
    waiting = {"waiting": {"reason": "PodInitializing"}}

    def seen(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "ready": False,
            "restartCount": 0,
            "image": "x",
            "imageID": "",
            "state": waiting,
        }

    placed = {
        "type": "PodScheduled",
        "status": "True",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {
        "phase": "Pending",
        "conditions": [placed],
        "containerStatuses": [seen("engine")],
        "initContainerStatuses": [seen("supervisor")],
    }
    kubectl.patch("pod", pod["metadata"]["name"], {"status": status}, "status")
    return dict(pod)


def test_why_a_container_cannot_start_stands_in_the_condition(
    kubectl: Any, start: Callable[..., Any], manifest: dict[str, Any], eventually: Any
) -> None:
    start()
    kubectl.apply(manifest)

    def unschedulable() -> bool:
        found = kubectl.condition("tiny", "EngineReady")
        ready = kubectl.condition("tiny", "Ready")  # the column REASON
        known = "nodes" in found.get("message", "") and "nodes" in ready["message"]
        return known and found["reason"] == ready["reason"] == "Unschedulable"

    eventually(unschedulable)
    (pod,) = kubectl.list("pods", SELECTOR)
    message = 'MountVolume.SetUp failed for volume "keys" : secret "clients" not found'
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {key: pod[key] for key in ("apiVersion", "kind")}
    meta = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "tiny.mount"},
        "involvedObject": about | meta,
        "type": "Warning",
        "reason": "FailedMount",
        "message": message,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "source": {"component": "kubelet"},
    }
    kubectl("create", "-f", "-", stdin=json.dumps(event))
    stuck(kubectl)

    # The scheduler, for which the pod has no node yet, may take the condition back once more, and
    # the operator reads no Events in the ten seconds after. One look takes reason and message.
    def named() -> bool:
        found = kubectl.condition("tiny", "EngineReady")
        return found["reason"] == "FailedMount" and message in found["message"]

    eventually(named)

    kubectl.play_kubelet("tiny")
    eventually(lambda: kubectl.condition("tiny", "EngineReady")["status"] == "True")
