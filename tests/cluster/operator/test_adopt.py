"""docs/adopt.md, command by command, for a Deployment that is there before the policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools.blocks import ROOT, blocks
from tests.lab.webhook import NAME

PAGE = ROOT / "docs" / "adopt.md"
STEPS = [
    one.text for one in blocks(PAGE, "sh") if one.run == "tests/cluster/operator/test_adopt.py"
]
LISTED_S = 40.0
"""The operator lists the pods of a policy every ten seconds."""
DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "vllm"},
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"app": "vllm"}},
        # No kubelet runs here: a pod that is not ready must not hold the roll-out.
        "strategy": {"type": "Recreate"},
        "template": {
            "metadata": {"labels": {"app": "vllm"}},
            "spec": {
                "securityContext": {
                    "runAsUser": 1000,
                    "runAsNonRoot": True,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": "engine",
                        "image": "vllm/vllm-openai:v0.24.0",
                        "args": ["serve", "org/model"],
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }
                ],
                "nodeSelector": {"plimsoll.dev/no-node": "true"},
            },
        },
    },
}


@pytest.fixture
def shell(kubectl: Any, tmp_path: Path) -> Callable[[str], str]:
    """Runs a block of the page in the test's namespace and returns what it prints."""
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = kubectl.namespace
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": programs}

    def run(text: str) -> str:
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", text],
            cwd=ROOT, capture_output=True, text=True, timeout=120, env=env,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}: {done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_a_deployment_is_adopted(
    kubectl: Any,
    shell: Callable[[str], str],
    flags: tuple[str, ...],
    start: Callable[..., Any],
    eventually: Any,
) -> None:
    look, apply, rollout, incidents, recover, refusals = STEPS
    start(*flags)
    kubectl.apply(DEPLOYMENT)
    eventually(lambda: len(shell(look).splitlines()) == 3)

    assert "supervisionpolicy.plimsoll.dev/engines created" in shell(apply)
    eventually(lambda: counts(kubectl) == (2, 0, 2, 0), LISTED_S)
    row = shell("kubectl get plsp").splitlines()[1].split()
    assert row[:6] == ["engines", "2", "0", "2", "0", "NoPodSupervised"]
    eventually(lambda: (kubectl.get("mutatingwebhookconfiguration", NAME) or {}).get("webhooks"))

    assert "deployment.apps/vllm restarted" in shell(rollout)
    eventually(lambda: counts(kubectl) == (2, 2, 0, 0), LISTED_S)
    found = kubectl.list("pods", "plimsoll.dev/policy=engines")
    assert [[one["name"] for one in pod["spec"]["initContainers"]] for pod in found] == [
        ["supervisor"],
        ["supervisor"],
    ]
    engine = found[0]["spec"]["initContainers"][0]["env"][-1]["value"]
    workload = {"api_group": "apps", "kind": "Deployment", "name": "vllm"}
    assert json.loads(engine)["workload"] == workload

    assert "incidents" in shell(incidents)
    shell(recover)
    eventually(lambda: mode(kubectl) == "Recover", LISTED_S)

    # An image that is no known engine.
    image = '{"spec":{"template":{"spec":{"containers":[{"name":"engine","image":"web"}]}}}}'
    shell("kubectl patch deployment vllm --type=json -p '[{\"op\": \"remove\", "
          "\"path\": \"/spec/template/spec/containers/0/args\"}]'")  # fmt: skip
    shell(f"kubectl patch deployment vllm -p '{image}'")
    eventually(lambda: counts(kubectl) == (2, 0, 0, 2), LISTED_S)
    assert "no container runs vLLM or SGLang (containers: engine)" in shell(refusals)


def counts(kubectl: Any) -> tuple[int | None, ...]:
    status = (kubectl.get("plsp", "engines") or {}).get("status") or {}
    return tuple(
        status.get(key) for key in ("selected", "supervised", "waitingForRestart", "refused")
    )


def mode(kubectl: Any) -> str:
    data = kubectl.get("configmap", "engines.policy")["data"]
    return str(json.loads(data["supervisor.json"])["supervision"]["mode"])
