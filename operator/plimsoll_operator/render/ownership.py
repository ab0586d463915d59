"""What every object has that the operator makes: a namespace, labels, an owner, its own hash."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import ObjectMeta
from plimsoll_api.names import API_VERSION, APPLIED_HASH
from plimsoll_operator.render.deployment import digest


def owned(
    item: dict[str, Any], kind: str, owner: ObjectMeta, labels: dict[str, str]
) -> dict[str, Any]:
    """Give ``item`` an ``owner`` of ``kind``, and ``labels`` beside its own."""
    meta = item["metadata"]
    reference = {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    full: dict[str, Any] = {
        **item,
        "metadata": {
            **meta,
            "namespace": owner.namespace,
            "labels": meta.get("labels", {}) | labels,
            "ownerReferences": [reference],
        },
    }
    full["metadata"]["annotations"] = {**meta.get("annotations", {}), APPLIED_HASH: digest(full)}
    return full
