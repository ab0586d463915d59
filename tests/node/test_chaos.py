"""Groups and pairs on a real node while the operator, the controller of LeaderWorkerSets, the API
server and the kubelet are killed at random.

Clients send requests all the time, and engines leak. The engines stand in for vLLM: two groups of
two pods of an InferenceService, and two prefill and two decode pods under a policy.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.operator.conftest import FAST
from tests.cluster.operator.test_groups import OWN, groups, names
from tests.lab.chaos import Chaos, Generations, Person
from tests.lab.chaos_record import CONVERGES_S, PLAIN_S, History, PlainGroup
from tests.lab.kube import Kube, conditions, eventually
from tests.lab.lab import Lab, mounted
from tests.lab.leader_worker_set import LeaderWorkerSets
from tests.lab.operator import Operator, operator_kubeconfig
from tests.lab.services import image_flags
from tests.node import supervised_engines
from tests.node.chaos_clients import Clients, Endpoints
from tests.node.chaos_leaks import ENDS, Leaks, Target
from tests.node.supervised import (
    LISTED_S,
    counts,
    held_slots,
    injects,
    older_pod,
    policy,
    status,
)
from tests.node.supervised_engines import CONTAINER, PORT, STANDIN, Engine
from tests.node.visits import Visits

__all__ = ["groups"]
CHAOS_S = float(os.environ.get("PLIMSOLL_GROUP_CHAOS_S", "180"))
LAST_LEAK_S = 60.0
"""No leak begins in the last part of the chaos: its restart is under way at the end."""
HOLDS_S = 15.0
"""A kubelet that has just started soon says that no pod is ready, until it has probed each."""
PATIENCE_S = 600.0
"""For what is no figure."""
CONNECT_S = 10
"""The clients' limit for a connection."""
TEAM, ROLE = {"team": "inference"}, "llm-d.ai/role"
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
OF_GROUP = "leaderworkerset.sigs.k8s.io/group-index"
TARGETS = [
    *(Target(f"group {index}", f"{OWN},{OF_GROUP}={index}", 2, "engine") for index in (0, 1)),
    *(Target(role, f"{ROLE}={role}", 2, CONTAINER) for role in KV_ROLES),
]
SUPERVISION = {
    "mode": "Recover", "ladder": ["Trim", "EngineRestart"], "drain": {"deadline": "10s"},
    "restartBudget": {"count": 1000, "window": "1h"},
}  # fmt: skip
VLLM = """#!/bin/sh
case "$*" in *--headless*) set -- "$@" --worker; esac
set -- --kind=vllm --log=/tmp/log --sick=/tmp/sick --leak-mib-s=4 "$@"
exec python /code/standin_external.py "$@"
"""
"""What the operator starts in the pods of the groups: the command ``vllm serve``."""


def service(node: Lab, engine: Engine, claim: str) -> dict[str, Any]:
    """An InferenceService of two groups of two pods."""
    code = {"name": "code", "mountPath": "/code"}
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "qwen"},
        "spec": {
            "replicas": 2,
            "model": {"uri": f"pvc://{claim}/tiny"},
            "engine": {
                "type": "vllm",
                "image": node.supervisor_image,
                "env": [{"name": "PATH", "value": "/code:/opt/plimsoll/bin:/usr/local/bin:/bin"}],
                "resources": {"limits": {"memory": "2Gi"}},
            },
            "parallelism": {"pipeline": 2},
            "memory": engine.memory,
            "supervision": SUPERVISION,
            "podTemplate": {
                "spec": {
                    "containers": [{"name": "engine", "volumeMounts": [code]}],
                    "volumes": [
                        {"name": "code", "configMap": {"name": "code", "defaultMode": 0o555}}
                    ],
                }
            },
        },
    }


