"""The Service through which clients reach the replicas."""

from __future__ import annotations

from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.render import names

PORT = 80


def service_object(service: InferenceService) -> dict[str, Any]:
    """Build the ClusterIP Service in front of the ready replicas."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service.metadata.name},
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(service.metadata.name),
            "ports": [{"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def headless_service(service: InferenceService) -> list[dict[str, Any]]:
    """At most one object: by its name a client finds the address of each ready replica."""
    if not service.spec.service.headless:
        return []
    base = service_object(service)
    spec: dict[str, Any] = base["spec"] | {"clusterIP": "None"}
    return [base | {"metadata": {"name": names.replicas(service.metadata.name)}, "spec": spec}]


def url(service: InferenceService) -> str:
    """Where the OpenAI API answers inside the cluster."""
    return f"http://{service.metadata.name}.{service.metadata.namespace}.svc"
