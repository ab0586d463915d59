"""``make cluster`` and ``make cluster-down``: chart and examples, as a person uses them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from docs.tools.blocks import blocks
from tests.lab import __main__ as by_hand
from tests.lab import binaries
from tests.lab.helm import CHART, RELEASE, Helm
from tests.lab.images import ROOT
from tests.lab.kube import Kube, eventually
from tests.lab.slot import Slot


@pytest.fixture
def kube(node_tier: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kube]:
    """A lab beside the one that the person at this machine may have up."""
    state = tmp_path / "up.json"
    monkeypatch.setattr(by_hand, "state_file", lambda: state)
    try:
        assert by_hand.up() == 0
        said = json.loads(state.read_text())
        yield Kube([f"{said['path']}/kubectl"], Path(said["kubeconfig"]))
    finally:
        by_hand.down()
    assert not Slot(said["index"]).home.exists()


@pytest.mark.long
def test_the_chart_and_the_examples_work_as_they_are(
    kube: Kube, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no DNS in the lab: neither the operator's watches nor the chart's test need it."""
    assert by_hand.status() == 0
    assert f"export KUBECONFIG={kube.kubeconfig}" in capsys.readouterr().out
    for example in ("tiny", "leaky"):
        kube("apply", "-f", str(ROOT / "examples" / f"{example}.yaml"))
    eventually(lambda: kube.run("wait", "plinf", "--all", "--for=condition=Ready", "--timeout=60s")
               .returncode == 0, "the examples are ready", 300)  # fmt: skip
    address = (kube.get("service", "tiny") or {})["spec"]["clusterIP"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

    def answered() -> bool:
        try:
            url = f"http://{address}/v1/chat/completions"
            return httpx.post(url, json=body, timeout=10, trust_env=False).is_success
        except httpx.HTTPError:  # the Service's address is forwarded a moment after it is ready
            return False

    eventually(answered, "a chat completion through the Service")
    story = first_incident(kube, "quickstart.md", "plimsoll bench")
    assert "worker" in story
    system = replace(kube, namespace=by_hand.SYSTEM)
    release = Helm(binaries.helm(max(binaries.HELM)), system)
    adopt(kube, release)
    story = first_incident(kube, "adopt.md", "kubectl exec")
    assert "HostGrowth" in story
    assert "Succeeded" in release("test", RELEASE, "--timeout=1m")
    (operator,) = system.list("pods", "app.kubernetes.io/component=operator")
    assert operator["spec"]["containers"][0]["image"].startswith("localhost/plimsoll-operator")


def adopt(kube: Kube, release: Helm, chart: Path = CHART) -> None:
    """docs/adopt.md on this cluster, from its webhook to the supervised stand-in."""
    flags = ("--reset-then-reuse-values", "--set=webhook.enabled=true", "--wait", "--timeout=2m")
    release("upgrade", "--install", RELEASE, str(chart), *flags)
    standin = ROOT / "tests" / "integration" / "standin_external.py"
    kube("create", "configmap", "standin", f"--from-file={standin}")
    kube("apply", "-f", str(ROOT / "examples" / "standin-vllm.yaml"))
    kube("rollout", "status", "deployment/vllm", "--timeout=120s")
    kube("apply", "-f", str(ROOT / "examples" / "supervision-policy.yaml"))

    def supervised() -> bool:
        kube("rollout", "restart", "deployment/vllm")
        kube("rollout", "status", "deployment/vllm", "--timeout=120s")
        return len(kube.list("pods", "plimsoll.dev/policy=engines")) >= 2

    eventually(supervised, "new pods have a supervisor", 180)
    eventually(
        lambda: ((kube.get("plsp", "engines") or {}).get("status") or {}).get("supervised") == 2,
        "the status counts them",
        60,
    )


def first_incident(kube: Kube, page: str, word: str) -> str:
    """Run a page's block with a word; return what ``plimsoll incidents`` and ``explain`` say."""
    (block,) = [one.text for one in blocks(ROOT / "docs" / page, "sh")
                if one.run == "tests/node/test_lab_by_hand.py" and word in one.text]  # fmt: skip
    cause, _, told = block.partition("plimsoll incidents\n")
    before = {one["metadata"]["name"] for one in kube.list("leakincidents")}
    with shell(kube, f"{cause}wait") as load:

        def opened() -> set[str]:
            assert load.poll() in (None, 0), load.communicate()
            return {one["metadata"]["name"] for one in kube.list("leakincidents")} - before

        (name, *_) = sorted(eventually(opened, "an incident", 180))
        with shell(kube, "plimsoll incidents\n" + told.replace("INCIDENT", name)) as telling:
            story, _ = telling.communicate(timeout=120)
        assert telling.returncode == 0, story
    return story


@contextlib.contextmanager
def shell(kube: Kube, script: str) -> Iterator[subprocess.Popen[str]]:
    """Run commands as a person does; what still runs of them in the end is ended."""
    folders = (Path(sys.executable).parent, Path(kube.kubectl[0]).parent)
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    process = subprocess.Popen(
        ["bash", "-eo", "pipefail", "-c", script], cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"KUBECONFIG": str(kube.kubeconfig), "PATH": path},
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
