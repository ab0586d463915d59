"""The main job, end to end: a real API server, kubelet and containerd, a client that streams.

`kubectl apply` of an InferenceService → operator → pod with engine and supervisor → a leak grows →
the supervisor triggers a graceful restart through the admin endpoint → memory is back, no stream
broke → a LeakIncident tells the story.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.kube import Kube, eventually
from tests.lab.operator import Operator
from tests.node.streams import SILENCE_S, Streams

SERVICE = "leaky"
SELECTOR = f"plimsoll.dev/service={SERVICE}"
READY_S = 180
STORY_S = 420
"""Upper bound: on a loaded machine, the clients send fewer requests, and the leak grows slowly."""
SLOW = "slow_steps:wait_ms=20,epochs=all"
"""The steps of a large model: those of a tiny one take all of the machine's CPU."""
LEAK = f"request_cycle:payload_bytes=8Mi;{SLOW}"
Manifest = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("charted", ["all namespaces"], indirect=True)
def test_a_leak_is_found_cured_and_reported(
    kube: Kube, charted: Callable[[], Operator], manifest: Manifest
) -> None:
    """While no operator runs: the supervisor needs none, and the next one catches up."""
    first = charted()
    applied = time.monotonic()
    kube.apply(manifest(LEAK))
    kube("wait", f"plinf/{SERVICE}", "--for=condition=Ready", f"--timeout={READY_S}s")
    print(f"Ready {time.monotonic() - applied:.1f} s after apply")
    before = the_pod(kube)
    first.stop()

    with streaming(kube) as streams:
        incident = ended_incident(kube, streams)
    the_story_is_whole(kube, incident, streams, kind="HostGrowth", step="Trim")
    status = incident["status"]
    grown = status["attribution"]["bytes"]
    assert status["returnedBytes"] >= 0.9 * grown
    assert status["attribution"]["process"] == "worker"
    after = the_pod(kube)
    assert after["metadata"]["uid"] == before["metadata"]["uid"], "the pod was not replaced"
    assert restart_counts(after) == restart_counts(before), "no container was restarted"
    assert service_status(kube).get("lastIncident") is None, "nobody wrote the status meanwhile"

    charted()
    the_service_tells(kube, incident)
    reasons = {event["reason"] for event in kube.list("events")}
    assert any("Restarting" in reason or "Resolved" in reason for reason in reasons), reasons

    the_admin_port_is_not_reachable(kube, after)
    kube("delete", "plinf", SERVICE, "--timeout=60s")
    eventually(lambda: leftovers(kube) == [], "deletion leaves nothing", timeout_s=120)
    assert kube.list("leakincidents"), "incidents outlive their service by a week"


@pytest.mark.parametrize("charted", ["one namespace"], indirect=True)
def test_a_hang_is_seen_and_ended(
    kube: Kube, charted: Callable[[], Operator], manifest: Manifest
) -> None:
    """The worker spins in an eviction that cannot progress, and /health stays green."""
    charted()
    kube.apply(manifest(f"eviction_loop:after_requests=12;{SLOW}", stall={"timeout": "5s"}))
    kube("wait", f"plinf/{SERVICE}", "--for=condition=Ready", f"--timeout={READY_S}s")
    before = the_pod(kube)
    with streaming(kube) as streams:
        incident = ended_incident(kube, streams)
    the_story_is_whole(kube, incident, streams, kind="Stall", step="Diagnostics")
    saved_at = incident["status"]["diagnostics"]
    stacks = [f"/var/lib/plimsoll/{path}" for path in saved_at if "stacks" in path]
    assert stacks, saved_at
    pod = the_pod(kube)["metadata"]["name"]
    saved = kube("exec", pod, "-c", "supervisor", "--", "cat", *stacks)
    assert "evict" in saved, "the stacks show where the worker hung"
    assert restart_counts(the_pod(kube)) == restart_counts(before)
    the_service_tells(kube, incident)


def streaming(kube: Kube) -> Streams:
    """Clients that reach the service by its Service."""
    address = (kube.get("service", SERVICE) or {})["spec"]["clusterIP"]
    return Streams(f"http://{address}", SERVICE)


def ended_incident(kube: Kube, streams: Streams) -> dict[str, Any]:
    """The one incident when it has ended, and every client has streamed some more after it."""

    def ended() -> dict[str, Any] | None:
        items = kube.list("leakincidents")
        ends = ("Resolved", "Unresolved", "Suppressed")
        found = [item for item in items if item.get("status", {}).get("phase") in ends]
        # Those that were taken back were no leak; the test is about the one that was.
        found = [item for item in found if item["status"].get("outcome") != "Cleared"]
        return found[0] if found else None

    incident = eventually(ended, "an incident ends", STORY_S)
    assert incident is not None
    goal = streams.finished + 2 * streams.count
    eventually(lambda: streams.finished >= goal, "streams after the incident", SILENCE_S)
    return incident


def the_story_is_whole(
    kube: Kube, incident: dict[str, Any], streams: Streams, kind: str, step: str
) -> None:
    """Resolved by a worker restart, every step told, no stream broken, the slot free again."""
    spec, status = incident["spec"], incident["status"]
    print(json.dumps(incident, indent=1))
    print(f"{streams.finished} requests, longest silence {max(streams.pauses):.2f} s")
    assert status["phase"] == "Resolved", status
    assert spec["kind"] == kind
    assert spec["workloadRef"]["name"] == SERVICE
    assert spec["pod"] == the_pod(kube)["metadata"]["name"]
    steps = [entry["step"] for entry in status["timeline"]]
    assert step in steps
    assert "WorkerRestart" in steps
    assert steps.index(step) < steps.index("WorkerRestart")

    assert streams.failures == []
    assert streams.finished > 0
    assert streams.forked == {}, "every text equals the uninterrupted one"

    lease = kube.list("leases", SELECTOR)[0]
    assert not lease.get("spec", {}).get("holderIdentity"), "the restart slot is free again"


def the_service_tells(kube: Kube, incident: dict[str, Any]) -> None:
    """Its status counts the restart and names the incident."""
    eventually(lambda: service_status(kube).get("restarts") == 1, "the status counts the restart")
    said = service_status(kube)
    assert said["openIncidents"] == 0
    assert said["lastIncident"] == incident["metadata"]["name"]


def the_admin_port_is_not_reachable(kube: Kube, pod: dict[str, Any]) -> None:
    """The admin API listens on loopback: the pod's address refuses it."""
    address = pod["status"]["podIP"]
    code = f"import socket; print(socket.socket().connect_ex(('{address}', 8001)))"
    name = pod["metadata"]["name"]
    out = kube("exec", name, "-c", "supervisor", "--", "python", "-c", code)
    assert out.strip() == "111", "connection refused"


def the_pod(kube: Kube) -> dict[str, Any]:
    (pod,) = kube.list("pods", SELECTOR)
    return pod


def restart_counts(pod: dict[str, Any]) -> dict[str, int]:
    status = pod["status"]
    both = status["containerStatuses"] + status["initContainerStatuses"]
    return {one["name"]: one["restartCount"] for one in both}


def service_status(kube: Kube) -> dict[str, Any]:
    return dict((kube.get("plinf", SERVICE) or {}).get("status") or {})


def leftovers(kube: Kube) -> list[str]:
    kinds = "deploy,rs,pod,svc,cm,sa,role,rolebinding,lease,pdb,controllerrevision"
    names = kube("get", kinds, "-o", "name").split()
    return [name for name in names if SERVICE in name]
