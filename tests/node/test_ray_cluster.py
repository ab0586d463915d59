"""A SupervisionPolicy over a RayCluster: pods as KubeRay makes them, with a stand-in for Ray.

A leak in the worker is one incident, at the head, whose restart ends the worker's actors.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from plimsoll_api.workloads import make_ray_service_name
from tests import ray_clusters
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.operator import Operator
from tests.node import supervised_engines
from tests.node.supervised import (
    LISTED_S,
    POLICY,
    counts,
    ended_incident,
    held_slots,
    injects,
    older_pod,
    policy,
    ready_since,
    restarts,
    supervised,
    unix,
    warm,
)
from tests.node.supervised_engines import PORT, Engine

NAME = "llm"
TEAM = {"team": "inference"}
HEAD, WORKER = "llm-head-x7k2p", "llm-gpu-worker-b2f9q"
RAY = '''
"""What `ray start --block` does that matters here: it runs an actor, which ends with its driver."""

import os
import socket
import subprocess
import sys
import time

address, sick, *actor = sys.argv[2:]
host, port = address.split(":")


def driver():
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


while True:
    while not driver():
        time.sleep(0.1)
    running = subprocess.Popen(actor)
    while driver():
        time.sleep(0.2)
    running.kill()
    running.wait()
    if os.path.exists(sick):
        os.remove(sick)
'''


def head(engine: Engine) -> dict[str, Any]:
    spec = copy.deepcopy(engine.pod_spec)
    spec["containers"][0]["name"] = "ray-head"
    return _pod(spec)


def worker(engine: Engine, address: str) -> dict[str, Any]:
    """One that joins the head at ``address``."""
    spec = copy.deepcopy(engine.pod_spec)
    (container,) = spec["containers"]
    for field in ("ports", "readinessProbe"):
        del container[field]
    container["name"] = "ray-worker"
    container["volumeMounts"].append({"name": "ray", "mountPath": "/ray"})
    spec["volumes"].append({"name": "ray", "configMap": {"name": "ray"}})
    (sick,) = [one for one in container["args"] if one.startswith("--sick=")]
    actor = [*container["command"], *container["args"], "--worker"]
    container["command"] = ["python", "/ray/ray", "start"]
    container["args"] = [f"{address}:{PORT}", sick.partition("=")[2], *actor]
    return _pod(spec)


def _pod(spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"labels": TEAM}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def pod(kube: Kube, name: str) -> dict[str, Any]:
    return dict(kube.get("pod", name) or {"status": {}, "spec": {}})


def test_a_leak_in_a_ray_worker_restarts_the_engine_of_the_head(
    node: Lab,
    kube: Kube,
    operator: Callable[..., Operator],
    webhook: tuple[str, ...],
    tmp_path: Path,
) -> None:
    engine = supervised_engines.standin(node)
    engine.prepare(kube, tmp_path)
    operator(*webhook)
    kube.apply(policy(TEAM, engine.memory, ladder=["Trim", "EngineRestart"]))
    eventually(lambda: injects(kube, older_pod(node, TEAM)), "pods are injected", LISTED_S)
    kube.apply(ray_clusters.definition())
    kube.established(ray_clusters.DEFINITION)
    data = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ray"}}
    kube.apply(ray_clusters.cluster(NAME), data | {"data": {"ray": RAY}})
    owner = kube.get("raycluster", NAME) or {}
    kube.apply(ray_clusters.pod_of(owner, head(engine), "head", HEAD))
    eventually(lambda: ready_since(pod(kube, HEAD)), "the head is ready", engine.start_s)
    address = pod(kube, HEAD)["status"]["podIP"]
    kube.apply(ray_clusters.pod_of(owner, worker(engine, address), "worker", WORKER))
    eventually(lambda: ready_since(pod(kube, WORKER)), "the worker is ready", engine.start_s)
    eventually(lambda: counts(kube) == (2, 2, 0, 0), "both pods are supervised", LISTED_S)
    service = make_ray_service_name(POLICY, NAME)
    eventually(lambda: kube.get("service", service), "a Service for the group", LISTED_S)
    before = {name: pod(kube, name) for name in (HEAD, WORKER)}
    assert all(map(supervised, before.values()))
    for name, one in before.items():
        eventually(partial(warm, one), f"a baseline of {name}", engine.start_s)

    since = time.time()
    kube("exec", WORKER, "-c", "ray-worker", "--", "sh", "-c", engine.leak)
    eventually(lambda: HEAD in held_slots(kube), "the head has the slot", engine.story_s)
    incident = eventually(lambda: ended_incident(kube), "the incident ends", 2 * engine.story_s)
    print(json.dumps(incident, indent=1))
    assert incident is not None
    spec, found = incident["spec"], incident["status"]
    print(f"confirmed after {unix(found['confirmedAt']) - since:.0f} s")
    assert spec["workloadRef"] == {"apiGroup": "ray.io", "kind": "RayCluster", "name": NAME}
    assert (spec["podGroup"], spec["policyRef"]) == (NAME, {"name": POLICY})
    assert (spec["kind"], spec["pod"]) == ("HostGrowth", HEAD)
    assert found["attribution"]["pod"] == WORKER
    assert (found["phase"], found["outcome"]) == ("Resolved", "EngineRestart")
    assert len(kube.list("leakincidents")) == 1, "one for the group"
    after = {name: pod(kube, name) for name in (HEAD, WORKER)}
    assert restarts(after[HEAD]) == {"ray-head": 1, "supervisor": 0}
    assert restarts(after[WORKER]) == {"ray-worker": 0, "supervisor": 0}
    eventually(lambda: not held_slots(kube), "the slot is free again", LISTED_S)
