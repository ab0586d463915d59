"""Shared memory that a killed engine leaves in the pod: it outlives the container, and is swept
between two engines where the service asks for that, or ends with the pod."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab
from tests.lab.operator import Operator
from tests.node.service import SERVICE, pods, ready

STORY_S = 300
LEFT = 64 << 20
"""What the leak has taken at least when the engine is killed: its budget."""
MOST = 384 << 20
ENGINE = f"""
import http.server, mmap, os, pathlib, signal, threading, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a process that hangs in a driver's call
areas, leaked = [], pathlib.Path("/tmp/leaked")

def leak():
    for number in range({MOST >> 20}):
        with open(f"/dev/shm/segment-{{number}}", "w+b") as file:
            os.fchmod(file.fileno(), 0o600)
            file.truncate(1 << 20)
            area = mmap.mmap(file.fileno(), 1 << 20)
        area.write(bytes(1 << 20))
        areas.append(area)
        time.sleep(0.25)  # it leaks until it is killed

class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/leak" and not leaked.exists():
            leaked.touch()
            threading.Thread(target=leak, daemon=True).start()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Server).serve_forever()
"""
ASK = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:{}", timeout=9).read().decode())
"""
FILES = "import os; print(len([n for n in os.listdir('/dev/shm') if n.startswith('segment-')]))"


def manifest(node: Lab, **supervision: Any) -> dict[str, Any]:
    """A service whose engine maps segments that it never removes, and ends by SIGKILL alone."""
    command = ["python", "-c", ENGINE]
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": SERVICE},
        "spec": {
            "model": {"uri": "file:///unused"},
            "engine": {
                "type": "custom",
                "image": node.supervisor_image,
                "resources": {"limits": {"memory": "512Mi"}},
            },
            "memory": {"host": {"growthBudget": "64Mi", "window": "1h"}, "warmup": "2s"},
            "supervision": {"mode": "Recover", "drain": {"deadline": "2s"}, **supervision},
            "podTemplate": {"spec": {"containers": [{"name": "engine", "command": command}]}},
        },
    }


def inside(kube: Kube, code: str) -> str:
    (pod,) = pods(kube)
    name = pod["metadata"]["name"]
    return kube("exec", name, "-c", "supervisor", "--", "python", "-c", code).strip()


def metrics(kube: Kube) -> dict[str, float]:
    lines = inside(kube, ASK.format("9464/metrics")).splitlines()
    named = (line.rsplit(" ", 1) for line in lines if line.startswith("plimsoll_"))
    return {name: float(value) for name, value in named}


def warm(kube: Kube) -> bool:
    """The supervisor has a baseline: from now on growth is growth."""
    return 'plimsoll_memory_baseline_bytes{kind="host"}' in metrics(kube)


def incident(kube: Kube, step: str) -> dict[str, Any] | None:
    """The status of the one incident, once ``step`` is in its timeline and has an outcome."""
    found = [one.get("status", {}) for one in kube.list("leakincidents")]
    steps = [one["step"] for status in found for one in status.get("timeline", [])]
    return found[0] if step in steps else None


def steps(status: dict[str, Any]) -> dict[str, str]:
    """What each step says."""
    return {one["step"]: one.get("message", "") for one in status["timeline"]}


def leak(kube: Kube) -> dict[str, Any]:
    """The pod, whose engine leaks from now on."""
    ready(kube)
    eventually(lambda: warm(kube), "a baseline", 120)
    (pod,) = pods(kube)
    inside(kube, ASK.format("8000/leak"))
    return pod


def restarts(pod: dict[str, Any]) -> int:
    (engine,) = pod["status"]["containerStatuses"]
    return int(engine["restartCount"])


@pytest.mark.long
def test_a_sweep_between_two_engines_returns_what_the_killed_one_left(
    node: Lab, kube: Kube, operator: Callable[[], Operator]
) -> None:
    operator()
    kube.apply(manifest(node, ladder=["EngineRestart"], sweepSharedMemory=True))
    before = leak(kube)

    def cured() -> dict[str, Any] | None:
        found = incident(kube, "EngineRestart") or {}
        return found if found.get("phase") in ("Resolved", "Unresolved") else None

    status = eventually(cured, "the incident ends", STORY_S)
    assert status is not None
    print(json.dumps(status, indent=1))
    assert (status["phase"], status["outcome"]) == ("Resolved", "EngineRestart")
    assert "was killed by SIGKILL" in steps(status)["EngineRestart"]
    assert status["returnedBytes"] >= 0.9 * status["attribution"]["bytes"]
    (after,) = pods(kube)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert restarts(after) == restarts(before) + 1
    # What was written between the last look and the kill may be the next engine's.
    assert int(inside(kube, FILES)) <= 8
    assert metrics(kube)["plimsoll_shared_memory_swept_bytes_total"] >= 0.9 * LEFT


@pytest.mark.long
def test_without_the_sweep_it_is_seen_and_ends_with_the_pod(
    node: Lab, kube: Kube, operator: Callable[[], Operator]
) -> None:
    operator()
    kube.apply(manifest(node, ladder=["EngineRestart", "PodReplace"]))
    before = leak(kube)
    orphan = 'plimsoll_memory_segment_bytes{kind="host",segment="shared_orphan"}'

    def seen() -> bool:
        (pod,) = pods(kube)
        return restarts(pod) == 1 and metrics(kube).get(orphan, 0.0) >= 0.5 * LEFT

    eventually(seen, "the segments of the killed engine are seen", STORY_S)
    assert int(inside(kube, FILES)) >= LEFT >> 20
    assert metrics(kube)["plimsoll_shared_memory_swept_bytes_total"] == 0

    status = eventually(lambda: incident(kube, "PodReplace"), "a new pod is asked for", STORY_S)
    assert status is not None
    print(json.dumps(status, indent=1))
    assert list(steps(status))[-2:] == ["EngineRestart", "PodReplace"]
    assert status["attribution"]["segment"] == "shared_orphan"
    assert status["returnedBytes"] <= 0.1 * LEFT, "verification counts what the restart left"

    def replaced() -> bool:
        uids = {pod["metadata"]["uid"] for pod in pods(kube)}
        return bool(uids) and before["metadata"]["uid"] not in uids

    eventually(replaced, "the pod is replaced", STORY_S)
    ready(kube)
    assert inside(kube, FILES) == "0"
