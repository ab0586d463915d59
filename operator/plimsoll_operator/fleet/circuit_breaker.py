"""Decide which services may restart replicas now, and which must wait: the circuit breaker.

A supervisor must hold a slot Lease to restart its replica, so the operator itself acquires the free
Leases of services that must wait. A fleet without incidents causes no writes.

Tenants can write the Leases and incidents of their namespaces, so a namespace and a service each
get at most their share of the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from plimsoll_api.incidents import ENDED_PHASES
from plimsoll_api.names import POLICY_KIND, SLOT_REPLICAS_ANNOTATION, SLOT_WORKLOAD_ANNOTATION
from plimsoll_api.supervision import MAX_SLOTS
from plimsoll_api.workloads import KV_ROLES, SlotOwner, WorkloadRef, make_slot_names, parse_replicas
from plimsoll_operator.kinds import Object, find_key

OPERATOR_HOLDER = "plimsoll-operator"
LEASE_DURATION_S = 120
RENEW_INTERVAL_S = 40.0
SHARE_DIVISOR = 2
"""Divisor of the limit: if several namespaces have slots, each may use half of the limit."""

AWAITING_SLOT_PHASE = "AwaitingSlot"

REQUESTED_RANK, IDLE_RANK = 0, 1
LATEST_TIME = "~"
"""Text that sorts after every RFC 3339 time."""


class SlotSet(NamedTuple):
    """Slots of a service or of a policy's workload, identified by the prefix of their names."""

    namespace: str
    prefix: str


@dataclass
class SlotAllocation:
    """Decision of the circuit breaker.

    Attributes:
        close: The slot Leases to close; those that are already closed are renewed.
        reopen: The slot Leases to reopen.
        granted: The slot Leases to leave open for a supervisor.
        held: The number of slots that live supervisors hold.
        waiting: The number of slots that services with an open incident wait for.
        asking: The number of Leases in ``close`` that a supervisor requests.

    """

    close: list[Object] = field(default_factory=list)
    reopen: list[Object] = field(default_factory=list)
    granted: list[Object] = field(default_factory=list)
    held: int = 0
    waiting: int = 0
    asking: int = 0


def allocate_slots(
    leases: list[Object],
    incidents: list[Object],
    limit: int,
    expired_uids: Collection[str] = (),
    overlong_uids: Collection[str] = (),
    last_turn_ends: Mapping[str, float] | None = None,
) -> SlotAllocation:
    """Decide which slots to close and which to leave open.

    ``limit`` is the maximum number of slots that are held or left open. ``expired_uids`` are Leases
    that count as free, and ``overlong_uids`` held Leases that no longer count. ``last_turn_ends``
    maps a Lease's UID to the end of its last turn. Requested Leases come first, then those with the
    oldest turn, then those with the oldest incident.
    """
    ended = last_turn_ends or {}
    slots = [one for one in leases if _is_slot(one)]
    waits = _find_waiting_slot_sets(incidents, slots)
    shares = _FairShareCounter(slots, limit)
    result = SlotAllocation()
    candidates = []
    for one in slots:
        if get_holder(one) in ("", OPERATOR_HOLDER) or one["metadata"]["uid"] in expired_uids:
            candidates.append(one)
        else:
            result.held += 1
            if one["metadata"]["uid"] not in overlong_uids:
                shares.try_hold(_make_slot_set(one))
    waiting = [one for one in candidates if _make_slot_set(one) in waits]
    waiting.sort(
        key=lambda one: (
            waits[_make_slot_set(one)][0],
            ended.get(one["metadata"]["uid"], 0.0),
            waits[_make_slot_set(one)][1],
            _make_slot_set(one),
            one["metadata"]["name"],
        )
    )
    result.waiting = len(waiting)
    for one in waiting:
        (result.granted if shares.try_grant(_make_slot_set(one)) else result.close).append(one)
    result.asking = sum(waits[_make_slot_set(one)][0] == REQUESTED_RANK for one in result.close)
    closed = {one["metadata"]["uid"] for one in result.close}
    result.reopen = [
        one
        for one in candidates
        if get_holder(one) == OPERATOR_HOLDER and one["metadata"]["uid"] not in closed
    ]
    return result


