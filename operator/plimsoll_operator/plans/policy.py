"""The decision for a policy: from its spec and what was observed to what is applied and removed.

Pure, as the decision for a service is: no cluster, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.fleet.pods import clean
from plimsoll_operator.fleet.selected_pods import SelectedPod, State
from plimsoll_operator.fleet.suspects import suspects
from plimsoll_operator.fleet.workloads import (
    MAX_WORKLOADS,
    Workload,
    counting_slots,
    grouped,
    of_workloads,
    with_slots,
)
from plimsoll_operator.kinds import LEASE, Object, Ref, owner_uid, ref
from plimsoll_operator.plans.policy_objects import render
from plimsoll_operator.plans.service import Failure, held_slots

MAX_ACCOUNTS = 100
"""Accounts in one RoleBinding."""
MAX_SHOWN = 320
MAX_NAMED = 4
"""Pods, workloads and policies that a message names."""


@dataclass(frozen=True)
class PolicyPlan:
    """What to do for a policy.

    ``desired`` is in the order of application; ``surplus`` is removed afterwards. ``failure`` says
    which limit is exceeded, ``suspects`` which workloads have a revision that leaks.
    """

    desired: list[Object]
    surplus: list[Object]
    workloads: list[Workload]
    suspects: dict[WorkloadRef, Object]
    failure: Failure | None = None


def reconcile(
    policy: SupervisionPolicy,
    owned: Mapping[Ref, Object],
    pods: Sequence[SelectedPod],
    incidents: Sequence[Object],
    now: str,
    status: Object | None = None,
    peers: str = "",
) -> PolicyPlan:
    """Plan what there should be, and which of the policy's own objects should go.

    ``status`` is the last one, ``now`` RFC 3339. ``peers`` is the file with the replicas' growth
    for their supervisors.
    """
    uid, name = policy.metadata.uid, policy.metadata.name
    own = {where: item for where, item in owned.items() if owner_uid(item) == uid}
    leases = {where.name: item for where, item in own.items() if where.kind == LEASE.kind}
    held = held_slots(leases.values(), {one.name for one in pods})
    workloads = grouped(pods)
    chosen = with_slots(name, workloads, leases)
    # Also of one that ends: its supervisor gives its slot back and closes its incident.
    accounts = sorted({one.account for one in pods if one.holds or one.state is State.SUPERVISED})
    desired = render(policy, accounts[:MAX_ACCOUNTS], chosen, held, peers)
    wanted = {ref(one) for one in desired}
    idle = [item for slot, item in leases.items() if Ref(LEASE.kind, slot) not in wanted]
    kept = {*held, *counting_slots(idle, policy.spec.supervision.restart_budget.window_s, now)}
    surplus = [
        item
        for where, item in own.items()
        if where not in wanted and not (where.kind == LEASE.kind and where.name in kept)
    ]
    return PolicyPlan(
        desired,
        surplus,
        workloads,
        suspects(workloads, incidents, of_workloads(status or {})),
        too_many_accounts(accounts) or too_many_workloads(workloads, chosen),
    )


def too_many_accounts(accounts: Sequence[str]) -> Failure | None:
    """Why supervisors of some pods may write nothing. ``accounts`` are those of all pods."""
    if len(accounts) <= MAX_ACCOUNTS:
        return None
    text = (
        f"the supervised pods have {len(accounts)} ServiceAccounts, and {MAX_ACCOUNTS} can have"
        f" rights: {accounts[MAX_ACCOUNTS]} and later names write no incidents; use fewer"
        " accounts, or more policies"
    )
    return Failure("TooManyServiceAccounts", text, lasting=True)


def too_many_workloads(workloads: Sequence[Workload], chosen: Sequence[Workload]) -> Failure | None:
    """Why supervisors of some pods find no restart slot. ``chosen`` are those that have slots."""
    have = {one.ref for one in chosen}
    without = [one for one in workloads if one.needs_slots and one.ref not in have]
    if without:
        who = named([name_of(one.ref) for one in without])
        text = (
            f"the pods belong to {len(without) + len(chosen)} workloads, and {MAX_WORKLOADS} can"
            f" have restart slots: {who} restart nothing; use more policies"
        )
        return Failure("TooManyWorkloads", text, lasting=True)
    large = [name_of(one.ref) for one in chosen if one.too_many]
    if large:
        text = f"{named(large)}: so many pods that some can take no restart slot: use more policies"
        return Failure("TooManyPods", text, lasting=True)
    return None


def name_of(ref: WorkloadRef | None) -> str:
    """Name the workload in a message, cut and cleaned.

    The creator of a pod may write any text as its owner's name.
    """
    return clean(str(ref), MAX_SHOWN) if ref else "pods without an owner"


def named(names: Sequence[str]) -> str:
    """List some of the names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
