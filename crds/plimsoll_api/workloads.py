"""Find a pod's workload, replica, revision and restart slots from its labels and owner references.

No further objects are read. Anyone who may create pods can set labels and owner references, so they
grant no permissions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import msgspec

from plimsoll_api.names import make_policy_object_name
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import SlotScope

APPS_API_GROUP = "apps"
TEMPLATE_HASH_LABEL = "pod-template-hash"
CONTROLLER_HASH_LABEL = "controller-revision-hash"
ROLLOUT_HASH_LABEL = "rollouts-pod-template-hash"
LWS_API, LWS_KIND = "leaderworkerset.x-k8s.io", "LeaderWorkerSet"
LWS_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
LWS_GROUP_LABEL = "leaderworkerset.sigs.k8s.io/group-key"
LWS_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
LWS_WORKER_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
LWS_HASH_LABEL = "leaderworkerset.sigs.k8s.io/template-revision-hash"
DISAGGREGATED_API, DISAGGREGATED_KIND = "disaggregatedset.x-k8s.io", "DisaggregatedSet"
DISAGGREGATED_NAME_LABEL = f"{DISAGGREGATED_API}/name"
DISAGGREGATED_REVISION_LABEL = f"{DISAGGREGATED_API}/revision"
DYNAMO_API, DYNAMO_KIND = "nvidia.com", "DynamoGraphDeployment"
DYNAMO_NAME_LABEL = f"{DYNAMO_API}/dynamo-graph-deployment-name"
DYNAMO_REVISION_LABEL = f"{DYNAMO_API}/dynamo-worker-hash"
KSERVE_API, KSERVE_LLM_KIND = "serving.kserve.io", "LLMInferenceService"
PART_OF_LABEL, PART_OF_KSERVE_LLM = "app.kubernetes.io/part-of", "llminferenceservice"
"""Label of the pods of KServe's LLMInferenceServices."""
KSERVE_LLM_NAME_LABEL = "app.kubernetes.io/name"
RAY_API, RAY_KIND = "ray.io", "RayCluster"
RAY_CLUSTER_LABEL = "ray.io/cluster"
RAY_NODE_TYPE_LABEL = "ray.io/node-type"
RAY_HEAD, RAY_WORKER = "head", "worker"
"""Values of the label ``ray.io/node-type``."""

_MAX_KIND_CHARS, _MAX_NAME_CHARS = 63, 253
_DEFAULT_API_GROUPS = {
    "Deployment": APPS_API_GROUP,
    "StatefulSet": APPS_API_GROUP,
    "DaemonSet": APPS_API_GROUP,
    "ReplicaSet": APPS_API_GROUP,
    "Job": "batch",
    "Rollout": "argoproj.io",
    LWS_KIND: LWS_API,
    RAY_KIND: RAY_API,
    DISAGGREGATED_KIND: DISAGGREGATED_API,
    DYNAMO_KIND: DYNAMO_API,
    KSERVE_LLM_KIND: KSERVE_API,
}
"""Default API groups by kind."""
_REPLICA_SET_CONTROLLERS = (
    (TEMPLATE_HASH_LABEL, APPS_API_GROUP, "Deployment"),
    (ROLLOUT_HASH_LABEL, "argoproj.io", "Rollout"),
)
"""Controllers whose ReplicaSets are named NAME-HASH: the pod label with the hash, the API group
and the kind."""
_GRAPHS = (
    (DISAGGREGATED_NAME_LABEL, DISAGGREGATED_API, DISAGGREGATED_KIND, DISAGGREGATED_REVISION_LABEL),
    (DYNAMO_NAME_LABEL, DYNAMO_API, DYNAMO_KIND, DYNAMO_REVISION_LABEL),
)
"""Controllers that create a role's objects under a new name for each revision: the label with
the controller's name, its API group, its kind, and the label with the revision."""
KV_ROLES = frozenset({PodRole.PREFILL, PodRole.DECODE, PodRole.BOTH})
"""Roles that exchange KV blocks; only a pod of the same role can serve in place of such a pod."""
_ROLES_BY_NAME = {role.value: role for role in PodRole}
PARTNER_ROLES = {PodRole.PREFILL: PodRole.DECODE, PodRole.DECODE: PodRole.PREFILL}
"""Roles that exchange KV blocks with each other."""


class WorkloadRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reference to the workload that owns a pod, as ``KIND/NAME`` or ``KIND.GROUP/NAME``.

    An empty ``api_group`` is replaced by the kind's default, which the text omits.
    """

    kind: Annotated[str, msgspec.Meta(max_length=_MAX_KIND_CHARS)]
    name: Annotated[str, msgspec.Meta(max_length=_MAX_NAME_CHARS)]
    api_group: Annotated[str, msgspec.Meta(max_length=_MAX_NAME_CHARS)] = ""

    def __post_init__(self) -> None:
        if not self.api_group:
            usual = _DEFAULT_API_GROUPS.get(self.kind, "")
            msgspec.structs.force_setattr(self, "api_group", usual)

    def __str__(self) -> str:
        usual = self.api_group in ("", _DEFAULT_API_GROUPS.get(self.kind))
        return f"{self.kind}/{self.name}" if usual else f"{self.kind}.{self.api_group}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> WorkloadRef | None:
        """Parse ``KIND/NAME`` or ``KIND.GROUP/NAME``; return None for an empty text."""
        kind, _, name = text.partition("/")
        kind, _, api_group = kind.partition(".")
        return cls(kind, name, api_group) if kind else None


@dataclass(frozen=True, slots=True)
class Membership:
    """Workload, group and revision of a pod.

    Attributes:
        workload: The object that owns the pod; None for a pod without a controller. It is the
            outermost controller if the names of inner objects change with each revision.
        api_group: The API group of the workload.
        group: The multi-node group that forms one replica: the key of a LeaderWorkerSet's group, or
            a RayCluster. Empty for a single-pod replica.
        revision: The revision of the pod; empty if the workload's kind has no revisions.
        worker: Whether the pod belongs to a group, but does not lead it.
        graph: The object that creates all roles of disaggregated serving, if the labels name one.

    """

    workload: WorkloadRef | None = None
    api_group: str = ""
    group: str = ""
    revision: str = ""
    worker: bool = False
    graph: WorkloadRef | None = None

    def get_replica_name(self, pod: str) -> str:
        """Return the name of the replica of the pod named ``pod``."""
        return f"group {self.group}" if self.group else pod

    @property
    def ray_cluster(self) -> str:
        """Name of the pod's RayCluster; empty if it has none."""
        ray = self.workload is not None and self.workload.kind == RAY_KIND
        return self.group if ray and self.api_group == RAY_API else ""


def find_membership(metadata: Mapping[str, Any]) -> Membership:
    """Return the workload, group and revision of the pod with this ``metadata``."""
    labels = metadata.get("labels") or {}
    owner = next(
        (one for one in metadata.get("ownerReferences") or () if one.get("controller")), None
    )
    if owner is None:
        return Membership()
    base = _find_membership_by_owner(labels, owner)
    for label, api_group, kind, revision in _GRAPHS:
        if name := str(labels.get(label, "")):
            graph = _make_ref(api_group, kind, name)
            hash_ = str(labels.get(revision) or base.revision)
            return replace(base, workload=graph, api_group=api_group, revision=hash_, graph=graph)
    kserve = str(labels.get(KSERVE_LLM_NAME_LABEL, ""))
    if kserve and labels.get(PART_OF_LABEL) == PART_OF_KSERVE_LLM:
        return replace(base, graph=_make_ref(KSERVE_API, KSERVE_LLM_KIND, kserve))
    return base


def _find_membership_by_owner(labels: Mapping[str, Any], owner: Mapping[str, Any]) -> Membership:
    api_group = str(owner.get("apiVersion", "")).rpartition("/")[0]
    kind, name = str(owner.get("kind", "")), str(owner.get("name", ""))
    revision = str(labels.get(CONTROLLER_HASH_LABEL, ""))
    if labels.get(LWS_NAME_LABEL) and kind == "StatefulSet":
        return Membership(
            _make_ref(LWS_API, LWS_KIND, str(labels[LWS_NAME_LABEL])),
            LWS_API,
            find_lws_group(labels),
            str(labels.get(LWS_HASH_LABEL, "")),
            labels.get(LWS_WORKER_LABEL, "0") != "0",
        )
    if labels.get(RAY_CLUSTER_LABEL) and kind == RAY_KIND:
        cluster = str(labels[RAY_CLUSTER_LABEL])
        return Membership(_make_ref(RAY_API, RAY_KIND, cluster), RAY_API, cluster)
    if kind == "ReplicaSet":
        for label, owner_group, owner_kind in _REPLICA_SET_CONTROLLERS:
            template_hash = str(labels.get(label, ""))
            if template_hash and name.endswith(f"-{template_hash}"):
                made_by = _make_ref(owner_group, owner_kind, name.removesuffix(f"-{template_hash}"))
                return Membership(made_by, owner_group, revision=template_hash)
    return Membership(_make_ref(api_group, kind, name), api_group, revision=revision)


