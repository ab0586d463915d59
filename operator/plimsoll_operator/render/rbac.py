"""Identity and permissions of a service's supervisors: what they use, in their namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import API_GROUP
from plimsoll_api.names import INCIDENT_PLURAL as PLURAL
from plimsoll_operator.render import names

RBAC = "rbac.authorization.k8s.io"


def service_account(service: InferenceService) -> dict[str, Any]:
    """Build the identity of the pods; only the supervisor's container gets its token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": names.supervisor(service.metadata.name)},
        "automountServiceAccountToken": False,
    }


def role(service: InferenceService, held: Sequence[str] = ()) -> dict[str, Any]:
    """Incidents and events, the readiness of the neighbours, and the service's own slots.

    ``held`` names slots that are no longer wanted and still held: their holders give them back.
    """
    slots = names.slots(service.metadata.name, service.spec.supervision.max_unavailable)
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "Role",
        "metadata": {"name": names.supervisor(service.metadata.name)},
        "rules": [
            _rule(API_GROUP, [PLURAL], ["create", "get", "patch"]),
            _rule(API_GROUP, [f"{PLURAL}/status"], ["get", "patch"]),
            _rule("", ["events"], ["create", "patch"]),
            _rule("discovery.k8s.io", ["endpointslices"], ["list"]),
            _rule("coordination.k8s.io", ["leases"], ["get", "update"])
            | {"resourceNames": [*slots, *sorted(set(held) - set(slots))]},
        ],
    }


def role_binding(service: InferenceService) -> dict[str, Any]:
    """Bind the role to the service account."""
    name = names.supervisor(service.metadata.name)
    namespace = service.metadata.namespace
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }


def _rule(group: str, resources: list[str], verbs: list[str]) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}
