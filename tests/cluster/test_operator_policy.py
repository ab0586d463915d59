"""The operator does its work under the policy on its account, and a token of it can do no more."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.lab.images import ROOT
from tests.lab.kube import Kube, eventually
from tests.lab.lab import Lab, namespace
from tests.lab.operator import SYSTEM, Operator, account_policy, may_lead, operator_kubeconfig
from tests.lab.webhook import NAME, Webhook

SERVICE = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "tiny"},
    "spec": {"model": {"uri": "file:///m"}},
}
POLICY = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "SupervisionPolicy",
    "metadata": {"name": "engines"},
    "spec": {"selector": {"matchLabels": {"app": "vllm"}}},
}
OURS = {"app.kubernetes.io/managed-by": "plimsoll-operator", "plimsoll.dev/service": "tiny"}


def deployment(name: str, **labels: str) -> dict[str, Any]:
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {"containers": [{"name": "web", "image": "web:1"}]},
    }
    spec = {"selector": {"matchLabels": {"app": name}}, "template": template, "replicas": 0}
    meta = {"name": name, "labels": labels}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}


def config_map(name: str, **meta: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name} | meta}


def role(name: str, **meta: Any) -> dict[str, Any]:
    rule = {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}
    about = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role"}
    return about | {"metadata": {"name": name} | meta, "rules": [rule]}


@pytest.fixture
def kube(cluster: Lab) -> Iterator[Kube]:
    with namespace(cluster.kube) as kube:
        yield kube


def test_an_account_is_under_the_policy_that_was_applied_last(kube: Kube, tmp_path: Path) -> None:
    there = Kube(kube.kubectl, operator_kubeconfig(kube, tmp_path / "before"), SYSTEM)
    kube("apply", "-f", str(ROOT / "config" / "operator-policy.yaml"))
    eventually(lambda: not may_lead(there), "the policy of config/ is in force", 30)

    operator_kubeconfig(kube, tmp_path / "after")
    assert may_lead(there)


def test_the_account_does_its_work_and_nothing_else(kube: Kube, tmp_path: Path) -> None:
    account = operator_kubeconfig(kube, tmp_path / "kubeconfig")
    webhook = Webhook(kube)
    webhook.install()
    lease = f"--leader-election={kube.namespace}/operator"
    operator = Operator(account, kube.namespace, lease, *webhook.flags, warm=True)
    taken = Kube(kube.kubectl, account, kube.namespace)
    try:
        kube.apply(SERVICE, POLICY)
        eventually(lambda: kube.get("deployment", "tiny"), "its objects are made", 60)
        eventually(lambda: kube.get("role", "tiny-supervisor"), "its role, too", 60)
        eventually(
            lambda: (kube.get("mutatingwebhookconfiguration", NAME) or {}).get("webhooks"),
            "configured the webhook", 60,
        )  # fmt: skip
        kube("delete", "configmap", "tiny-supervisor")
        eventually(lambda: kube.get("configmap", "tiny-supervisor"), "it is put back", 60)
        kube("label", "configmap", "tiny-supervisor", "app.kubernetes.io/managed-by-")
        eventually(lambda: OURS.items() <= labels(kube).items(), "so is its label", 60)
        kube.apply(SERVICE | {"spec": SERVICE["spec"] | {"replicas": 2}})  # type: ignore[operator]
        eventually(lambda: read(kube, "deployment", "tiny")["spec"]["replicas"] == 2, "updated", 60)
        refuses(kube, taken)
        restarts(kube, taken)
        webhooks(taken)
        other_addresses(kube, taken, f"https://127.0.0.1:{webhook.port}/pods")
        kube("delete", "supervisionpolicy", "engines")
        assert "account of the operator" not in operator.log.read_text()
    finally:
        assert operator.stop() == 0, operator.log.read_text()
        webhook.remove()
    assert read(kube, "lease", "operator")["spec"]["holderIdentity"] == "", "it gave the Lease back"


def read(kube: Kube, kind: str, name: str) -> dict[str, Any]:
    found = kube.get(kind, name)
    assert found is not None
    return found


def labels(kube: Kube) -> dict[str, str]:
    found: dict[str, str] = read(kube, "configmap", "tiny-supervisor")["metadata"]["labels"]
    return found


def said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr if done.returncode else ""


def refuses(kube: Kube, taken: Kube) -> None:
    """Objects of others can neither be written nor become the operator's."""
    uid = read(kube, "inferenceservice", "tiny")["metadata"]["uid"]
    owner = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "tiny",
        "uid": uid,
        "controller": True,
    }
    kube.apply(deployment("web"), config_map("theirs", labels={"a": "b"}), role("theirs"))
    ours = {"labels": OURS, "ownerReferences": [owner]}
    for item in (
        config_map("new"),
        config_map("new", labels=OURS),
        config_map("new", ownerReferences=[owner]),
        config_map("new", labels=OURS, ownerReferences=[owner | {"controller": False}]),
        config_map("new", labels=OURS, ownerReferences=[owner | {"apiVersion": "apps/v1"}]),
        config_map("theirs", **ours),
        deployment("new", **OURS),
        role("new"),
        role("theirs", **ours),
    ):
        text = json.dumps(item)
        done = taken.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
        assert "the account of the operator may only write objects" in said(done), item
    image = {"spec": {"template": {"spec": {"containers": [{"name": "web", "image": "evil"}]}}}}
    for patch in (image, {"spec": {"replicas": 3}}, {"metadata": ours}):
        done = taken.run("patch", "deployment", "web", "-p", json.dumps(patch))
        assert "the account of the operator may only write objects" in said(done), patch
    for kind, name in (("configmap", "theirs"), ("deployment", "web"), ("role", "theirs")):
        done = taken.run("delete", kind, name)
        assert "the account of the operator may only write objects" in said(done), kind
    # The operator's own next look deletes it: it wants no such ConfigMap.
    text = json.dumps(config_map("made", **ours))
    assert not said(taken.run("apply", "--server-side", "-f", "-", stdin=text))
    eventually(lambda: kube.get("configmap", "made") is None, "what is surplus is deleted", 60)