class _FairShareCounter:
    def __init__(self, slots: list[Object], limit: int) -> None:
        self._limit = limit
        sets = {_make_slot_set(one) for one in slots}
        half = -(-limit // SHARE_DIVISOR)
        self._service_share = half if len(sets) > 1 else limit
        self._namespace_share = half if len({one.namespace for one in sets}) > 1 else limit
        self._services: Counter[SlotSet] = Counter()
        self._namespaces: Counter[str] = Counter()
        self._used_slots = 0

    def try_grant(self, key: SlotSet) -> bool:
        """Count a new slot if the limit and the shares allow it; return whether they do."""
        return self._used_slots < self._limit and self.try_hold(key)

    def try_hold(self, key: SlotSet) -> bool:
        """Count a held slot if the shares allow it; return whether they do."""
        within = (
            self._services[key] < self._service_share
            and self._namespaces[key.namespace] < self._namespace_share
        )
        self._services[key] += within
        self._namespaces[key.namespace] += within
        self._used_slots += within
        return within


def _find_waiting_slot_sets(
    incidents: list[Object], slots: list[Object]
) -> dict[SlotSet, tuple[int, str]]:
    """Return the rank and the oldest incident's creation time of each set with an open incident.

    Times and workload in an incident are ignored, because a supervised pod can write them.
    """
    of_pods: dict[tuple[str, str], SlotSet] | None = None
    waiting: dict[SlotSet, tuple[int, str]] = {}
    for incident in incidents:
        key = find_key(incident)
        phase = (incident.get("status") or {}).get("phase")
        if key is None or phase in ENDED_PHASES:
            continue
        if key.kind == POLICY_KIND:
            of_pods = _index_slot_sets_by_pod(slots) if of_pods is None else of_pods
            slot_set = of_pods.get((key.namespace, incident["spec"]["pod"]))
        else:
            slot_set = SlotSet(key.namespace, key.name)
        if slot_set is None:
            continue
        rank, since = waiting.get(slot_set, (IDLE_RANK, LATEST_TIME))
        created = incident["metadata"].get("creationTimestamp") or LATEST_TIME
        waiting[slot_set] = (
            min(rank, REQUESTED_RANK if phase == AWAITING_SLOT_PHASE else IDLE_RANK),
            min(since, created),
        )
    return waiting


def _index_slot_sets_by_pod(slots: list[Object]) -> dict[tuple[str, str], SlotSet]:
    return {
        (one["metadata"]["namespace"], pod): _make_slot_set(one)
        for one in slots
        for pods in parse_replicas(_get_annotation(one, SLOT_REPLICAS_ANNOTATION))
        for pod in pods
    }


def get_holder(lease: Object) -> str:
    """Return the holder of the Lease; empty if it is free."""
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


# Anyone may set the label, so it does not suffice.
def _is_slot(lease: Object) -> bool:
    key, name = find_key(lease), lease["metadata"]["name"]
    if key is None:
        return False
    if key.kind != POLICY_KIND:
        return name in key.make_slot_names(MAX_SLOTS)
    if not get_holder(lease) and not _get_annotation(lease, SLOT_REPLICAS_ANNOTATION):
        return False
    workload = WorkloadRef.parse(_get_annotation(lease, SLOT_WORKLOAD_ANNOTATION))
    owners = (SlotOwner(workload, role) for role in (None, *KV_ROLES))
    return any(name in make_slot_names(key.name, owner, MAX_SLOTS) for owner in owners)


def _get_annotation(lease: Object, name: str) -> str:
    return str((lease["metadata"].get("annotations") or {}).get(name, ""))


def _make_slot_set(lease: Object) -> SlotSet:
    meta = lease["metadata"]
    return SlotSet(meta["namespace"], meta["name"].rpartition("-restart-")[0])
