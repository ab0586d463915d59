"""The engines that the tests put under a SupervisionPolicy.

How a person writes each into a pod, how it falls ill, and how a client asks it.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.peers import CHECKPOINT, PEERS, Peer
from tests.lab import images
from tests.lab.images import ROOT
from tests.lab.kube import Kube
from tests.lab.lab import Lab, mounted
from tests.node import streams

STANDIN = ROOT / "tests" / "integration" / "standin_external.py"
REAL = PEERS["vllm-0.32.0"]
CONTAINER, PORT = "server", 8000
MASTER_PORT, WORKERS_PORT = 29500, 29501
"""Of the leader's pod, and of the Service that forwards to it: vLLM's CPU backend takes ranks with
one port for ranks of one machine, and would exchange tensors through ``/dev/shm``."""
JOIN = """leader=${LWS_LEADER_ADDRESS%%.*}
eval "address=\\$LLM_${leader##*-}_SERVICE_HOST"
exec "$@" --master-addr="$address"
"""
LIMITED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
Document = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """``container`` and ``volumes`` stand in the pod template.

    ``prepare`` makes what they refer to. ``memory`` is the policy's. ``leak`` is a shell command
    that starts a leak in the container, until the container ends. ``ask`` is one client's request
    to a URL on a connection of its own; it raises ValueError or an error of httpx if it fails.
    ``start_s`` and ``story_s`` bound a start, and an incident from the leak to its end. ``peer`` is
    the real engine that it is. ``pair`` makes of its container the two containers of an engine on
    two nodes: the leader's, and that of a worker, which serves nothing.
    """

    container: Document
    volumes: tuple[Document, ...]
    memory: Document
    leak: str
    prepare: Callable[[Kube, Path], None]
    ask: Callable[[str], None]
    pair: Callable[[Document], tuple[Document, Document]]
    start_s: int = 180
    story_s: int = 240
    peer: Peer | None = None

    @property
    def pod_spec(self) -> Document:
        """As a restricted namespace admits it."""
        return {
            "securityContext": {
                "runAsUser": 10001,
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self.container],
            "volumes": list(self.volumes),
        }


def install(node: Lab, engine: Engine) -> None:
    """The image of a real engine, where it is one."""
    if engine.peer is None:
        return
    if not engine.peer.ready:
        pytest.skip(f"{engine.peer.name} is not installed: make engines")
    node.load_peer(engine.peer.home)


def standin(node: Lab) -> Engine:
    """A server that answers what vLLM answers, so far as a supervisor asks it."""
    sick = "/tmp/sick"
    arguments = ["--kind=vllm", "--host=0.0.0.0", f"--port={PORT}", "--log=/tmp/log"]

    def prepare(kube: Kube, folder: Path) -> None:
        data = {STANDIN.name: STANDIN.read_text()}
        metadata = {"name": "code"}
        kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})

    return Engine(
        container={
            "name": CONTAINER,
            "image": node.supervisor_image,
            "command": ["python", f"/code/{STANDIN.name}"],
            "args": [*arguments, f"--sick={sick}", "--leak-mib-s=4"],
            "ports": [{"name": "http", "containerPort": PORT}],
            "readinessProbe": _health(periodSeconds=1, timeoutSeconds=5),
            "resources": {"limits": {"memory": "1Gi"}},
            "securityContext": LIMITED,
            "volumeMounts": [{"name": "code", "mountPath": "/code"}],
        },
        volumes=({"name": "code", "configMap": {"name": "code"}},),
        memory={"host": {"growthBudget": "64Mi", "window": "1h"}, "warmup": "5s"},
        leak=f"touch {sick}",
        prepare=prepare,
        ask=_short_completion,
        pair=_standin_pair,
    )


def _standin_pair(container: Document) -> tuple[Document, Document]:
    worker = _without_server(container)
    worker["args"].append("--worker")
    return container, worker


def vllm(node: Lab) -> Engine:
    """The real vLLM on its CPU backend; its Worker leaks 2 MiB/s. The model is on a claim."""
    environment = REAL.environment | {"HOME": "/tmp", "PLIMSOLL_CONFORMANCE_DIR": "/tmp"}
    program, *arguments = REAL.command
    model = [argument.replace(str(CHECKPOINT), "/models/tiny") for argument in arguments]
    shm = {"medium": "Memory", "sizeLimit": "1Gi"}

    def prepare(kube: Kube, folder: Path) -> None:
        models = folder / "models"
        copy = shutil.copytree(CHECKPOINT, models / "tiny")
        for file in copy.iterdir():
            file.chmod(0o644)
        mounted(kube, "models", models)

    return Engine(
        container={
            "name": CONTAINER,
            "image": images.PEER,
            "command": [str(REAL.home / program), *model[:1]],
            "args": [*model[1:], f"--port={PORT}"],
            "env": [{"name": name, "value": value} for name, value in environment.items()],
            "ports": [{"name": "http", "containerPort": PORT}],
            "startupProbe": _health(periodSeconds=2, failureThreshold=450),
            "readinessProbe": _health(periodSeconds=2, timeoutSeconds=5),
            "livenessProbe": _health(periodSeconds=10, timeoutSeconds=10, failureThreshold=6),
            "resources": {"limits": {"memory": "6Gi"}},
            "securityContext": LIMITED,
            "volumeMounts": [
                {"name": "models", "mountPath": "/models"},
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        },
        volumes=(
            {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
            {"name": "shm", "emptyDir": shm},
        ),
        memory={"host": {"growthBudget": "256Mi", "window": "1h"}, "warmup": "60s"},
        leak=f"echo {2 << 20} >/tmp/leak-{REAL.role(REAL.runner)}",
        prepare=prepare,
        ask=_completion,
        pair=_vllm_pair,
        start_s=900,
        story_s=1500,
        peer=REAL,
    )


def _vllm_pair(container: Document) -> tuple[Document, Document]:
    """One model over two pods of a LeaderWorkerSet: a Worker in each.

    The node has no DNS here, so that a worker finds its leader by the Service which has the
    leader's name. Four such pods share the machine's memory.
    """
    address = {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    leader = copy.deepcopy(container)
    # The image has no C++ compiler, and what vLLM does with ranks alone would be compiled.
    leader["env"] += [address, {"name": "TORCHDYNAMO_DISABLE", "value": "1"}]
    leader["resources"] = {"limits": {"memory": "4Gi"}}
    leader["args"] += [
        "--tensor-parallel-size=2",
        "--distributed-executor-backend=mp",
        "--nnodes=$(LWS_GROUP_SIZE)",
        "--node-rank=$(LWS_WORKER_INDEX)",
    ]
    worker = _without_server(leader)
    leader["args"] += ["--master-addr=$(VLLM_HOST_IP)", f"--master-port={MASTER_PORT}"]
    worker["args"] = [
        *worker["command"], *worker["args"], f"--master-port={WORKERS_PORT}", "--headless"
    ]  # fmt: skip
    worker["command"] = ["sh", "-c", JOIN, "sh"]
    return leader, worker


def _without_server(container: Document) -> Document:
    """A copy that nothing asks whether it is ready."""
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    left = {key: value for key, value in container.items() if key not in ("ports", *probes)}
    return copy.deepcopy(left)


def _health(**more: int) -> Document:
    return {"httpGet": {"path": "/health", "port": "http"}, **more}


def _short_completion(url: str) -> None:
    status = httpx.post(f"{url}/v1/completions", json={"prompt": [1]}, timeout=10).status_code
    if status != 200:
        raise ValueError(f"HTTP {status}")


def _completion(url: str) -> None:
    """A whole streamed completion."""
    with httpx.Client(base_url=url, timeout=httpx.Timeout(30, read=streams.SILENCE_S)) as client:
        streams.ask(client, "tiny", "the water line", ignore_eos=True)
