"""Group a policy's pods by workload, and by the restart slots that they share.

Pods without a controller share the slots of the policy itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from plimsoll_api.names import SERVICE_RESTARTS_ANNOTATION
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import SlotScope
from plimsoll_api.times import parse_rfc3339
from plimsoll_api.workloads import (
    KV_ROLES,
    SlotOwner,
    WorkloadRef,
    find_slot_owner,
    format_replicas,
    format_roles,
    make_slot_names,
)
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.kinds import Object

MAX_WORKLOADS = 100
"""Maximum number of workloads of a policy that have restart slots."""
MAX_REPLICAS_BYTES = 1 << 16
"""Maximum size of the annotation with a workload's pods; an object's annotations may have 256
KiB."""
MAX_ROLES_BYTES = MAX_REPLICAS_BYTES // 2


@dataclass(frozen=True)
class Workload:
    """Pods of a policy that have the same owner, or that share restart slots.

    ``ref`` is the owner; None for pods without a controller. ``api_group`` is empty if the pods
    name several. ``roles`` lists the pods of each role of a graph, as the text of an annotation.
    """

    ref: WorkloadRef | None
    api_group: str
    pods: tuple[SelectedPod, ...]
    role: PodRole | None = None
    roles: str = ""

    def count_pods(self, state: SupervisionState) -> int:
        """Return the number of the workload's pods that are in ``state``."""
        return sum(one.state is state for one in self.pods)

    @property
    def needs_slots(self) -> bool:
        """Whether any pod of the workload has a supervisor or will get one once recreated."""
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
        """Name of the pods' RayCluster; empty if they have none."""
        named = (one.member.ray_cluster for one in self.pods if one.may_hold_slot)
        return next(filter(None, named), "")

    def make_slot_names(self, policy: str, count: int) -> tuple[str, ...]:
        """Return the names of the workload's first ``count`` slot Leases."""
        return make_slot_names(policy, SlotOwner(self.ref, self.role), count)

    def format_replicas(self) -> str:
        """Return the pods that may take a slot, by replica, as the text of an annotation.

        Replicas beyond :data:`MAX_REPLICAS_BYTES` are omitted.
        """
        by_replica: dict[str, list[str]] = defaultdict(list)
        for pod in sorted(self.pods, key=lambda pod: pod.name):
            if pod.may_hold_slot:
                by_replica[pod.member.get_replica_name(pod.name)].append(pod.name)
        text = format_replicas(by_replica[name] for name in sorted(by_replica))
        if len(text) <= MAX_REPLICAS_BYTES:
            return text
        return text[: max(0, text.rfind(" ", 0, MAX_REPLICAS_BYTES))]

    @property
    def is_truncated(self) -> bool:
        """Whether :meth:`format_replicas` omits replicas."""
        return sum(len(one.name) + 1 for one in self.pods if one.may_hold_slot) > MAX_REPLICAS_BYTES


def group_pods_by_workload(pods: Iterable[SelectedPod]) -> list[Workload]:
    """Group ``pods`` by their workload, sorted."""
    by_workload: dict[WorkloadRef | None, list[SelectedPod]] = defaultdict(list)
    for one in pods:
        by_workload[one.member.workload].append(one)
    workloads = []
    for ref, owned in by_workload.items():
        groups = {one.member.api_group for one in owned}
        workloads.append(Workload(ref, groups.pop() if len(groups) == 1 else "", tuple(owned)))
    return sorted(workloads, key=lambda one: one.sort_key)


def group_pods_by_slots(pods: Iterable[SelectedPod], scope: SlotScope) -> list[Workload]:
    """Group ``pods`` by the slots that they share, sorted."""
    by_owner: dict[SlotOwner, list[SelectedPod]] = defaultdict(list)
    graphs: dict[WorkloadRef | None, dict[PodRole, list[str]]] = defaultdict(dict)
    for one in sorted(pods, key=lambda one: one.name):
        by_owner[find_slot_owner(scope, one.member.workload, one.member.graph, one.role)].append(
            one
        )
        if one.role in KV_ROLES and one.may_hold_slot and not one.member.worker:
            assert one.role is not None
            graphs[one.member.graph].setdefault(one.role, []).append(one.name)
    roles = {graph: _format_shortened_roles(by_role) for graph, by_role in graphs.items()}
    workloads = []
    for owner, owned in by_owner.items():
        graph_ref = next((one.member.graph for one in owned if one.role in KV_ROLES), None)
        of_graph = roles.get(graph_ref, "") if any(one.role in KV_ROLES for one in owned) else ""
        workloads.append(Workload(owner.ref, "", tuple(owned), owner.role, of_graph))
    return sorted(workloads, key=lambda one: one.sort_key)


# Each role may use an equal share of the bytes; further names are omitted.
def _format_shortened_roles(pods: dict[PodRole, list[str]]) -> str:
    share, kept = MAX_ROLES_BYTES // len(pods), {}
    for role, names in pods.items():
        text = ",".join(names)
        kept[role] = names if len(text) < share else text[: text.rfind(",", 0, share)].split(",")
    return format_roles(kept)


def choose_workloads_with_slots(
    policy: str, workloads: Sequence[Workload], leases: Collection[str]
) -> list[Workload]:
    """Return the ``workloads`` that get slots, at most :data:`MAX_WORKLOADS`.

    ``leases`` are the names of the existing slots. Workloads with slots come first, then supervised
    workloads.
    """
    wanted = [one for one in workloads if one.needs_slots]

    def make_priority(workload: Workload) -> tuple[bool, bool]:
        has_slots = workload.make_slot_names(policy, 1)[0] in leases
        return not has_slots, not any(pod.may_hold_slot for pod in workload.pods)

    chosen = sorted(wanted, key=make_priority)[
        :MAX_WORKLOADS
    ]  # the sort is stable: ties stay ordered by kind and name
    return sorted(chosen, key=lambda one: one.sort_key)


def find_slots_with_restarts(leases: Iterable[Object], window_s: float, now: str) -> list[str]:
    """Return the names of unused slots whose restarts still count, newest first.

    Without them, a workload that is recreated would get its restart budget back. At most
    :data:`MAX_WORKLOADS` are returned.
    """
    dated = []
    for one in leases:
        meta, spec = one["metadata"], one.get("spec") or {}
        if not (meta.get("annotations") or {}).get(SERVICE_RESTARTS_ANNOTATION):
            continue
        try:
            age_s = parse_rfc3339(now) - parse_rfc3339(str(spec.get("renewTime")))
        except (ValueError, OverflowError):
            continue
        if age_s < window_s:
            dated.append((age_s, meta["name"]))
    return [name for _, name in sorted(dated)[:MAX_WORKLOADS]]


def index_workload_statuses(status: Object) -> dict[str, Object]:
    """Return the status of each workload by its :class:`WorkloadRef` as text."""
    listed = status.get("workloads") or ()
    return {
        str(WorkloadRef(item.get("kind", ""), item.get("name", ""), item.get("apiGroup", ""))): item
        for item in listed
    }
