"""The kinds that the operator reads and writes, and where the API server has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from plimsoll_operator.render.names import OWNED_SELECTOR

Object = dict[str, Any]


class Ref(NamedTuple):
    """One object within a service's namespace."""

    kind: str
    name: str


@dataclass(frozen=True)
class Kind:
    """``selector`` limits lists and watches to what the operator made."""

    kind: str
    group: str
    version: str
    plural: str
    selector: str = OWNED_SELECTOR

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """URL path of one object, or of the list of a namespace or of all."""
        root = f"/apis/{self.group}" if self.group else "/api"
        parts = [root, self.version]
        if namespace:
            parts += ["namespaces", namespace]
        parts += [self.plural, *filter(None, (name, subresource))]
        return "/".join(parts)


SERVICE = Kind("InferenceService", "plimsoll.dev", "v1alpha1", "inferenceservices", "")
INCIDENT = Kind("LeakIncident", "plimsoll.dev", "v1alpha1", "leakincidents", "")
POD = Kind("Pod", "", "v1", "pods")
OWNED = (
    Kind("ServiceAccount", "", "v1", "serviceaccounts"),
    Kind("Role", "rbac.authorization.k8s.io", "v1", "roles"),
    Kind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings"),
    Kind("ConfigMap", "", "v1", "configmaps"),
    Kind("Lease", "coordination.k8s.io", "v1", "leases"),
    Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
    Kind("Service", "", "v1", "services"),
    Kind("ControllerRevision", "apps", "v1", "controllerrevisions"),
    Kind("Deployment", "apps", "v1", "deployments"),
)
"""What the renderer makes, of which everything is put back and nothing is left."""

WATCHED = (SERVICE, INCIDENT, POD, *OWNED)
BY_KIND = {kind.kind: kind for kind in WATCHED}


def ref(item: Object) -> Ref:
    """Kind and name of ``item``."""
    return Ref(item["kind"], item["metadata"]["name"])


def owner_uid(item: Object) -> str | None:
    """Uid of the object's controller, None where it has none."""
    for owner in item["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner.get("uid"))
    return None
