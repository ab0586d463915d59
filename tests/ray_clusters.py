"""RayClusters and their pods as KubeRay makes them, for tests without KubeRay itself."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]
API, KIND = "ray.io", "RayCluster"
DEFINITION = f"rayclusters.{API}"


def definition() -> Document:
    """The kind, whose objects may hold anything."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": KIND, "plural": "rayclusters", "singular": "raycluster"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": DEFINITION},
        "spec": {"group": API, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def cluster(name: str) -> Document:
    """A cluster, of which the tests need only that it owns pods."""
    return {"apiVersion": f"{API}/v1", "kind": KIND, "metadata": {"name": name}}


def pod_of(owner: Document, pod: Document, node: str, name: str) -> Document:
    """``pod`` as KubeRay makes it for ``owner``, an object that is there; ``node`` is the value of
    ``ray.io/node-type``."""
    meta = owner["metadata"]
    labels = {
        "app.kubernetes.io/created-by": "kuberay-operator",
        "app.kubernetes.io/name": "kuberay",
        "ray.io/cluster": meta["name"],
        "ray.io/group": "headgroup" if node == "head" else "gpu",
        "ray.io/identifier": f"{meta['name']}-{node}",
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": node,
    }
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": KIND,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    own = pod.get("metadata") or {}
    return pod | {
        "metadata": own
        | {
            "name": name,
            "labels": (own.get("labels") or {}) | labels,
            "ownerReferences": [reference],
        }
    }
