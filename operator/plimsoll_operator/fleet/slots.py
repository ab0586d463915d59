"""The fleet's circuit breaker: limits how many services are under disruptive remediation at once.

A workload of a SupervisionPolicy counts as a service, with its own slots.

A supervisor restarts nothing without a slot Lease. If more incidents are open than the limit
allows, the operator takes the free Leases of the services that must wait. It gives them back as
others finish. Only services with an open incident are touched: a quiet fleet costs no writes. The
operator's hold expires like a supervisor's, so without the operator only each service's own limit
applies.

Leases and incidents are written in the tenants' namespaces, so neither may starve other tenants. A
dead holder does not count. A namespace and a service count for at most their share. A service whose
incidents ask for no slot waits behind those whose incidents do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from plimsoll_api.incidents import ENDED
from plimsoll_api.names import POLICY_KIND, SLOT_REPLICAS, SLOT_WORKLOAD
from plimsoll_api.supervision import MAX_SLOTS
from plimsoll_api.workloads import WorkloadRef, parse_replicas, slot_names
from plimsoll_operator.kinds import Object, key_of

HOLDER = "plimsoll-operator"
DURATION_S = 120
RENEW_S = 40.0
SHARES = 2
"""A namespace may use one half of the limit if several have slots, and so may a service. With a
single namespace the limit is not halved."""

AWAITING_SLOT = "AwaitingSlot"
"""Phase of an incident whose supervisor tries to take a slot."""

ASKING, IDLE = 0, 1
LATEST = "~"
"""Sorts after every time."""


class SlotSet(NamedTuple):
    """The slots of one service, or of one workload of a policy, by their common name prefix."""

    namespace: str
    prefix: str


@dataclass
class Allocation:
    """Leases to ``close`` (or renew), to ``reopen``, and to leave open as ``granted``.

    ``held`` counts slots that live supervisors hold. ``asking`` counts the slots in ``close`` that
    a supervisor asks for.
    """

    close: list[Object] = field(default_factory=list)
    reopen: list[Object] = field(default_factory=list)
    granted: list[Object] = field(default_factory=list)
    held: int = 0
    waiting: int = 0
    asking: int = 0


def allocate(
    leases: list[Object],
    incidents: list[Object],
    limit: int,
    dead: Collection[str] = (),
    overlong: Collection[str] = (),
    last_turn: Mapping[str, float] | None = None,
) -> Allocation:
    """Allocate the slots. ``limit`` includes held slots and those left open for a service.

    ``dead`` has the UIDs of Leases that count as free. ``overlong`` has the UIDs of Leases that are
    held but no longer count. ``last_turn`` has the end of each Lease's last turn by UID. Leases
    whose supervisor asks for a slot come first, then the longest since their last turn, then the
    oldest incident by the API server's clock.
    """
    ended = last_turn or {}
    slots = [one for one in leases if _is_slot(one)]
    waits = _waiting_slot_sets(incidents, slots)
    fair = _ShareCounter(slots, limit)
    found = Allocation()
    candidates = []
    for one in slots:
        if holder(one) in ("", HOLDER) or one["metadata"]["uid"] in dead:
            candidates.append(one)
        else:
            found.held += 1
            if one["metadata"]["uid"] not in overlong:
                fair.hold(_key(one))
    waiting = [one for one in candidates if _key(one) in waits]
    waiting.sort(
        key=lambda one: (
            waits[_key(one)][0],
            ended.get(one["metadata"]["uid"], 0.0),
            waits[_key(one)][1],
            _key(one),
            one["metadata"]["name"],
        )
    )
    found.waiting = len(waiting)
    for one in waiting:
        (found.granted if fair.admit(_key(one)) else found.close).append(one)
    found.asking = sum(waits[_key(one)][0] == ASKING for one in found.close)
    closed = {one["metadata"]["uid"] for one in found.close}
    found.reopen = [
        one for one in candidates if holder(one) == HOLDER and one["metadata"]["uid"] not in closed
    ]
    return found


class _ShareCounter:
    """The use of the limit by services and namespaces."""

    def __init__(self, slots: list[Object], limit: int) -> None:
        self._limit = limit
        sets = {_key(one) for one in slots}
        half = -(-limit // SHARES)
        self._of_service = half if len(sets) > 1 else limit
        self._of_namespace = half if len({one.namespace for one in sets}) > 1 else limit
        self._services: Counter[SlotSet] = Counter()
        self._namespaces: Counter[str] = Counter()
        self._used = 0

    def admit(self, key: SlotSet) -> bool:
        """Count one more slot of the service and return True, if the limit allows it."""
        return self._used < self._limit and self.hold(key)

    def hold(self, key: SlotSet) -> bool:
        """Count a slot and return True, unless it exceeds the share of its service or namespace."""
        within = (
            self._services[key] < self._of_service
            and self._namespaces[key.namespace] < self._of_namespace
        )
        self._services[key] += within
        self._namespaces[key.namespace] += within
        self._used += within
        return within


def _waiting_slot_sets(
    incidents: list[Object], slots: list[Object]
) -> dict[SlotSet, tuple[int, str]]:
    """Return the slot sets with an open incident: whether one asks, and the oldest's creation time.

    An incident's opening time and workload are claims of its writer. So the pods that may take a
    policy's slot are read from the slot.
    """
    of_pods: dict[tuple[str, str], SlotSet] | None = None
    found: dict[SlotSet, tuple[int, str]] = {}
    for incident in incidents:
        key = key_of(incident)
        phase = (incident.get("status") or {}).get("phase")
        if key is None or phase in ENDED:
            continue
        if key.kind == POLICY_KIND:
            of_pods = _slot_sets_by_pod(slots) if of_pods is None else of_pods
            of = of_pods.get((key.namespace, incident["spec"]["pod"]))
        else:
            of = SlotSet(key.namespace, key.name)
        if of is None:
            continue
        asks, since = found.get(of, (IDLE, LATEST))
        created = incident["metadata"].get("creationTimestamp") or LATEST
        found[of] = (min(asks, ASKING if phase == AWAITING_SLOT else IDLE), min(since, created))
    return found


def _slot_sets_by_pod(slots: list[Object]) -> dict[tuple[str, str], SlotSet]:
    return {
        (one["metadata"]["namespace"], pod): _key(one)
        for one in slots
        for pods in parse_replicas(_annotation(one, SLOT_REPLICAS))
        for pod in pods
    }


def holder(lease: Object) -> str:
    """Return the holder of the Lease; empty if it is free."""
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


def _is_slot(lease: Object) -> bool:
    """Report whether the Lease has the name of a slot; anyone may put our label on a Lease.

    A policy's slot that is free and that no pod may take does not count.
    """
    key, name = key_of(lease), lease["metadata"]["name"]
    if key is None:
        return False
    if key.kind != POLICY_KIND:
        return name in key.slots(MAX_SLOTS)
    if not holder(lease) and not _annotation(lease, SLOT_REPLICAS):
        return False
    workload = WorkloadRef.parse(_annotation(lease, SLOT_WORKLOAD))
    return name in slot_names(key.name, workload, MAX_SLOTS)


def _annotation(lease: Object, name: str) -> str:
    return str((lease["metadata"].get("annotations") or {}).get(name, ""))


def _key(lease: Object) -> SlotSet:
    meta = lease["metadata"]
    return SlotSet(meta["namespace"], meta["name"].rpartition("-restart-")[0])
