"""The command line on a real pod: what doctor sees, and actions by exec, fenced, while a client
streams."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from plimsoll_cli.main import app
from tests.lab.kube import Kube, eventually
from tests.lab.operator import Operator
from tests.node.streams import Streams

SERVICE = "leaky"
READY_S = 180
SELECTOR = f"plimsoll.dev/service={SERVICE}"
QUIET = "request_cycle:payload_bytes=1Ki"
Manifest = Callable[..., dict[str, Any]]


def plimsoll(kube: Kube, *arguments: str) -> Result:
    flags = ["--kubeconfig", str(kube.kubeconfig), "-n", kube.namespace]
    return CliRunner().invoke(app, [*arguments, *flags])


@pytest.mark.long
def test_a_person_trims_restarts_drains_and_resumes(
    kube: Kube, operator: Callable[[], Operator], manifest: Manifest
) -> None:
    operator()
    kube.apply(manifest(QUIET))
    kube("wait", f"plinf/{SERVICE}", "--for=condition=Ready", f"--timeout={READY_S}s")
    (found,) = kube.list("pods", SELECTOR)
    pod, address = found["metadata"]["name"], found["status"]["podIP"]

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

    unasked = plimsoll(kube, "drain", pod)
    assert "Nobody is there to answer: add --yes" in str(unasked.exception)
    drained = plimsoll(kube, "drain", pod, "--yes", "--deadline", "5s")
    assert drained.exit_code == 0, drained.exception or drained.output
    eventually(lambda: not ready(kube), "the drained pod is out of service")
    resumed = plimsoll(kube, "resume", pod, "--yes")
    assert resumed.exit_code == 0, resumed.exception or resumed.output
    eventually(lambda: ready(kube), "the pod is back in service")

    page = httpx.get(f"http://{address}:9464/", timeout=10, trust_env=False)
    assert page.status_code == 200
    assert SERVICE in page.text


def checks(kube: Kube) -> dict[str, dict[str, Any]]:
    """What doctor says, by name."""
    done = plimsoll(kube, "doctor", "--service", SERVICE, "-o", "json")
    sys.stdout.write(done.stdout)
    return {one["name"]: one for one in json.loads(done.stdout)}


def ready(kube: Kube) -> bool:
    (pod,) = kube.list("pods", SELECTOR)
    conditions = {one["type"]: one["status"] for one in pod["status"]["conditions"]}
    return bool(conditions["Ready"] == "True")
