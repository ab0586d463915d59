"""Group a policy's pods by workload, and by the restart slots and budget that they share.

Pods without a controller share the policy's own slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from plimsoll_api.names import SERVICE_RESTARTS
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import SlotScope
from plimsoll_api.times import unix_seconds
from plimsoll_api.workloads import (
    KV_ROLES,
    SlotOwner,
    WorkloadRef,
    format_replicas,
    format_roles,
    slot_names,
    slot_owner,
)
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.kinds import Object

MAX_WORKLOADS = 100
"""Maximum number of workloads of a policy that have restart slots."""
MAX_REPLICAS_BYTES = 1 << 16
"""Maximum size of an annotation that names a workload's pods. All annotations of an object may have
256 KiB, and the restart counts need up to 128 KiB."""
MAX_ROLES_BYTES = MAX_REPLICAS_BYTES // 2
"""Maximum size of an annotation that names a graph's pods by role."""


@dataclass(frozen=True)
class Workload:
    """Owner of some of a policy's pods.

    ``ref`` is None for pods without a controller. ``api_group`` is empty if the pods name several
    groups. As the owner of slots, it may be a graph, or have one ``role`` of a workload only.
    ``roles`` lists the pods of each role of its graph, as text for an annotation.
    """

    ref: WorkloadRef | None
    api_group: str
    pods: tuple[SelectedPod, ...]
    role: PodRole | None = None
    roles: str = ""

    def count(self, state: SupervisionState) -> int:
        """Return how many of its pods are in ``state``."""
        return sum(one.state is state for one in self.pods)

    @property
    def needs_slots(self) -> bool:
        """Whether any pod of the workload has a supervisor, or gets one when it is recreated."""
        return any(
            one.may_hold_slot
            or one.state in (SupervisionState.SUPERVISED, SupervisionState.WAITING)
            for one in self.pods
        )

    @property
    def sort_key(self) -> tuple[bool, str, str, str]:
        """Sort key: kind, name and role, pods without a controller first."""
        named = (self.ref.kind, self.ref.name) if self.ref else ("", "")
        return (self.ref is not None, *named, self.role or "")

    @property
    def ray_cluster(self) -> str:
        """Name of the RayCluster of its supervised pods; empty for another workload."""
        named = (one.member.ray_cluster for one in self.pods if one.may_hold_slot)
        return next(filter(None, named), "")

    def slots(self, policy: str, count: int) -> tuple[str, ...]:
        """Return the names of the workload's ``count`` restart-slot Leases for ``policy``."""
        return slot_names(policy, SlotOwner(self.ref, self.role), count)

    def replicas(self) -> str:
        """Return the text that lists the pods that may take a slot, by replica, for an annotation.

        The text is truncated to :data:`MAX_REPLICAS_BYTES`, between replicas.
        """
        found: dict[str, list[str]] = defaultdict(list)
        for one in sorted(self.pods, key=lambda one: one.name):
            if one.may_hold_slot:
                found[one.member.replica(one.name)].append(one.name)
        text = format_replicas(found[name] for name in sorted(found))
        if len(text) <= MAX_REPLICAS_BYTES:
            return text
        return text[: max(0, text.rfind(" ", 0, MAX_REPLICAS_BYTES))]

    @property
    def is_truncated(self) -> bool:
        """Whether :meth:`replicas` truncates the list."""
        return sum(len(one.name) + 1 for one in self.pods if one.may_hold_slot) > MAX_REPLICAS_BYTES


def group_pods(pods: Iterable[SelectedPod]) -> list[Workload]:
    """Group ``pods`` by their workload, in order."""
    found: dict[WorkloadRef | None, list[SelectedPod]] = defaultdict(list)
    for one in pods:
        found[one.member.workload].append(one)
    made = []
    for ref, some in found.items():
        groups = {one.member.api_group for one in some}
        made.append(Workload(ref, groups.pop() if len(groups) == 1 else "", tuple(some)))
    return sorted(made, key=lambda one: one.sort_key)


def group_by_slots(pods: Iterable[SelectedPod], scope: SlotScope) -> list[Workload]:
    """Group ``pods`` by the slots that they share, in order."""
    found: dict[SlotOwner, list[SelectedPod]] = defaultdict(list)
    graphs: dict[WorkloadRef | None, dict[PodRole, list[str]]] = defaultdict(dict)
    for one in sorted(pods, key=lambda one: one.name):
        found[slot_owner(scope, one.member.workload, one.member.graph, one.role)].append(one)
        if one.role in KV_ROLES and one.may_hold_slot and not one.member.worker:
            assert one.role is not None
            graphs[one.member.graph].setdefault(one.role, []).append(one.name)
    roles = {graph: _format_bounded_roles(by_role) for graph, by_role in graphs.items()}
    made = []
    for owner, some in found.items():
        named = next((one.member.graph for one in some if one.role in KV_ROLES), None)
        of_graph = roles.get(named, "") if any(one.role in KV_ROLES for one in some) else ""
        made.append(Workload(owner.ref, "", tuple(some), owner.role, of_graph))
    return sorted(made, key=lambda one: one.sort_key)


def _format_bounded_roles(pods: dict[PodRole, list[str]]) -> str:
    """Format the pods of each role, at most :data:`MAX_ROLES_BYTES`, the same share of each."""
    share, kept = MAX_ROLES_BYTES // len(pods), {}
    for role, names in pods.items():
        text = ",".join(names)
        kept[role] = names if len(text) < share else text[: text.rfind(",", 0, share)].split(",")
    return format_roles(kept)


def choose_workloads(
    policy: str, workloads: Sequence[Workload], leases: Collection[str]
) -> list[Workload]:
    """Return the ``workloads`` that have slots, at most :data:`MAX_WORKLOADS`.

    A workload that already has slots, by the names in ``leases``, keeps them. Supervised workloads
    come before those that wait.
    """
    wanted = [one for one in workloads if one.needs_slots]

    def rank(one: Workload) -> tuple[bool, bool]:
        has = one.slots(policy, 1)[0] in leases
        return not has, not any(pod.may_hold_slot for pod in one.pods)

    chosen = sorted(wanted, key=rank)[
        :MAX_WORKLOADS
    ]  # the sort is stable: ties stay ordered by kind and name
    return sorted(chosen, key=lambda one: one.sort_key)


def find_slots_with_restarts(leases: Iterable[Object], window_s: float, now: str) -> list[str]:
    """Return the names of unused slots whose restarts still count.

    A workload that is scaled to zero or recreated must not get its restart budget back. The time in
    a Lease is its last holder's claim. The newest :data:`MAX_WORKLOADS` are kept.
    """
    found = []
    for one in leases:
        meta, spec = one["metadata"], one.get("spec") or {}
        if not (meta.get("annotations") or {}).get(SERVICE_RESTARTS):
            continue
        try:
            age = unix_seconds(now) - unix_seconds(str(spec.get("renewTime")))
        except (ValueError, OverflowError):
            continue
        if age < window_s:
            found.append((age, meta["name"]))
    return [name for _, name in sorted(found)[:MAX_WORKLOADS]]


def index_workload_statuses(status: Object) -> dict[str, Object]:
    """Return the part of a status about each workload, by its :class:`WorkloadRef` as text."""
    shown = status.get("workloads") or ()
    return {
        str(WorkloadRef(one.get("kind", ""), one.get("name", ""), one.get("apiGroup", ""))): one
        for one in shown
    }