def role(engine: Engine, name: str, replicas: int) -> list[dict[str, Any]]:
    """The pods of a role, and their Service."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": KV_ROLES[name]}
    more = [f"--kv-transfer-config={json.dumps(transfer)}", "--transfers", "--version=0.32.0"]
    container = engine.container | {
        "args": [
            *(one for one in engine.container["args"] if not one.startswith("--sick")),
            "--sick=/tmp/sick",
            *more,
        ],
        "resources": {"limits": {"memory": "2Gi"}},
        "volumeMounts": [*engine.container["volumeMounts"], {"name": "tmp", "mountPath": "/tmp"}],
    }
    volumes = [*engine.volumes, {"name": "tmp", "emptyDir": {}}]
    labels = {ROLE: name}
    template = {
        "metadata": {"labels": TEAM | labels},
        "spec": engine.pod_spec | {"containers": [container], "volumes": volumes},
    }
    return [
        {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
            "spec": {
                "replicas": replicas, "selector": {"matchLabels": labels}, "template": template,
            },
        },
        {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": PORT}]},
        },
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(CHAOS_S + 3600)
@pytest.mark.parametrize("seed", [int(os.environ.get("PLIMSOLL_CHAOS_SEED", "1"))])
def test_no_request_fails_and_nothing_restarts_twice_while_processes_are_killed(
    node: Lab, kube: Kube, groups: LeaderWorkerSets, webhook: tuple[str, ...], tmp_path: Path,
    seed: int,
) -> None:  # fmt: skip
    account = operator_kubeconfig(node.kube, tmp_path / "kubeconfig")
    clocks = [f"--clock={name.replace('_', '-')}={value}" for name, value in FAST.items()]
    flags = (*image_flags(node), *webhook, *clocks, "--resync", "5")
    history, plain = History(tmp_path / "history.log"), PlainGroup(kube, node.supervisor_image)
    engine = supervised_engines.standin(node)

    def start() -> Operator:
        return Operator(account, kube.namespace, *flags, ready=False, warm=True)

    def serving() -> dict[str, bool]:
        """What must hold when all is well."""
        found = {one.name: bool(one.run(kube)) for one in TARGETS}
        said = {one["type"]: one["status"] for one in conditions(kube.get("plinf", "qwen") or {})}
        found["service"] = (said.get("Ready"), said.get("Progressing")) == ("True", "False")
        found["policy"] = counts(kube) == (4, 4, 0, 0)
        return found

    def converged() -> bool:
        found = serving() | {"leaks": leaks.at_rest}
        history.note("not yet", [what for what, holds in found.items() if not holds])
        return all(found.values())

    def settled() -> bool:
        """Whether all is well for a while, and a plain group runs or is late. Notes since when."""
        chaos.keep_up()
        now = time.monotonic() - begin
        if not converged():
            after_s.pop("converged", None)
        elif "converged" not in after_s:
            after_s["converged"] = now
        if "a plain group" not in after_s and plain.runs():
            after_s["a plain group"] = now
        history.note("after", after_s.copy())
        return (
            "converged" in after_s
            and now - after_s["converged"] > HOLDS_S
            and ("a plain group" in after_s or now > PLAIN_S)
        )

    def incidents() -> list[str]:
        found = kube.list("leakincidents")
        return [str(one.get("status", {}).get("phase")) for one in found]

    after_s: dict[str, float] = {}
    assert node.node is not None
    node.node.forget_unanswered(CONNECT_S)
    groups.start()
    person = Person(kube, "qwen", [names(0), names(1)], history)
    chaos = Chaos(node, groups, start, seed, history, kubelet=True, meanwhile=person.look)
    try:
        data = {STANDIN.name: STANDIN.read_text(), "vllm": VLLM}
        kube.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": data}
        )
        (tmp_path / "models" / "tiny").mkdir(parents=True)
        kube.apply(policy(TEAM, engine.memory, **SUPERVISION, scope="Graph"))
        eventually(lambda: injects(kube, older_pod(node, TEAM)), "pods are injected", LISTED_S)
        plain.start()
        kube.apply(service(node, engine, mounted(kube, "models", tmp_path / "models")))
        for replicas in (1, 2):  # a supervisor that no pod has proven is injected into some alone
            kube.apply(*(one for side in KV_ROLES for one in role(engine, side, replicas)))
            proven = "the supervisor's image is proven"
            eventually(lambda: status(kube).get("injection", {}).get("proven"), proven, PATIENCE_S)
        eventually(lambda: all(serving().values()) and plain.runs(), "all serve", PATIENCE_S)
        with (
            Generations(kube, OWN, history) as generations,
            Endpoints(kube, history) as endpoints,
        ):
            clients = Clients(kube, endpoints, PORT, history)

            def through_both() -> None:
                clients.ask("prefill", engine.ask)
                clients.ask("decode", engine.ask)

            with (
                Visits(partial(clients.ask, "qwen", engine.ask)) as of_groups,
                Visits(through_both) as of_pairs,
                Leaks(node, kube, TARGETS, seed, history) as leaks,
            ):
                chaos.run(CHAOS_S - LAST_LEAK_S)
                leaks.rest()
                chaos.run(LAST_LEAK_S)
                begin = time.monotonic()
                history.note("kills", "end")
                plain.restart()
                try:
                    eventually(settled, "all is well again", PATIENCE_S)
                    eventually(lambda: set(incidents()) <= {*ENDS}, "incidents end", PATIENCE_S)
                    eventually(lambda: not held_slots(kube), "no slot is held", PATIENCE_S)
                except AssertionError as error:
                    error.add_note(f"{leaks.steps} {after_s} {chaos.kills} {chaos.ended}")
                    raise
        found = kube.list("leakincidents")
        restarts = {one.name: sum(map(one.restarts, one.pods(kube).values())) for one in TARGETS}
        seen = {name: len(uids) - 1 for name, uids in generations.uids.items()}
        print(
            f"seed {seed}, {CHAOS_S:.0f} s: killed {dict(chaos.kills)}, ended by themselves"
            f" {dict(chaos.ended)}; leaks {dict(leaks.begun)}, groups replaced {seen}, engines"
            f" started again {restarts}, {len(person.deleted)} left-over pods deleted;"
            f" {of_groups.answered} requests to groups and {of_pairs.answered} through pairs,"
            f" {len(clients.lost)} failed that a replica could serve,"
            f" {len(clients.misdirected)} because a kubelet reported a pod out of service as ready,"
            f" {len(clients.unserved)} while none was ready; converged in"
            f" {after_s['converged']:.1f} s, a plain group in"
            f" {after_s.get('a plain group', math.inf):.1f} s"
        )
        assert clients.lost == []
        assert all(leaks.begun[one.name] for one in TARGETS)
        for index in (0, 1):
            for name in names(index):
                assert seen[name] == leaks.begun[f"group {index}"], f"{name}: one for each leak"
        for side in KV_ROLES:
            assert restarts[side] == leaks.begun[side], f"{side}: one for each leak"
        assert sorted(incidents()) == ["Resolved"] * leaks.begun.total(), found
        assert after_s["converged"] <= CONVERGES_S
    finally:
        shutil.copytree(node.home / "log", tmp_path / "log")
        last = chaos.operators[-1]
        ended = last.stop()
        print(last.log.read_text()[-4000:])
    assert ended == 0
    logs = [one.log.read_text() for one in chaos.operators]
    assert not any('"traceback"' in one for one in logs), logs
