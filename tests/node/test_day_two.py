"""What happens to a running service on a real node: kills, drains, updates, an API server away."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, mounted
from tests.lab.operator import Operator
from tests.node.service import (
    READY_S,
    SELECTOR,
    SERVICE,
    Manifest,
    condition,
    plain,
    pods,
    ready,
    status,
    streaming,
)

LEAK = "request_cycle:payload_bytes=2Mi"
ENGINE_PIDS = (
    "import os\n"
    "def command(p): return open(f'/proc/{p}/cmdline','rb').read()\n"
    "engines = [int(p) for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()\n"
    "           and b'plimsoll_engine' in command(p) and b'serve' in command(p)]\n"
)
GREEDY = "tokenizer_cache:repeat=200000"
KILL_ENGINE = ENGINE_PIDS + "[os.kill(pid, 9) for pid in engines]\n"
KILL_SUPERVISOR = (
    "import os\n"
    "[os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit() and p != str(os.getpid())\n"
    " and b'plimsoll_sidecar.main' in open(f'/proc/{p}/cmdline','rb').read()]\n"
)


def restarts(kube: Kube, container: str = "engine") -> int:
    (pod,) = pods(kube)
    both = pod["status"]["containerStatuses"] + pod["status"]["initContainerStatuses"]
    return int(next(one["restartCount"] for one in both if one["name"] == container))


def ended(kube: Kube) -> dict[str, Any] | None:
    ends = ("Resolved", "Unresolved", "Suppressed")
    found = [
        one
        for one in kube.list("leakincidents")
        if one.get("status", {}).get("phase") in ends and one["status"].get("outcome") != "Cleared"
    ]
    return found[0] if found else None


@pytest.mark.long
def test_a_kill_for_memory_is_an_incident_and_a_condition(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest
) -> None:
    """The frontend grows, faster than a supervisor that only looks could do anything about it."""
    operator()
    made = manifest(GREEDY, mode="Observe")
    made["spec"]["engine"]["resources"]["limits"]["memory"] = "2Gi"
    kube.apply(made)
    ready(kube)
    (pod,) = pods(kube)
    address = (kube.get("service", SERVICE) or {})["spec"]["clusterIP"]
    new = itertools.count()
    with httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as client:

        def grown_and_killed() -> bool:
            body = {"model": SERVICE, "prompt": f"{next(new)} tons of cargo " * 20, "max_tokens": 1}
            with contextlib.suppress(httpx.HTTPError):
                client.post("/v1/completions", json=body)
            return restarts(kube) == 1

        eventually(grown_and_killed, "the engine's container was restarted", 120)
    eventually(lambda: condition(kube, "OOMKilled") == "True", "a condition", 60)

    def told() -> list[dict[str, Any]]:
        kinds = [one["spec"]["kind"] for one in kube.list("leakincidents")]
        return [one for one in kinds if one == "OutOfMemoryKill"]

    eventually(told, "an incident", 120)
    ready(kube)
    assert len(told()) == 1
    assert pods(kube)[0]["metadata"]["uid"] == pod["metadata"]["uid"]


@pytest.mark.long
def test_a_killed_engine_comes_back(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest
) -> None:
    operator()
    kube.apply(plain(manifest))
    ready(kube)
    name = pods(kube)[0]["metadata"]["name"]
    kube.run("exec", name, "-c", "supervisor", "--", "python", "-c", KILL_ENGINE)
    eventually(lambda: restarts(kube) == 1, "the container was restarted", 120)
    eventually(lambda: condition(kube, "EngineReady") == "True", "ready again", READY_S)
    with streaming(kube) as streams:
        eventually(lambda: streams.finished >= 2, "it serves", 60)
    assert streams.failures == []


@pytest.mark.long
def test_a_supervisor_killed_in_mid_remediation_does_not_restart_twice(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest
) -> None:
    operator()
    kube.apply(manifest(LEAK))
    ready(kube)
    name = pods(kube)[0]["metadata"]["name"]
    under_way = ("AwaitingSlot", "Draining", "Restarting", "Verifying")

    def phases() -> list[str]:
        return [one.get("status", {}).get("phase", "") for one in kube.list("leakincidents")]

    with streaming(kube, 4) as streams:
        eventually(lambda: set(phases()) & set(under_way), "a remediation is under way", 180)
        kube.run("exec", name, "-c", "supervisor", "--", "python", "-c", KILL_SUPERVISOR)
        incident = eventually(lambda: ended(kube), "the incident ends", 180)
    assert incident is not None
    assert streams.failures == []
    steps = [one["step"] for one in incident["status"]["timeline"]]
    assert steps.count("WorkerRestart") == 1, incident["status"]
    assert restarts(kube) == 0
    eventually(lambda: not held(kube), "the slot is free again", 90)


def held(kube: Kube) -> list[str]:
    leases = kube.list("leases", SELECTOR)
    return [h for one in leases if (h := one.get("spec", {}).get("holderIdentity"))]


@pytest.mark.long
def test_the_api_server_is_away_for_a_minute_in_mid_remediation(
    node: Lab, kube: Kube, operator: Callable[[], Operator], manifest: Manifest
) -> None:
    operator()
    kube.apply(manifest(LEAK))
    ready(kube)
    with streaming(kube, 4) as streams:
        eventually(lambda: kube.list("leakincidents"), "an incident is open", 180)
        node.plane.processes.stop("kube-apiserver")
        time.sleep(60)
        assert streams.failures == [], "nobody noticed"
        node.plane._api_server()
        eventually(
            lambda: kube.run("get", "--raw", "/readyz").returncode == 0, "the server is back", 60
        )
        incident = eventually(lambda: ended(kube), "the incident ends and is told", 240)
    assert incident is not None
    assert incident["status"]["phase"] == "Resolved", incident["status"]
    assert streams.failures == []
    assert restarts(kube) == 0
    eventually(lambda: status(kube).get("openIncidents") == 0, "the operator follows", 120)


@pytest.mark.long
def test_a_node_is_drained_without_taking_all_replicas(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest
) -> None:
    operator()
    kube.apply(plain(manifest, replicas=2))
    ready(kube)
    eventually(lambda: status(kube).get("readyReplicas") == 2, "both are ready", READY_S)
    (name,) = [one["metadata"]["name"] for one in kube.list("nodes")]
    try:
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=45s")
        drained = kube.run("drain", name, *flags, f"--pod-selector={SELECTOR}")
        # The second one may not go before the first is replaced, and there is no other node.
        assert drained.returncode != 0
        assert "disruption budget" in drained.stderr
        with streaming(kube, 1) as streams:
            eventually(lambda: streams.finished >= 1, "one replica serves on", 60)
        assert streams.failures == []
    finally:
        kube("uncordon", name)
    eventually(lambda: status(kube).get("readyReplicas") == 2, "both are ready again", READY_S)


@pytest.mark.long
def test_a_rolling_update_under_load_fails_no_request(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest
) -> None:
    operator()
    kube.apply(plain(manifest, replicas=2))
    eventually(lambda: status(kube).get("readyReplicas") == 2, "both are ready", READY_S)
    before = {pod["metadata"]["uid"] for pod in pods(kube)}
    with streaming(kube, 3) as streams:
        eventually(lambda: streams.finished >= 6, "requests are served", 60)
        kube("patch", "plinf", SERVICE, "--type=merge", "-p", '{"spec":{"restart":{"id":"1"}}}')

        def replaced() -> bool:
            now = {pod["metadata"]["uid"] for pod in pods(kube)}
            return not now & before and status(kube).get("readyReplicas") == 2

        eventually(replaced, "all pods are new and ready", 2 * READY_S)
        finished = streams.finished
        eventually(lambda: streams.finished >= finished + 6, "and serve", 60)
    print(f"{streams.finished} requests, longest silence {max(streams.pauses):.1f} s")
    assert streams.failures == []
    assert streams.forked == {}


@pytest.mark.long
def test_a_roll_out_ends_beside_a_claim_that_one_pod_may_hold(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest, checkpoint: Path
) -> None:
    """By itself an old pod goes first. With a surge that somebody asks for, the status says within
    a minute what the new pod waits for."""
    operator()
    made = plain(manifest)
    claim = mounted(kube, "alone", checkpoint, "ReadWriteOncePod")
    made["spec"]["model"] = {"uri": f"pvc://{claim}/tiny"}
    kube.apply(made)
    ready(kube)
    (before,) = pods(kube)
    kube.patch("plinf", SERVICE, {"spec": {"restart": {"id": "1"}}})

    def said(kind: str) -> dict[str, Any]:
        return next(one for one in status(kube)["conditions"] if one["type"] == kind)

    def replaced() -> bool:
        now = [one["metadata"]["uid"] for one in pods(kube)]
        done = said("Progressing")["reason"] == "RolloutComplete"
        return done and len(now) == 1 and now != [before["metadata"]["uid"]]

    eventually(replaced, "the roll-out ends", 2 * READY_S)
    rollout = {"maxSurge": 1, "maxUnavailable": 0}
    kube.patch("plinf", SERVICE, {"spec": {"rollout": rollout, "restart": {"id": "2"}}})
    words = "ReadWriteOncePod"
    eventually(lambda: words in said("Progressing")["message"], words, 60)
    assert words in said("EngineReady")["message"]
    # On a busy machine a probe of the pod that stays may be late once.
    eventually(lambda: condition(kube, "Ready") == "True", "the old pod serves", 60)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["applied", "starting", "ready", "streaming"])
def test_deletion_leaves_nothing_at_any_stage(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest, stage: str
) -> None:
    operator()
    kube.apply(plain(manifest))
    stop = threading.Event()
    if stage != "applied":
        eventually(lambda: pods(kube), "a pod is there", 60)
    if stage in ("ready", "streaming"):
        ready(kube)
    if stage == "streaming":
        streams = streaming(kube, 2)
        with streams:
            eventually(lambda: streams.finished >= 1, "requests run", 60)
            kube("delete", "plinf", SERVICE, "--wait=false")
            stop.wait(1.0)
    else:
        kube("delete", "plinf", SERVICE, "--wait=false")
    kinds = "plinf,deploy,rs,pod,svc,cm,sa,role,rolebinding,lease,pdb,controllerrevision"

    def left() -> list[str]:
        names = kube("get", kinds, "-o", "name").split()
        return [name for name in names if SERVICE in name]

    eventually(lambda: left() == [], "nothing is left", 180)
