"""Names, labels and annotations of what the operator makes for an InferenceService."""

from __future__ import annotations

from plimsoll_api.names import ENGINE_CONTAINER, OPERATOR, SERVICE_LABEL, SUPERVISOR_CONTAINER

MANAGER = OPERATOR
"""Field manager of every write, and value of the managed-by label."""

MANAGED_BY = "app.kubernetes.io/managed-by"
OWNED_SELECTOR = f"{MANAGED_BY}={MANAGER}"

ENGINE, SUPERVISOR = ENGINE_CONTAINER, SUPERVISOR_CONTAINER
PROBE = "plimsoll-probe"


def selector(service: str) -> dict[str, str]:
    """Labels that choose the service's pods. Never changes: a Deployment's selector cannot."""
    return {SERVICE_LABEL: service}


def labels(service: str) -> dict[str, str]:
    """Labels of everything that belongs to ``service``."""
    return selector(service) | {
        MANAGED_BY: MANAGER,
        "app.kubernetes.io/name": "inference-service",
        "app.kubernetes.io/instance": service,
    }


def supervisor(service: str) -> str:
    """Name of the ConfigMap, ServiceAccount, Role and RoleBinding of the supervisors."""
    return f"{service}-supervisor"


def replicas(service: str) -> str:
    """Name of the headless Service."""
    return f"{service}-replicas"


def slot(service: str, index: int) -> str:
    """Name of one restart-slot Lease."""
    return f"{service}-restart-{index}"


def slots(service: str, count: int) -> tuple[str, ...]:
    """Names of the service's restart-slot Leases."""
    return tuple(slot(service, index) for index in range(count))


def revision(service: str, pod_hash: str) -> str:
    """Name of the ControllerRevision that pins a pod template."""
    return f"{service}-{pod_hash}"
