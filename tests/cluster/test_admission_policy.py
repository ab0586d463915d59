"""A supervisor's token writes incidents of its own pod and of no other, on a real API server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll_operator.reconcile import parse
from plimsoll_operator.render import rbac
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, namespace

POLICY = Path(__file__).parents[2] / "config" / "admission-policy.yaml"
Write = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def kube(cluster: Lab) -> Iterator[Kube]:
    """A namespace with two services' accounts and a pod each, under the policy."""
    cluster.kube("apply", "-f", str(POLICY))
    with namespace(cluster.kube) as kube:
        for service in ("qwen", "llama"):
            kube.apply(*account(kube, service), pod(service))
        yield kube
    cluster.kube("delete", "-f", str(POLICY))


def account(kube: Kube, name: str) -> list[dict[str, Any]]:
    service = parse(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": kube.namespace},
            "spec": {"model": {"uri": "file:///m"}},
        }
    )
    return [rbac.service_account(service), rbac.role(service), rbac.role_binding(service)]


def pod(service: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{service}-0"},
        "spec": {
            "serviceAccountName": f"{service}-supervisor",
            "nodeSelector": {"plimsoll.dev/no-node": "true"},
            "containers": [{"name": "engine", "image": "none"}],
        },
    }


def incident(pod: str, service: str = "qwen", name: str = "incident") -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LeakIncident",
        "metadata": {"name": name},
        "spec": {
            "service": service,
            "pod": pod,
            "container": "engine",
            "epoch": "b:1",
            "openedAt": "2026-01-01T00:00:00Z",
            "kind": "HostGrowth",
        },
    }


def writer(kube: Kube, folder: Path, *bound: str) -> Write:
    """Writes as qwen's supervisor, with a token that is bound to a pod or to none."""
    objects = ["--bound-object-kind=Pod", f"--bound-object-name={bound[0]}"] if bound else []
    token = kube("create", "token", "qwen-supervisor", *objects).strip()
    config = yaml.safe_load(kube.kubeconfig.read_text())
    config["users"] = [{"name": "supervisor", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "supervisor"
    file = folder / f"kubeconfig-{'-'.join(bound)}"
    file.write_text(yaml.safe_dump(config))

    def write(item: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
        command = [*kube.kubectl, f"--kubeconfig={file}", f"-n={kube.namespace}"]
        return subprocess.run(
            [*command, "apply", "--server-side", "-f", "-", *more],
            input=json.dumps(item),
            capture_output=True,
            text=True,
            timeout=60,
        )

    return write


def test_only_incidents_of_the_own_pod(kube: Kube, tmp_path: Path) -> None:
    own, unbound = writer(kube, tmp_path, "qwen-0"), writer(kube, tmp_path)

    def refused(done: subprocess.CompletedProcess[str], said: str) -> bool:
        return done.returncode != 0 and said in done.stderr

    # A policy is in force a moment after it was made.
    other = incident("llama-0", name="other")
    eventually(lambda: refused(own(other), "llama-0 is not the pod of this token"), "in force")
    assert refused(own(other), "(qwen-0)")
    assert refused(own(incident("qwen-0", "llama", "x")), "spec.service llama is not the service")
    assert refused(unbound(incident("qwen-0", name="y")), "it is bound to none")
    assert kube.list("leakincidents") == []

    done = own(incident("qwen-0"))
    assert done.returncode == 0, done.stderr
    status = {**incident("qwen-0"), "status": {"phase": "Open"}}
    del status["spec"]
    done = own(status, "--subresource=status")
    assert done.returncode == 0, done.stderr
    assert (kube.get("leakincident", "incident") or {})["status"]["phase"] == "Open"
    # What somebody else may write about another pod, this token may not touch either.
    kube.apply(incident("llama-0", "llama", "theirs"))
    theirs = {**incident("llama-0", "llama", "theirs"), "status": {"phase": "Resolved"}}
    del theirs["spec"]
    assert refused(own(theirs, "--subresource=status"), "is not the pod of this token")