def find_lws_group(labels: Mapping[str, Any]) -> str:
    """Return the key of the pod's group in a LeaderWorkerSet; empty if it is not in such a group.

    The group's index is not used, because it may be missing or be reused.
    """
    return str(labels.get(LWS_GROUP_LABEL) or labels.get(LWS_INDEX_LABEL) or "")


class SlotOwner(NamedTuple):
    """Owner of restart slots: a workload, a graph, or the policy itself if ``ref`` is None.

    If ``role`` is set, the slots are only for the pods of this role.
    """

    ref: WorkloadRef | None = None
    role: PodRole | None = None


def find_slot_owner(
    scope: SlotScope, workload: WorkloadRef | None, graph: WorkloadRef | None, role: PodRole | None
) -> SlotOwner:
    """Return the owner of the slots that a pod takes.

    Each role of a graph has slots of its own; with scope ``Graph``, all roles share them. A prefill
    or decode pod without a graph then uses the policy's own slots.
    """
    has_kv_role = role in KV_ROLES
    if scope is SlotScope.GRAPH and (graph is not None or has_kv_role):
        return SlotOwner(graph)
    has_several_roles = workload is not None and workload == graph
    return SlotOwner(workload, role if has_several_roles and has_kv_role else None)


def make_slot_names(policy: str, owner: SlotOwner, count: int) -> tuple[str, ...]:
    """Return the names of the ``count`` restart-slot Leases of ``owner`` for ``policy``."""
    prefix, (ref, role) = make_policy_object_name(policy), owner
    if ref is not None:
        whole = str(ref) if role is None else f"{ref} {role}"
        prefix = "-".join((prefix, *_make_name_parts(ref.name, whole)))
    return tuple(f"{prefix}-restart-{index}" for index in range(count))


def make_ray_service_name(policy: str, cluster: str) -> str:
    """Return the name of the headless Service for a policy's pods in a RayCluster."""
    return "-".join(("plimsoll", *_make_name_parts(cluster, f"{policy}/{cluster}")))


def make_members_service_name(policy: str) -> str:
    """Return the name of the headless Service for all supervised pods of a policy."""
    return "-".join(("plimsoll", *_make_name_parts(policy, policy)))


# An object's name consists of these parts. The hash makes it unique.
def _make_name_parts(name: str, unique_text: str) -> list[str]:
    shown = re.sub(r"[^a-z0-9]+", "-", name.lower())[:32].strip("-")
    return [*filter(None, (shown,)), hashlib.sha256(unique_text.encode()).hexdigest()[:12]]


def format_replicas(replicas: Iterable[Iterable[str]]) -> str:
    """Format the pods of each replica for the annotation of a slot.

    Commas separate the pods of a replica, and spaces separate the replicas.
    """
    return " ".join(",".join(pods) for pods in replicas)


def parse_replicas(text: str) -> list[tuple[str, ...]]:
    """Parse the output of :func:`format_replicas`; return the pods of each replica."""
    return [tuple(one.split(",")) for one in text.split()]


def format_roles(pods: Mapping[PodRole, Iterable[str]]) -> str:
    """Format the names of the pods of each role for the annotation of a slot."""
    return " ".join(f"{role}={','.join(names)}" for role, names in sorted(pods.items()))


def parse_roles(text: str) -> dict[PodRole, tuple[str, ...]]:
    """Parse the output of :func:`format_roles`; unknown roles are omitted."""
    pods_by_role = {}
    for entry in text.split():
        role, _, names = entry.partition("=")
        if role in _ROLES_BY_NAME and names:
            pods_by_role[_ROLES_BY_NAME[role]] = tuple(names.split(","))
    return pods_by_role


def _make_ref(api_group: str, kind: str, name: str) -> WorkloadRef:
    return WorkloadRef(kind[:_MAX_KIND_CHARS], name[:_MAX_NAME_CHARS], api_group[:_MAX_NAME_CHARS])
