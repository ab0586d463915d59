"""The chart's whole life on a real API server: install, upgrade, rollback, uninstall."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.helm import CHART, RELEASE, Helm
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, new_lab
from tests.lab.operator import Operator, account_kubeconfig, operator_kubeconfig

ROOT = Path(__file__).parents[2]
CRDS = (
    "inferenceservices.plimsoll.dev",
    "leakincidents.plimsoll.dev",
    "supervisionpolicies.plimsoll.dev",
)


TAKE = "--take-ownership"
"""Definitions stay when a release goes; the next one takes them over."""


@pytest.fixture(scope="module")
def own(cluster: Lab) -> Iterator[Lab]:
    """A control plane of these tests' own, without our definitions, because the chart installs
    them. ``cluster`` says what is missing to start one."""
    lab = new_lab(node=False)
    lab.start(crds=False)
    try:
        yield lab
    finally:
        lab.stop()


def test_the_operator_waits_for_its_definitions(own: Lab, tmp_path: Path) -> None:
    """Applied in any order: without its kinds it is up, not ready, and says why."""
    own.kube("delete", "--ignore-not-found", "crd", *CRDS)
    account = operator_kubeconfig(own.kube, tmp_path / "kubeconfig")
    operator = Operator(account, "default", ready=False, warm=True)
    try:
        eventually(operator.healthy, "the operator is up")
        eventually(lambda: "waiting for" in operator.log.read_text(), "it says so")
        assert not operator.ready()
        own.install_crds()
        eventually(operator.ready, "the operator goes on")
        said = [json.loads(line) for line in operator.log.read_text().splitlines()]
    finally:
        assert operator.stop() == 0, operator.log.read_text()
    waiting = [line["message"] for line in said if "waiting for" in line["message"]]
    assert waiting[0].startswith(f"waiting for the CRDs of {', '.join(CRDS)}")
    assert len(waiting) <= len(CRDS), "it is not said again and again"


def test_install_upgrade_rollback_uninstall(own: Lab, helm: str) -> None:
    admin = own.kube
    kube = Kube(admin.kubectl, admin.kubeconfig, f"chart-{uuid.uuid4().hex[:8]}")
    kube("create", "namespace", kube.namespace)
    kube("label", "namespace", kube.namespace, "pod-security.kubernetes.io/enforce=restricted")
    release = Helm(helm, kube)
    values: dict[str, Any] = {"images": {"tag": "one"}, "webhook": {"enabled": True}}
    said = release("install", RELEASE, str(CHART), TAKE, values=values)
    assert "helm -n" in said
    assert kube.get("mutatingwebhookconfiguration", f"{RELEASE}-webhook")
    assert kube.get("service", f"{RELEASE}-webhook")
    assert image(kube).endswith(":one")
    eventually(lambda: kube.list("pods", "app.kubernetes.io/component=operator"), "a pod")
    kube.established("inferenceservices.plimsoll.dev")
    service = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    eventually(lambda: applied(kube, service), "our kinds are served")
    account = f"system:serviceaccount:{kube.namespace}:{RELEASE}"
    for right in (
        "list inferenceservices",
        "create deployments.apps",
        "create leases.coordination.k8s.io",
    ):
        assert may(kube, account, *right.split()), right
    assert not may(kube, account, "list", "secrets")

    values = {"images": {"tag": "two"}, "replicas": 2}
    release("upgrade", RELEASE, str(CHART), values=values)
    assert image(kube).endswith(":two")
    assert kube.get("pdb", RELEASE)
    assert kube.get("mutatingwebhookconfiguration", f"{RELEASE}-webhook") is None

    release("rollback", RELEASE, "1")
    assert image(kube).endswith(":one")
    assert kube.get("pdb", RELEASE) is None
    assert kube.get("plinf", "tiny"), "services live through all of it"

    release("uninstall", RELEASE)
    assert kube.get("deployment", RELEASE) is None
    assert kube.get("validatingadmissionpolicy", "incidents-of-own-pod.plimsoll.dev") is None
    assert kube.get("clusterrole", RELEASE) is None
    assert kube.get("plinf", "tiny"), "crds.keep keeps services"


def test_two_releases_live_beside_each_other(own: Lab, helm: str, tmp_path: Path) -> None:
    """Each in its namespace with its Roles and no more; definitions and policies are a third's."""
    suffix = uuid.uuid4().hex[:6]
    names = tuple(f"{team}-{suffix}" for team in ("objects", "red", "blue"))
    spaces = {name: Kube(own.kube.kubectl, own.kube.kubeconfig, name) for name in names}
    helms = {name: Helm(helm, space) for name, space in spaces.items()}
    for space in spaces.values():
        space("create", "namespace", space.namespace)
    said = helms[names[0]](
        "install", "objects", str(CHART), TAKE, values={"clusterObjects": "Only"}
    )
    assert "no operator" in said
    assert spaces[names[0]].list("deployments,services,serviceaccounts", "helm.sh/chart") == []
    own.kube.established(*CRDS)

    service = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    operators = []
    try:
        for name in names[1:]:
            space = spaces[name]
            values = {"clusterObjects": "Exclude", "namespaces": [name]}
            said = helms[name]("install", name, str(CHART), values=values)
            assert "WARNING" not in said
            account = account_kubeconfig(space, f"{name}-plimsoll", tmp_path / name)
            operators.append(Operator(account, name, *chart_flags(space, name), warm=True))
            eventually(lambda at=space: applied(at, service), "our kinds are served")  # type: ignore[misc]
        for name in names[1:]:
            eventually(lambda at=spaces[name]: at.get("deployment", "tiny"), "it is made")  # type: ignore[misc]
        accounts = [f"system:serviceaccount:{name}:{name}-plimsoll" for name in names[1:]]
        assert may(spaces[names[2]], accounts[1], "create", "deployments.apps")
        assert not may(spaces[names[2]], accounts[0], "list", "inferenceservices")

        overlapping = {"clusterObjects": "Exclude", "namespaces": [names[1]]}
        said = helms[names[0]]("install", "third", str(CHART), values=overlapping)
        assert f"WARNING: release {names[1]} of namespace {names[1]} already watches" in said
        helms[names[0]]("uninstall", "third")

        helms[names[1]]("uninstall", names[1])
        assert own.kube.get("validatingadmissionpolicy", "incidents-of-own-pod.plimsoll.dev")
        assert operators[1].ready()
    finally:
        for operator in operators:
            operator.stop()
        helms[names[0]]("uninstall", "objects")


def chart_flags(kube: Kube, release: str) -> list[str]:
    """Those of the chart's Deployment, except its namespaces and its port."""
    (container,) = (kube.get("deployment", f"{release}-plimsoll") or {})["spec"]["template"][
        "spec"
    ]["containers"]
    own = ("--namespace=", "--http-port=")
    return [flag for flag in container["args"][1:] if not flag.startswith(own)]


def image(kube: Kube) -> str:
    deployment = kube.get("deployment", RELEASE) or {}
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def applied(kube: Kube, manifest: dict[str, Any]) -> bool:
    return kube.run("apply", "-f", "-", stdin=yaml.safe_dump(manifest)).returncode == 0


def may(kube: Kube, account: str, verb: str, resource: str) -> bool:
    return kube.run("auth", "can-i", verb, resource, f"--as={account}").stdout.strip() == "yes"
