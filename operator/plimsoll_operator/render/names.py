"""Build the names, labels and owner references of the operator's objects."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from plimsoll_api.inferenceservice import InferenceService, ObjectMeta
from plimsoll_api.names import (
    API_VERSION,
    APPLIED_HASH_ANNOTATION,
    ENGINE_CONTAINER,
    OPERATOR_NAME,
    SERVICE_LABEL,
    SUPERVISOR_CONTAINER,
)
from plimsoll_api.workloads import LWS_WORKER_LABEL

FIELD_MANAGER = OPERATOR_NAME
"""Field manager of all writes, and value of the label ``app.kubernetes.io/managed-by``."""

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
OWNED_SELECTOR = f"{MANAGED_BY_LABEL}={FIELD_MANAGER}"

OWNED_FIELDS_KEY = "ownedFields"
"""Key that replaces ``managedFields`` in a cached object's metadata: a hash of the fields that
Plimsoll owns."""

ENGINE, SUPERVISOR = ENGINE_CONTAINER, SUPERVISOR_CONTAINER
PROBE = "plimsoll-probe"


def make_selector(service: str) -> dict[str, str]:
    """Return the labels that select all pods of a service; they must never change."""
    return {SERVICE_LABEL: service}


def make_serving_selector(service: InferenceService) -> dict[str, str]:
    """Return the labels that select the pods that serve requests; in groups, only leaders do."""
    leaders = {LWS_WORKER_LABEL: "0"} if service.spec.nodes > 1 else {}
    return make_selector(service.metadata.name) | leaders


def make_labels(service: str) -> dict[str, str]:
    """Return the labels of all objects that belong to ``service``."""
    return make_selector(service) | {
        MANAGED_BY_LABEL: FIELD_MANAGER,
        "app.kubernetes.io/name": "inference-service",
        "app.kubernetes.io/instance": service,
    }


def make_supervisor_name(service: str) -> str:
    """Return the name of the supervisors' ConfigMap, ServiceAccount, Role and RoleBinding."""
    return f"{service}-supervisor"


def make_headless_service_name(service: str) -> str:
    """Return the name of a service's headless Service."""
    return f"{service}-replicas"


def make_group_set_name(service: InferenceService) -> str:
    """Return the name of the LeaderWorkerSet, which its headless Service has, too."""
    return f"{service.metadata.name}-lws"


def make_slot_name(service: str, index: int) -> str:
    """Return the name of a slot Lease."""
    return f"{service}-restart-{index}"


def make_slot_names(service: str, count: int) -> tuple[str, ...]:
    """Return the names of the service's slot Leases."""
    return tuple(make_slot_name(service, index) for index in range(count))


def make_revision_name(service: str, pod_hash: str) -> str:
    """Return the name of the ControllerRevision that stores a pod template."""
    return f"{service}-{pod_hash}"


def compute_digest(value: Any) -> str:
    """Return a stable hash of a JSON value: 10 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def add_owner(
    item: dict[str, Any], kind: str, owner: ObjectMeta, labels: dict[str, str]
) -> dict[str, Any]:
    """Return ``item`` with ``labels`` and with ``owner``, an object of ``kind``, as controller."""
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
    full["metadata"]["annotations"] = {
        **meta.get("annotations", {}),
        APPLIED_HASH_ANNOTATION: compute_digest(full),
    }
    return full
