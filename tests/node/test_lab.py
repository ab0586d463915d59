"""The node itself: pods that really run, under the restricted standard."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, namespace

RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SERVE = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port=8080)"
SEES = (
    "import os\n"
    "names = [open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') if p.isdigit()]\n"
    "pid = next(p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()\n"
    "           and 'http.server' in open(f'/proc/{p}/cmdline').read())\n"
    "print([l for l in open(f'/proc/{pid}/status') if l.startswith('RssAnon')][0].strip())\n"
    "print(open(f'/proc/{pid}/smaps_rollup').read()[:8] != '')\n"
)


def pod(engine: str, supervisor: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pair", "labels": {"app": "pair"}},
        "spec": {
            "shareProcessNamespace": True,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "initContainers": [
                {
                    "name": "supervisor",
                    "image": supervisor,
                    "restartPolicy": "Always",
                    "command": ["sleep", "600"],
                    "securityContext": RESTRICTED,
                }
            ],
            "containers": [
                {
                    "name": "engine",
                    "image": engine,
                    "command": ["python", "-c", SERVE],
                    "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
                    "securityContext": RESTRICTED,
                }
            ],
        },
    }


def restarts(kube: Kube) -> tuple[int, int]:
    status = (kube.get("pod", "pair") or {})["status"]
    return (
        status["containerStatuses"][0]["restartCount"],
        status["initContainerStatuses"][0]["restartCount"],
    )


def test_a_pair_of_containers_as_we_render_them(node: Lab) -> None:
    """Native sidecar, shared processes, one UID, no capability; PyTorch, a Service."""
    with namespace(node.kube, restricted=True) as kube:
        kube.apply(
            pod(node.engine_image, node.supervisor_image),
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "pair"},
                "spec": {"selector": {"app": "pair"}, "ports": [{"port": 80, "targetPort": 8080}]},
            },
        )
        begun = time.monotonic()
        kube("wait", "pod/pair", "--for=condition=Ready", "--timeout=60s")
        print(f"pod ready after {time.monotonic() - begun:.1f} s")

        seen = kube("exec", "pair", "-c", "supervisor", "--", "python", "-c", SEES)
        assert seen.startswith("RssAnon:")
        assert "True" in seen

        code = (
            "import json, os, torch; print(json.dumps([os.getuid(), torch.ones(2).sum().item()]))"
        )
        out = kube("exec", "pair", "-c", "engine", "--", "python", "-c", code)
        assert json.loads(out.strip().splitlines()[-1]) == [10001, 2.0]

        address = (kube.get("service", "pair") or {})["spec"]["clusterIP"]

        def answers() -> bool:
            try:
                return bool(urllib.request.urlopen(f"http://{address}/", timeout=2).status == 200)
            except OSError:  # kube-proxy follows readiness by up to a second
                return False

        eventually(answers, "the Service answers")

        kill = "import os, signal; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit()"
        kill += " and b'http.server' in open(f'/proc/{p}/cmdline', 'rb').read()"
        kill += " and int(p) != os.getpid()]"
        kube.run("exec", "pair", "-c", "supervisor", "--", "python", "-c", kill)
        eventually(lambda: restarts(kube) == (1, 0), "only the engine was restarted", 60)
