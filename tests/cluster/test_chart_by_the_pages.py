"""The pages' commands with Helm, word for word: installed, with the webhook, and then removed.

Afterwards the cluster has nothing of ours.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.tools.blocks import ROOT, blocks
from tests.cluster.operator.test_adopt import DEPLOYMENT
from tests.cluster.test_chart_release import applied
from tests.lab.helm import RELEASE
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, new_lab
from tests.lab.operator import Operator

SYSTEM = "plimsoll-system"
HERE = f"tests/cluster/{Path(__file__).name}"
INSTALL, WEBHOOK, *COMMANDS = (
    one.text
    for page in ("quickstart", "adopt", "uninstall")
    for one in blocks(ROOT / "docs" / f"{page}.md", "sh")
    if one.run == HERE
)
GONE_S = 90.0
"""The garbage collector looks for new kinds each 30 s only."""
KINDS = (
    "role", "rolebinding", "clusterrole", "clusterrolebinding", "configmap", "lease", "service",
    "serviceaccount", "deployment", "secret", "mutatingwebhookconfiguration",
    "validatingadmissionpolicy", "validatingadmissionpolicybinding", "crd", "poddisruptionbudget",
)  # fmt: skip


@pytest.fixture
def own(cluster: Lab) -> Iterator[Lab]:
    """A control plane for one test: the definitions are deleted in the end."""
    lab = new_lab(node=False)
    lab.start(crds=False)
    try:
        yield lab
    finally:
        lab.stop()


def supervised() -> dict[str, Any]:
    """A Deployment whose pods have a supervisor of the policy."""
    made: dict[str, Any] = copy.deepcopy(DEPLOYMENT)
    template = made["spec"]["template"]
    template["metadata"]["labels"]["plimsoll.dev/policy"] = "engines"
    sidecar = template["spec"]["containers"][0] | {"name": "supervisor", "restartPolicy": "Always"}
    template["spec"]["initContainers"] = [sidecar]
    return made


def ours(kube: Kube) -> list[str]:
    """Objects of any namespace that have our name, our labels, or an owner of ours."""
    found = []
    for kind in KINDS:
        listed: dict[str, Any] = json.loads(kube("get", kind, "-A", "-o", "json"))
        for one in listed["items"]:
            if "plimsoll" in json.dumps(one["metadata"]):
                found.append(f"{kind}/{one['metadata']['name']}")
    return found


@pytest.mark.timeout(300)
def test_the_page_leaves_nothing(own: Lab, helm: str, tmp_path: Path) -> None:
    admin = own.kube
    kube = Kube(admin.kubectl, admin.kubeconfig, "default")
    system = Kube(admin.kubectl, admin.kubeconfig, SYSTEM)
    assert "helm install" in INSTALL
    assert "helm upgrade --install" in WEBHOOK
    _run(INSTALL, own, helm)
    assert kube.get("mutatingwebhookconfiguration", f"{RELEASE}-webhook") is None
    _run(WEBHOOK, own, helm)
    assert kube.get("mutatingwebhookconfiguration", f"{RELEASE}-webhook")
    policy = yaml.safe_load((ROOT / "examples" / "supervision-policy.yaml").read_text())
    eventually(lambda: applied(kube, policy), "our kinds are served")
    kube.apply(yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text()), supervised())
    operator = Operator(
        _account(system, tmp_path), "default", f"--leader-election={SYSTEM}/{RELEASE}"
    )
    try:
        eventually(lambda: kube.get("role", "engines.policy"), "the policy has its Role", 60)
        eventually(lambda: kube.get("deployment", "tiny"), "the service has its objects")
        assert system.get("lease", RELEASE)
        *before, uninstall, definitions = COMMANDS
        assert all(deed in "".join(before) for deed in ("delete plsp", "rollout", "delete plinf"))
        for command in before:
            _run(command, own, helm)
        eventually(lambda: kube.get("role", "engines.policy") is None, "the Role is gone", GONE_S)
        eventually(lambda: kube.get("deployment", "tiny") is None, "the objects are gone", GONE_S)
    finally:
        stopped = operator.stop()  # as the kubelet does when the Deployment is gone
    assert stopped == 0
    lease = system.get("lease", RELEASE) or {}
    assert not lease["spec"].get("holderIdentity"), "it is released"
    _run(uninstall, own, helm)
    _run(definitions, own, helm)
    kube("delete", "deployment", "vllm")
    eventually(lambda: ours(kube) == [], "nothing is left", GONE_S)


def _account(system: Kube, folder: Path) -> Path:
    """A kubeconfig of the account that the chart made for the operator."""
    config = yaml.safe_load(system.kubeconfig.read_text())
    token = system("create", "token", RELEASE, "--duration=1h").strip()
    config["users"] = [{"name": "operator", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "operator"
    config["current-context"] = config["contexts"][0]["name"]
    target = folder / "kubeconfig"
    target.write_text(yaml.safe_dump(config))
    target.chmod(0o600)
    return target


def _run(script: str, lab: Lab, helm: str) -> None:
    tools = os.pathsep.join([str(lab.tools(helm=Path(helm))), os.environ["PATH"]])
    env = {**os.environ, "KUBECONFIG": str(lab.kubeconfig), "PATH": tools}
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script], env=env, cwd=ROOT, timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
