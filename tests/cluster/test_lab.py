"""The lab itself: a control plane that behaves like one."""

from __future__ import annotations

from tests.lab.kube import eventually
from tests.lab.lab import Lab, namespace

DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web"},
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "web", "image": "localhost/web:1"}]},
        },
    },
}


def test_a_deployment_gets_its_pods_and_the_collector_removes_them(cluster: Lab) -> None:
    with namespace(cluster.kube) as kube:
        kube.apply(DEPLOYMENT)
        eventually(lambda: len(kube.list("pods", "app=web")) == 2, "two pods are made")
        kube("delete", "deployment", "web")
        eventually(lambda: not kube.list("pods", "app=web"), "the pods are collected")


def test_a_restricted_namespace_refuses_a_pod_that_asks_for_too_much(cluster: Lab) -> None:
    with namespace(cluster.kube, restricted=True) as kube:
        done = kube.run("run", "pod", "--image=localhost/web:1")
    assert done.returncode != 0
    assert "violates PodSecurity" in done.stderr


def test_our_kinds_are_served(cluster: Lab) -> None:
    kinds = cluster.kube("api-resources", "--api-group=plimsoll.dev", "-o", "name").split()
    assert sorted(kinds) == [
        "inferenceservices.plimsoll.dev",
        "leakincidents.plimsoll.dev",
        "supervisionpolicies.plimsoll.dev",
    ]
