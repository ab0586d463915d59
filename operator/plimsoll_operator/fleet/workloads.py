"""The workloads that own a policy's pods: each has restart slots and a restart budget of its own.

Pods that nothing controls belong together: they share the policy's own slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from plimsoll_api.names import SERVICE_RESTARTS
from plimsoll_api.times import unix_seconds
from plimsoll_api.workloads import WorkloadRef, replicas_text, slots_of
from plimsoll_operator.fleet.selected_pods import SelectedPod, State
from plimsoll_operator.kinds import Object

MAX_WORKLOADS = 100
"""Workloads of a policy that have restart slots."""
MAX_REPLICAS_BYTES = 1 << 16
"""Of an annotation that names a workload's pods. All of an object may have 256 KiB, and the counts
of restarts need up to 128 KiB of them."""


@dataclass(frozen=True)
class Workload:
    """What owns some of a policy's pods.

    ``ref`` is None for pods that nothing controls, and ``api_group`` is empty if its pods name
    several.
    """

    ref: WorkloadRef | None
    api_group: str
    pods: tuple[SelectedPod, ...]

    def count(self, state: State) -> int:
        """How many of its pods are in ``state``."""
        return sum(one.state is state for one in self.pods)

    @property
    def needs_slots(self) -> bool:
        """Whether a pod of it has a supervisor, or gets one when it is created anew."""
        return any(one.holds or one.state in (State.SUPERVISED, State.WAITING) for one in self.pods)

    @property
    def order(self) -> tuple[bool, str, str]:
        """Sorts workloads by kind and name; pods that nothing controls come first."""
        return (self.ref is not None, *((self.ref.kind, self.ref.name) if self.ref else ("", "")))

    @property
    def ray_cluster(self) -> str:
        """The RayCluster that it is, by its pods with a supervisor; empty where it is none."""
        named = (one.member.ray_cluster for one in self.pods if one.holds)
        return next(filter(None, named), "")

    def slots(self, policy: str, count: int) -> tuple[str, ...]:
        """Names of its restart-slot Leases."""
        return slots_of(policy, self.ref, count)

    def replicas(self) -> str:
        """Write which pods may take its slots, by replica, for a slot's annotation.

        The text is cut off after :data:`MAX_REPLICAS_BYTES`, between replicas.
        """
        found: dict[str, list[str]] = defaultdict(list)
        for one in sorted(self.pods, key=lambda one: one.name):
            if one.holds:
                found[one.member.replica(one.name)].append(one.name)
        text = replicas_text(found[name] for name in sorted(found))
        if len(text) <= MAX_REPLICAS_BYTES:
            return text
        return text[: max(0, text.rfind(" ", 0, MAX_REPLICAS_BYTES))]

    @property
    def too_many(self) -> bool:
        """Whether :meth:`replicas` leaves some out."""
        return sum(len(one.name) + 1 for one in self.pods if one.holds) > MAX_REPLICAS_BYTES


def grouped(pods: Iterable[SelectedPod]) -> list[Workload]:
    """Group ``pods`` by their workload, in order."""
    found: dict[WorkloadRef | None, list[SelectedPod]] = defaultdict(list)
    for one in pods:
        found[one.member.workload].append(one)
    made = []
    for ref, some in found.items():
        groups = {one.member.api_group for one in some}
        made.append(Workload(ref, groups.pop() if len(groups) == 1 else "", tuple(some)))
    return sorted(made, key=lambda one: one.order)


def with_slots(
    policy: str, workloads: Sequence[Workload], leases: Collection[str]
) -> list[Workload]:
    """Return those of ``workloads`` that have slots: at most :data:`MAX_WORKLOADS`.

    One that has them already, by the names in ``leases``, keeps them; supervised ones come before
    those that wait.
    """
    wanted = [one for one in workloads if one.needs_slots]

    def rank(one: Workload) -> tuple[bool, bool]:
        has = one.slots(policy, 1)[0] in leases
        return not has, not any(pod.holds for pod in one.pods)

    chosen = sorted(wanted, key=rank)[:MAX_WORKLOADS]  # stable: else by kind and name
    return sorted(chosen, key=lambda one: one.order)


def counting_slots(leases: Iterable[Object], window_s: float, now: str) -> list[str]:
    """Name the slots that nobody needs now and whose restarts still count.

    A workload that is scaled to zero, or is created anew, does not get its restart budget back. The
    time in a Lease is its last holder's claim. At most :data:`MAX_WORKLOADS` are kept, the newest.
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


def of_workloads(status: Object) -> dict[str, Object]:
    """Return what a status says of each workload, by its :class:`WorkloadRef` as text."""
    shown = status.get("workloads") or ()
    return {
        str(WorkloadRef(one.get("kind", ""), one.get("name", ""), one.get("apiGroup", ""))): one
        for one in shown
    }
