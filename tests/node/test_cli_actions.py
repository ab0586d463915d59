"""The command line on a real pod: what doctor sees, and actions by exec, fenced, while a client
streams."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner, Result

from plimsoll_cli.main import app
from tests.lab.kube import Kube, eventually
from tests.lab.lab import ExistingCluster, Lab
from tests.lab.operator import Operator
from tests.node.streams import Streams
from tests.node.supervised import LISTED_S

SERVICE = "leaky"
READY_S = 180
SELECTOR = f"plimsoll.dev/service={SERVICE}"
QUIET = "request_cycle:payload_bytes=1Ki"
KILL_FRONTEND = """\
import os, signal
from pathlib import Path
pids = [int(one.parent.name) for one in Path("/proc").glob("[0-9]*/cmdline")
        if b"plimsoll_engine" in one.read_bytes()]
os.kill(min(pids), signal.SIGKILL)
"""
Manifest = Callable[..., dict[str, Any]]


def plimsoll(kube: Kube, *arguments: str) -> Result:
    flags = ["--kubeconfig", str(kube.kubeconfig), "-n", kube.namespace]
    return CliRunner().invoke(app, [*arguments, *flags])


@pytest.mark.timeout(600)
def test_a_person_trims_restarts_drains_and_resumes(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest
) -> None:
    operator()
    kube.apply(manifest(QUIET))
    kube("wait", f"plinf/{SERVICE}", "--for=condition=Ready", f"--timeout={READY_S}s")
    (found,) = kube.list("pods", SELECTOR)
    pod = found["metadata"]["name"]

    replica = checks(kube)[pod]
    assert replica["ok"] is True, replica
    assert "restart_worker" in replica["text"]
    before = replica["text"].split("epoch ")[1].split(";")[0]
    assert f"{kube.namespace}/{SERVICE}" in plimsoll(kube, "top").stdout

    trimmed = plimsoll(kube, "trim", pod, "--yes")
    assert trimmed.exit_code == 0, trimmed.exception or trimmed.output

    service = (kube.get("service", SERVICE) or {})["spec"]["clusterIP"]
    with Streams(f"http://{service}", SERVICE) as streams:
        restarted = plimsoll(kube, "restart", pod, "--yes")
        assert restarted.exit_code == 0, restarted.exception or restarted.output
    assert streams.failures == [], "a restart by hand breaks no stream"
    assert streams.finished > 0
    after = checks(kube)[pod]["text"].split("epoch ")[1].split(";")[0]
    assert after.rpartition(":")[0] == before.rpartition(":")[0], "the same engine"
    assert int(after.rpartition(":")[2]) == int(before.rpartition(":")[2]) + 1, "a new worker"

    unasked = plimsoll(kube, "drain", pod, "--force")
    assert "Cannot ask for confirmation without a terminal: to confirm, add --yes" in str(
        unasked.exception
    )
    refused = plimsoll(kube, "drain", pod, "--yes", "--deadline", "5s")
    assert "the last ready pod of Service" in str(refused.exception)
    drained = plimsoll(kube, "drain", pod, "--yes", "--deadline", "5s", "--force")
    assert drained.exit_code == 0, drained.exception or drained.output
    eventually(lambda: not ready(kube), "the drained pod is out of service")
    found = checks(kube)
    assert found[f"service {SERVICE} drained"]["ok"] is False
    assert "out of service: drained by a person" in found[pod]["text"]
    eventually(lambda: "Drained(1)" in plimsoll(kube, "top").stdout, "top shows it", LISTED_S)
    resumed = plimsoll(kube, "resume", pod, "--yes")
    assert resumed.exit_code == 0, resumed.exception or resumed.output
    eventually(lambda: ready(kube), "the pod is back in service")

    assert " from the slot Leases" in resumed.stdout

    recorded = eventually(lambda: by_hand(kube, 4), "each action has its record")
    assert set(recorded) == {"ManualTrim", "ManualRestart", "ManualDrain", "ManualResume"}
    assert not incidents(kube, "EngineCrash")

    with forwarded(kube, pod) as url:
        page = httpx.get(url, timeout=10, trust_env=False)
    assert page.status_code == 200
    assert SERVICE in page.text
    # What the runbooks tell to look at.
    assert kube("logs", pod, "-c", "supervisor", "--tail=50")
    assert "journal" in kube("exec", pod, "-c", "supervisor", "--", "ls", "/var/lib/plimsoll")
    held = kube("get", "leases", "-l", f"plimsoll.dev/service={SERVICE}")
    assert SERVICE in held


@pytest.mark.long
def test_a_frontend_that_is_killed_in_its_pod_leaves_a_record(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest
) -> None:
    operator()
    kube.apply(manifest(QUIET))
    kube("wait", f"plinf/{SERVICE}", "--for=condition=Ready", f"--timeout={READY_S}s")
    (found,) = kube.list("pods", SELECTOR)
    pod = found["metadata"]["name"]
    (epoch,) = re.findall(r"epoch (\S+);", checks(kube)[pod]["text"])
    kube("exec", pod, "-c", "supervisor", "--", "python", "-c", KILL_FRONTEND)
    (crash,) = eventually(lambda: incidents(kube, "EngineCrash"), "it is recorded", READY_S)
    assert (crash["spec"]["epoch"], crash["spec"]["pod"]) == (epoch, pod)
    assert crash["status"]["outcome"] == "ContainerRestarted"
    story = plimsoll(kube, "explain", crash["metadata"]["name"]).stdout
    assert "frontend (PID" in story
    assert f"kubectl logs {pod} -c engine --previous" in story


@pytest.mark.long
def test_inject_puts_a_supervisor_beside_any_server(
    kube: Kube, node: Lab | ExistingCluster, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(server(node.engine_image)))
    image = f"--supervisor-image={node.supervisor_image}"
    injected = CliRunner().invoke(app, ["inject", str(plain), image, "--host-budget=64Mi"])
    assert injected.exit_code == 0, injected.exception
    kube("apply", "-f", "-", stdin=injected.stdout)
    kube("rollout", "status", "deployment/server", "--timeout=120s")
    (pod,) = kube.list("pods", "plimsoll.dev/service=server")
    text = eventually(lambda: scraped(pod["status"]["podIP"]), "the supervisor is scraped")
    assert 'plimsoll_signal_age_seconds{signal="engine"}' in text
    again = CliRunner().invoke(app, ["inject", str(plain), image, "--host-budget=64Mi"])
    assert "configured" not in kube("apply", "-f", "-", stdin=again.stdout)


@contextlib.contextmanager
def forwarded(kube: Kube, pod: str) -> Iterator[str]:
    """The supervisor's page through ``kubectl port-forward``, at a free port."""
    flags = [f"--kubeconfig={kube.kubeconfig}", f"-n={kube.namespace}"]
    process = subprocess.Popen(
        [*kube.kubectl, *flags, "port-forward", pod, ":9464"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found, "kubectl port-forward ended"
        yield f"http://127.0.0.1:{found[1]}/"
    finally:
        process.terminate()
        process.wait(10)


def scraped(address: str) -> str:
    """What a supervisor shows after its first sample, empty before."""
    try:
        answer = httpx.get(f"http://{address}:9464/metrics", timeout=5, trust_env=False)
    except httpx.HTTPError:
        return ""
    return answer.text if "plimsoll_signal_age_seconds" in answer.text else ""


def server(image: str) -> dict[str, Any]:
    """A Deployment of a server that knows nothing of supervision."""
    container = {
        "name": "server",
        "image": image,
        "command": ["python", "-m", "http.server", "8000", "--directory", "/tmp"],
        "ports": [{"containerPort": 8000}],
        "resources": {"limits": {"memory": "256Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    labels = {"app": "server"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "server"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "securityContext": {"runAsUser": 10001, "runAsNonRoot": True},
                    "containers": [container],
                },
            },
        },
    }


def incidents(kube: Kube, kind: str) -> list[dict[str, Any]]:
    done = plimsoll(kube, "incidents", SERVICE, "--kind", kind, "-o", "json")
    assert done.exit_code == 0, done.exception or done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return [one for one in found if one["status"].get("outcome")]


def by_hand(kube: Kube, count: int) -> list[str]:
    """How the actions by hand ended, once there are so many."""
    found = [one["status"]["outcome"] for one in incidents(kube, "ManualAction")]
    return found if len(found) >= count else []


def checks(kube: Kube) -> dict[str, dict[str, Any]]:
    """What doctor says, by name."""
    done = plimsoll(kube, "doctor", "--service", SERVICE, "-o", "json")
    sys.stdout.write(done.stdout)
    return {one["name"]: one for one in json.loads(done.stdout)}


def ready(kube: Kube) -> bool:
    (pod,) = kube.list("pods", SELECTOR)
    conditions = {one["type"]: one["status"] for one in pod["status"]["conditions"]}
    return bool(conditions["Ready"] == "True")
