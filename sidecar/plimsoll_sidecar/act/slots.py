"""Restart slots: Leases that limit how many replicas of a service restart at the same time.

The operator creates the Leases. A supervisor takes, renews and releases them by PUT with the
resource version that it read, so only one of two concurrent writers succeeds. A holder has expired
if the spec of its Lease did not change for its duration, measured by this node's clock: clocks of
different nodes are never compared. Counts use the API server's time.

The desired state of the Leases is stored in the journal only, as ``wanted``: the incident that
needs a slot, or none. :meth:`Slots.reconcile` applies it every few seconds.

The PUT that takes a slot also updates the restart counts in the annotations (see
:mod:`plimsoll_sidecar.act.lease_counts`), so every restart is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from plimsoll_api.incidents import WaitReason
from plimsoll_api.names import OPERATOR, SLOT_REPLICAS
from plimsoll_api.supervision import RestartBudget
from plimsoll_api.times import rfc3339_micro
from plimsoll_api.workloads import parse_replicas
from plimsoll_sidecar.act import lease_counts
from plimsoll_sidecar.clients.kube import (
    Conflict,
    Forbidden,
    KubeClient,
    KubeError,
    NotFound,
    Object,
)
from plimsoll_sidecar.govern.command import Refusal, SlotRequest
from plimsoll_sidecar.govern.restart_budget import NONE, ReplicaRestarts

LEASE_DURATION_S = 60
"""Seconds without a renewal after which a holder has expired: its container restarts in seconds."""
RENEW_S = 15.0
NOT_CREATED = (Forbidden, NotFound)
"""Errors if the operator has not created the slot, or has not yet given this pod access to it."""


class SlotLostError(Exception):
    """Another replica holds the slot of a restart that is in progress."""


class Slots:
    """Restart slots without a cluster: there is one replica, and it may always restart.

    ``known`` and ``wanted`` come from the journal of this replica; the owner of the journal sets
    them. ``known`` are its restarts. ``wanted`` is the incident that needs a slot; None until the
    journal has been read.
    """

    known = NONE
    wanted: SlotRequest | None = None

    def take(self, incident: str, policy: RestartBudget, at: float | None = None) -> Refusal | None:
        """Acquire a slot. Return None if one is held, otherwise the reason.

        ``at`` counts a restart of this replica at that time, in Unix seconds, if its budget allows
        it. With None, a slot that was lost is taken again.
        """
        return None

    def ensure_held(self, incident: str, policy: RestartBudget) -> Refusal | None:
        """Renew the slot or take it again; return None if it is held, else why not."""
        return None

    def reconcile(self, policy: RestartBudget) -> None:
        """Renew or release the slot, as ``wanted`` says."""

    def read_stored(self) -> ReplicaRestarts:
        """Return the restarts of this replica that are stored outside of its journal."""
        return NONE

    def store(self, policy: RestartBudget) -> None:
        """Store ``known`` outside of the journal, if it has changed."""


class LeaseSlots(Slots):
    """Restart slots as Leases of the API server. Thread-safe.

    ``uid`` is the pod's UID: the count of a replica ends with its pod. The methods raise KubeError
    if the API server does not answer, and UnreadableError for an invalid count.
    """

    def __init__(
        self,
        kube: KubeClient,
        namespace: str,
        names: tuple[str, ...],
        holder: str,
        clock: Callable[[], float] = time.monotonic,
        uid: str = "",
    ) -> None:
        self._kube, self._names, self._holder, self._clock = kube, names, holder, clock
        self._uid = uid or holder
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._seen_specs: dict[str, tuple[Object, float]] = {}
        self._held_name: str | None = None
        self._renewed = 0.0
        self._holds_none = False
        """True once all slots were released, also those that an earlier process took."""
        self._last_stored: ReplicaRestarts | None = None
        self._lock = threading.RLock()

    def take(self, incident: str, policy: RestartBudget, at: float | None = None) -> Refusal | None:
        """Acquire the slot that this replica already holds, or one that is free or expired.

        Return None if a slot is held, otherwise the reason.
        """
        with self._lock:
            try:
                return self._take(incident, policy, at)
            except NOT_CREATED as error:
                text = f"the operator has no restart slot for this pod yet: {error}"
                return Refusal(WaitReason.NO_SLOT, text)

    def replicas(self) -> list[tuple[str, ...]]:
        """Return the pods that may take this slot, grouped by replica. Raises KubeError.

        Empty if the Lease names none or does not exist yet.
        """
        try:
            lease = self._kube.get(f"{self._path}/{self._names[0]}")
        except NOT_CREATED:
            return []
        return parse_replicas((lease["metadata"].get("annotations") or {}).get(SLOT_REPLICAS, ""))

    def _take(self, incident: str, policy: RestartBudget, at: float | None) -> Refusal | None:
        leases = self._leases()
        for lease in leases:
            if _holder(lease) == self._holder:
                return self._acquire(lease, leases, incident, policy, at)
        spent = self._exhausted_budget(leases, policy, at)
        if spent is not None:
            return spent
        refusals = []
        for lease in leases:
            refusal = self._reason_not_free(lease)
            refusal = refusal or self._acquire(lease, leases, incident, policy, at)
            if refusal is None:
                return None
            refusals.append(refusal)
        if not refusals:
            return Refusal(WaitReason.NO_SLOT, "the service has no restart slot")
        return Refusal(refusals[0].reason, "; ".join(one.message for one in refusals))

    def ensure_held(self, incident: str, policy: RestartBudget) -> Refusal | None:
        """Renew the slot if that is due, or take it again.

        Return None if it is held, else why not.
        """
        with self._lock:
            return None if self._renew_if_due() else self.take(incident, policy)

    def reconcile(self, policy: RestartBudget) -> None:
        """Renew the slot while it is wanted, and release it afterwards.

        Raises SlotLostError if another replica has taken it.
        """
        with self._lock:
            # Read under the lock: ``wanted`` is set before the command that takes a slot.
            wanted = self.wanted
            if wanted is None or wanted.taking:
                return
            if wanted.incident is None:
                self.release()
            elif (refusal := self.ensure_held(wanted.incident, policy)) is not None:
                raise SlotLostError(f"the restart slot was lost: {refusal.message}")

    def _renew_if_due(self) -> bool:
        """Report whether this replica still holds its slot, and renew it if that is due."""
        if self._held_name is None:
            return False
        age = self._clock() - self._renewed
        if age < RENEW_S:
            return True
        try:
            lease = self._kube.get(f"{self._path}/{self._held_name}")
            if _holder(lease) == self._holder:
                lease["spec"]["renewTime"] = self._now()
                self._kube.put(f"{self._path}/{self._held_name}", lease)
                self._renewed = self._clock()
                return True
        except KubeError as error:
            if error.is_transient or isinstance(error, Conflict):
                return age < LEASE_DURATION_S
        self._held_name = None
        return False

    def release(self) -> None:
        """Release all slots of this replica, also those that an earlier process took."""
        with self._lock:
            if self._holds_none:
                return
            for lease in self._leases():
                if _holder(lease) == self._holder:
                    spec = lease["spec"]
                    spec.update(holderIdentity="", renewTime=self._now(), leaseDurationSeconds=1)
                    self._kube.put(self._url(lease), lease)
            self._held_name, self._holds_none = None, True

    def read_stored(self) -> ReplicaRestarts:
        """Return the restarts of this replica on the Leases; they outlive its journal."""
        with self._lock:
            found = self._sum_stored(self._leases())
            self._last_stored = found
            return found

    def store(self, policy: RestartBudget) -> None:
        """Store a count that changed without a slot: after a crash, a manual restart or a reset."""
        with self._lock:
            known = self.known
            if known == self._last_stored:
                return
            for number, lease in enumerate(self._leases()):
                kept = known if number == 0 else NONE
                if lease_counts.replica_restarts(lease, self._uid) != kept:
                    now = self._kube.now()
                    lease_counts.store_replica(lease, self._uid, kept, policy.window_s, now)
                    self._kube.put(self._url(lease), lease)
            self._last_stored = known

    def _now(self) -> str:
        """Return the API server's time as a MicroTime."""
        return rfc3339_micro(self._kube.now())

    def _leases(self) -> list[Object]:
        return [self._kube.get(f"{self._path}/{name}") for name in self._names]

    def _url(self, lease: Object) -> str:
        return f"{self._path}/{lease['metadata']['name']}"

    def _sum_stored(self, leases: list[Object]) -> ReplicaRestarts:
        found = NONE
        for lease in leases:
            found = found.merge(lease_counts.replica_restarts(lease, self._uid))
        return found

    def _exhausted_budget(
        self, leases: list[Object], policy: RestartBudget, at: float | None
    ) -> Refusal | None:
        """Return a refusal if the restart budget of the service or of this replica is exhausted."""
        now, within = self._kube.now(), f"within {policy.window_s:.0f} s"
        counts = [len(lease_counts.service_restarts(one, policy.window_s, now)) for one in leases]
        limit = policy.count * len(leases)
        if sum(counts) >= limit:
            return Refusal(
                WaitReason.SERVICE_RESTART_BUDGET,
                f"the service had {sum(counts)} restarts {within}; the limit is {limit}",
            )
        mine = self._sum_stored(leases).merge(self.known)
        # The clock of this replica's journal counted them.
        count = 0 if at is None else len(mine.within(policy.window_s, at))
        if at is None or at in mine.at or not (mine.exhausted or count >= policy.count):
            return None
        return Refusal(
            WaitReason.REPLICA_RESTART_BUDGET,
            f"this replica had {count} restarts {within}; the limit is {policy.count}",
        )

    def _reason_not_free(self, lease: Object) -> Refusal | None:
        """Return why this slot is not free; None if it is."""
        name, spec, now = lease["metadata"]["name"], lease.get("spec") or {}, self._clock()
        known, since = self._seen_specs.get(name, ({}, now))
        if known != spec:
            # Others write the metadata, too: only the spec shows that the holder is alive.
            self._seen_specs[name] = (spec, now)
            since = now
        holder = _holder(lease)
        if not holder or now - since > (spec.get("leaseDurationSeconds") or LEASE_DURATION_S):
            return None
        if holder == OPERATOR:
            return Refusal(
                WaitReason.CIRCUIT_BREAKER,
                f"the circuit breaker holds {name}: as many replicas as the operator"
                " allows are restarting",
            )
        return Refusal(WaitReason.SLOT_HELD, f"{name} is held by {holder}")

    def _acquire(
        self, lease: Object, leases: list[Object], incident: str, policy: RestartBudget,
        at: float | None,
    ) -> Refusal | None:  # fmt: skip
        metadata, spec, now = lease["metadata"], lease.get("spec") or {}, self._kube.now()
        if spec.get("holderIdentity") != self._holder:
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = self._now()
        spec.update(
            holderIdentity=self._holder,
            renewTime=self._now(),
            leaseDurationSeconds=LEASE_DURATION_S,
        )
        lease["spec"] = spec
        lease_counts.count_service(lease, incident, policy.window_s, now)
        mine = self._sum_stored(leases).merge(self.known)
        if at is not None:
            mine = mine.merge(ReplicaRestarts((at,)))
        lease_counts.store_replica(lease, self._uid, mine, policy.window_s, now)
        self._holds_none = False  # a request without a response may have succeeded
        try:
            self._kube.put(self._url(lease), lease)
        except Conflict:
            return Refusal(
                WaitReason.SLOT_CONFLICT,
                f"another replica took {metadata['name']} at the same time",
            )
        self._held_name, self._renewed, self._last_stored = metadata["name"], self._clock(), None
        return None


def _holder(lease: Object) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""
