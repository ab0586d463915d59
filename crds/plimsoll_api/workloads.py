"""Which workload a pod belongs to, which replica of it the pod is, and its revision.

Read from the pod's labels and owner references alone: a pod that somebody else made is looked at
without another request. Whoever may create pods writes both, so they grant no right.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll_api.supervision import WorkloadRef

APPS = "apps"
TEMPLATE_HASH = "pod-template-hash"
CONTROLLER_HASH = "controller-revision-hash"
ROLLOUT_HASH = "rollouts-pod-template-hash"
LWS_API, LWS_KIND = "leaderworkerset.x-k8s.io", "LeaderWorkerSet"
LWS_NAME = "leaderworkerset.sigs.k8s.io/name"
LWS_GROUP = "leaderworkerset.sigs.k8s.io/group-index"
LWS_WORKER = "leaderworkerset.sigs.k8s.io/worker-index"
LWS_HASH = "leaderworkerset.sigs.k8s.io/template-revision-hash"
RAY_API, RAY_KIND = "ray.io", "RayCluster"
RAY_CLUSTER = "ray.io/cluster"
RAY_NODE = "ray.io/node-type"

_MAX_KIND, _MAX_NAME = 63, 253
_BEHIND_REPLICA_SETS = (
    (TEMPLATE_HASH, APPS, "Deployment"),
    (ROLLOUT_HASH, "argoproj.io", "Rollout"),
)
"""Label of a pod, and group and kind of what makes ReplicaSets named NAME-LABEL for it."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Where a pod belongs.

    ``workload`` is None for a pod that nothing controls, and ``api_group`` is the workload's.
    ``group`` names the multi-node group that is one replica together with this pod: the index of
    a LeaderWorkerSet's group, or a RayCluster as a whole. It is empty where the pod is a replica by
    itself. ``revision`` is empty where the workload's kind has none.
    """

    workload: WorkloadRef | None = None
    api_group: str = ""
    group: str = ""
    revision: str = ""

    def replica(self, pod: str) -> str:
        """Name of the replica that the pod named ``pod`` is, or is a part of."""
        return f"group {self.group}" if self.group else pod


def membership(metadata: Mapping[str, Any]) -> Membership:
    """Where the pod with this ``metadata`` belongs."""
    labels = metadata.get("labels") or {}
    owner = next(
        (one for one in metadata.get("ownerReferences") or () if one.get("controller")), None
    )
    if owner is None:
        return Membership()
    api_group = str(owner.get("apiVersion", "")).rpartition("/")[0]
    kind, name = str(owner.get("kind", "")), str(owner.get("name", ""))
    revision = str(labels.get(CONTROLLER_HASH, ""))
    if labels.get(LWS_NAME) and kind == "StatefulSet":
        return Membership(
            _ref(LWS_KIND, str(labels[LWS_NAME])),
            LWS_API,
            str(labels.get(LWS_GROUP, "")),
            str(labels.get(LWS_HASH, "")),
        )
    if labels.get(RAY_CLUSTER) and kind == RAY_KIND:
        cluster = str(labels[RAY_CLUSTER])
        return Membership(_ref(RAY_KIND, cluster), RAY_API, cluster)
    if kind == "ReplicaSet":
        for label, owner_group, owner_kind in _BEHIND_REPLICA_SETS:
            found = str(labels.get(label, ""))
            if found and name.endswith(f"-{found}"):
                made_by = _ref(owner_kind, name.removesuffix(f"-{found}"))
                return Membership(made_by, owner_group, revision=found)
    return Membership(_ref(kind, name), api_group, revision=revision)


def slots_of(policy_objects: str, workload: WorkloadRef | None, count: int) -> tuple[str, ...]:
    """Names of the restart-slot Leases of one workload of a policy.

    ``policy_objects`` is the name of the policy's objects. The supervisor and the operator both
    make these names. Pods that nothing controls share the policy's own slots.
    """
    prefix = slot_prefix(policy_objects, workload)
    return tuple(f"{prefix}-restart-{index}" for index in range(count))


def slot_prefix(policy_objects: str, workload: WorkloadRef | None) -> str:
    """What the names of a workload's slots begin with, whatever the workload is called."""
    if workload is None:
        return policy_objects
    digest = hashlib.sha256(f"{workload.kind}/{workload.name}".encode()).hexdigest()[:12]
    shown = re.sub(r"[^a-z0-9]+", "-", workload.name.lower())[:32].strip("-")
    return "-".join(filter(None, (policy_objects, shown, digest)))


def _ref(kind: str, name: str) -> WorkloadRef:
    return WorkloadRef(kind[:_MAX_KIND], name[:_MAX_NAME])
