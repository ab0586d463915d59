"""Define the kinds of objects that the operator reads and writes, with their API paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from plimsoll_api.names import (
    API_GROUP,
    CRD_VERSION,
    INCIDENT_KIND,
    INCIDENT_PLURAL,
    POLICY_KIND,
    POLICY_LABEL,
    POLICY_PLURAL,
    SERVICE_KIND,
    SERVICE_LABEL,
    SERVICE_PLURAL,
)
from plimsoll_api.workloads import LWS_API, LWS_KIND
from plimsoll_operator.render.names import OWNED_SELECTOR, make_slot_names

Object = dict[str, Any]
_Model = TypeVar("_Model", bound=BaseModel)


class Key(NamedTuple):
    """Identity of an InferenceService or SupervisionPolicy."""

    namespace: str
    name: str
    kind: str = SERVICE_KIND

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" + (" (policy)" if self.kind == POLICY_KIND else "")

    def make_slot_names(self, count: int) -> tuple[str, ...]:
        """Return the names of the first ``count`` slot Leases of the service."""
        return make_slot_names(self.name, count)


class Ref(NamedTuple):
    """Identity of an object within the namespace of its service or policy."""

    kind: str
    name: str


@dataclass(frozen=True)
class Kind:
    """Kind of object that the operator reads or writes.

    Attributes:
        selector, fields: Label and field selectors that restrict lists and watches to the
            operator's objects.
        watched: False for a kind that a cluster may lack. If the cluster has the kind, the operator
            lists it at each resync.
        page: The number of objects in a page of a list.
        prerequisites: The kinds that must be installed before an object of this kind is created.

    """

    kind: str
    group: str
    version: str
    plural: str
    selector: str = OWNED_SELECTOR
    watched: bool = True
    page: int = 200
    fields: str = ""
    prerequisites: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of objects of this kind."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def group_path(self) -> str:
        """URL path of the kind's API group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def crd_name(self) -> str:
        """Name of the kind's CustomResourceDefinition."""
        return f"{self.plural}.{self.group}"

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the URL path of an object or, without ``name``, of a list.

        Without ``namespace``, the path is for all namespaces.
        """
        parts = [self.group_path]
        if namespace:
            parts += ["namespaces", namespace]
        parts += [self.plural, *filter(None, (name, subresource))]
        return "/".join(parts)


SERVICE = Kind(SERVICE_KIND, API_GROUP, CRD_VERSION, SERVICE_PLURAL, "")
INCIDENT = Kind(INCIDENT_KIND, API_GROUP, CRD_VERSION, INCIDENT_PLURAL, "", page=20)
"""Kind LeakIncident; 20 incidents of the maximum size have less than 1 MiB."""
POLICY = Kind(POLICY_KIND, API_GROUP, CRD_VERSION, POLICY_PLURAL, "")
DEFINED_KINDS = (SERVICE, INCIDENT, POLICY)
"""Kinds of Plimsoll's own CustomResourceDefinitions."""

POD = Kind("Pod", "", "v1", "pods")
EVENT = Kind("Event", "", "v1", "events", "")
CLAIM = Kind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims", "")
RESOURCE_CLAIM = Kind("ResourceClaim", "resource.k8s.io", "v1", "resourceclaims", "")
RESOURCE_SLICE = Kind("ResourceSlice", "resource.k8s.io", "v1", "resourceslices", "")
LEASE = Kind("Lease", "coordination.k8s.io", "v1", "leases")
OWNED_KINDS = (
    Kind("ServiceAccount", "", "v1", "serviceaccounts"),
    Kind("Role", "rbac.authorization.k8s.io", "v1", "roles"),
    Kind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings"),
    Kind("ConfigMap", "", "v1", "configmaps"),
    LEASE,
    Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
    Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
    Kind("Service", "", "v1", "services"),
    Kind("ControllerRevision", "apps", "v1", "controllerrevisions"),
    Kind("Deployment", "apps", "v1", "deployments"),
    Kind(LWS_KIND, LWS_API, "v1", "leaderworkersets", watched=False),
    Kind("HorizontalPodAutoscaler", "autoscaling", "v2", "horizontalpodautoscalers"),
    Kind("PodMonitor", "monitoring.coreos.com", "v1", "podmonitors", watched=False),
    Kind("PrometheusRule", "monitoring.coreos.com", "v1", "prometheusrules", watched=False),
    Kind("ScaledObject", "keda.sh", "v1alpha1", "scaledobjects", watched=False),
    Kind(
        "InferencePool",
        "inference.networking.k8s.io",
        "v1",
        "inferencepools",
        watched=False,
        prerequisites=("HTTPRoute",),
    ),
    Kind(
        "HTTPRoute",
        "gateway.networking.k8s.io",
        "v1",
        "httproutes",
        watched=False,
        prerequisites=("InferencePool",),
    ),
)
"""Kinds of objects that the operator creates, reverts and deletes."""

LEADER_WORKER_SET = next(kind for kind in OWNED_KINDS if kind.kind == LWS_KIND)
OPTIONAL_KINDS = tuple(kind for kind in OWNED_KINDS if not kind.watched)
WATCHED_KINDS = (SERVICE, POLICY, INCIDENT, POD, *(kind for kind in OWNED_KINDS if kind.watched))
KINDS_BY_NAME = {kind.kind: kind for kind in (*WATCHED_KINDS, *OPTIONAL_KINDS)}


def make_ref(item: Object) -> Ref:
    """Return the kind and name of ``item``."""
    return Ref(item["kind"], item["metadata"]["name"])


def get_owner_uid(item: Object) -> str | None:
    """Return the UID of the object's controller; None if it has none."""
    for owner in item["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner.get("uid"))
    return None


def find_key(item: Object) -> Key | None:
    """Return the key of the service or policy to which ``item`` belongs, or None."""
    meta = item["metadata"]
    namespace = meta.get("namespace") or ""
    if item["kind"] in (SERVICE.kind, POLICY.kind):
        return Key(namespace, meta["name"], item["kind"])
    if item["kind"] == INCIDENT.kind:
        policy, workload = item["spec"].get("policyRef"), item["spec"].get("workloadRef")
        if policy:
            return Key(namespace, policy["name"], POLICY.kind)
        if workload and workload["kind"] == SERVICE.kind:
            return Key(namespace, workload["name"])
    for owner in meta.get("ownerReferences") or ():
        if owner.get("kind") in (SERVICE.kind, POLICY.kind):
            return Key(namespace, owner["name"], owner["kind"])
    labels = meta.get("labels") or {}
    for label, kind in ((POLICY_LABEL, POLICY.kind), (SERVICE_LABEL, SERVICE.kind)):
        if labels.get(label):
            return Key(namespace, labels[label], kind)
    return None


class InvalidSpecError(ValueError):
    """Raised for a spec that cannot be rendered; the message names each invalid field.

    ``reason`` is the CamelCase reason for the conditions.
    """

    reason = "InvalidSpec"


class MissingApiError(InvalidSpecError):
    """Raised for a spec that needs a kind that the cluster does not serve."""

    reason = "APINotInstalled"


def parse_object(model: type[_Model], item: Object) -> _Model:
    """Parse an object as ``model``, ignoring its status. Raises InvalidSpecError."""
    without_status = {key: value for key, value in item.items() if key != "status"}
    try:
        return model.model_validate(without_status)
    except ValidationError as error:
        problems = (
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        )
        raise InvalidSpecError("; ".join(problems)) from None
