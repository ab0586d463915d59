"""How much one policy may have, and what its status says beyond that."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.fleet.pods import clean
from plimsoll_operator.fleet.workloads import MAX_WORKLOADS, Workload
from plimsoll_operator.plans.service import Failure

MAX_ACCOUNTS = 100
"""Accounts in one RoleBinding."""
MAX_SHOWN = 320
MAX_NAMED = 4
"""Pods, workloads and policies that a message names."""


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

    Whoever creates a pod may write any text as its owner's name.
    """
    return clean(str(ref), MAX_SHOWN) if ref else "pods without an owner"


def named(names: Sequence[str]) -> str:
    """List some of the names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