def restarts(kube: Kube, taken: Kube) -> None:
    """In the workloads of others, it may only start a rolling restart."""
    kubectl, at = "kubectl.kubernetes.io/restartedAt", {"plimsoll.dev/restarted-for": "u/1"}
    template = {"metadata": {"annotations": {kubectl: "2026-01-01T00:00:00Z"}}}
    restart = {"metadata": {"annotations": at}, "spec": {"template": template}}
    assert not said(taken.run("patch", "deployment", "web", "-p", json.dumps(restart)))
    for other in (
        {"metadata": {"annotations": {"a": "b"}}},
        {"spec": {"template": {"metadata": {"annotations": {"a": "b"}}}}},
        {"spec": {"template": {"metadata": {"labels": {"a": "b"}}}}},
    ):
        done = taken.run("patch", "deployment", "web", "-p", json.dumps(other))
        assert "the account of the operator may only write objects" in said(done), other
    found = read(kube, "deployment", "web")["spec"]["template"]
    assert found["metadata"]["annotations"] == template["metadata"]["annotations"]


def other_addresses(kube: Kube, taken: Kube, url: str) -> None:
    """Of a webhook with a URL, not even what begins like it is another address."""
    text = account_policy(url).replace("account-of-", "address-of-")
    kube("apply", "-f", "-", stdin=text)
    try:
        found = read(taken, "mutatingwebhookconfiguration", NAME)["webhooks"][0]

        def put(address: str) -> str:
            patch = {
                "webhooks": [found | {"clientConfig": found["clientConfig"] | {"url": address}}]
            }
            of = ("mutatingwebhookconfiguration", NAME, "--type=merge", "-p", json.dumps(patch))
            return said(taken.run("patch", *of))

        def refused(address: str) -> bool:
            return "ask its own webhook" in put(address)

        for other in (f"{url}.evil.example", f"{url}/../other", "https://127.0.0.1:1/pods"):
            eventually(partial(refused, other), f"{other} is refused", 30)
        assert not put(url)
    finally:
        kube("delete", "-f", "-", stdin=text)


def webhooks(taken: Kube) -> None:
    """In its webhooks, it may only change what they select and trust."""
    kind = "mutatingwebhookconfiguration"
    found = read(taken, kind, NAME)
    assert found["webhooks"]
    for change, text in (
        ({"clientConfig": {"url": "https://evil.example/pods"}}, "ask its own webhook"),
        (
            {"clientConfig": {"service": {"namespace": "a", "name": "b", "path": "/pods"}}},
            "ask its own webhook",
        ),
        ({"name": "other.example.com"}, "ask its own webhook"),
        ({"failurePolicy": "Fail"}, "selectors and caBundle"),
        ({"timeoutSeconds": 30}, "selectors and caBundle"),
        ({"rules": [found["webhooks"][0]["rules"][0] | {"resources": ["secrets"]}]},
         "selectors and caBundle"),
        ({"rules": [found["webhooks"][0]["rules"][0] | {"operations": ["*"]}]},
         "selectors and caBundle"),
    ):  # fmt: skip
        patch = {"webhooks": [found["webhooks"][0] | change]}
        done = taken.run("patch", kind, NAME, "--type=merge", "-p", json.dumps(patch))
        assert text in said(done), change
    selected = {"webhooks": [found["webhooks"][0] | {"objectSelector": {}}]}
    done = taken.run("patch", kind, NAME, "--type=merge", "-p", json.dumps(selected))
    assert not said(done)
