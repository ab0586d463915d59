"""Restart slots: Leases that bound how many replicas of a service restart at once.

The operator creates them; a supervisor takes, renews and releases them by PUT with the resource
version it read, so that of two supervisors one always loses. A holder is expired when the
spec of its Lease did not change for its duration *by this machine's clock*: clocks of two nodes are
never compared. Counts use the API server's time.

The desired state of the Leases is in the journal alone, as ``wanted``: the incident that needs a
slot, or none. :meth:`Slots.follow` brings the Leases to that state every few seconds.

The PUT that takes the slot also writes the annotations that count restarts (see
:mod:`plimsoll_sidecar.act.lease_counts`): no restart is left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from plimsoll_api.incidents import WaitReason
from plimsoll_api.names import OPERATOR, SLOT_REPLICAS
from plimsoll_api.supervision import RestartBudget
from plimsoll_api.times import rfc3339_micro
from plimsoll_api.workloads import replicas_in
from plimsoll_sidecar.act import lease_counts
from plimsoll_sidecar.clients.kube import (
    Conflict,
    Forbidden,
    KubeClient,
    KubeError,
    NotFound,
    Object,
)
from plimsoll_sidecar.govern.command import Refusal, SlotWish
from plimsoll_sidecar.govern.restart_budget import NONE, ReplicaRestarts

DURATION_S = 60
"""A holder that does not renew for this long is dead: its container restarts in seconds."""
RENEW_S = 15.0
NOT_YET = (Forbidden, NotFound)
"""What the API server says of a slot that the operator has not made, or not for this pod."""


class SlotLostError(Exception):
    """The slot of a restart that is under way is held by another replica."""


class Slots:
    """Restart slots without a cluster: there is one replica, and it may always restart.

    ``known`` and ``wanted`` come from this replica's journal; the journal's writer sets them.
    ``known`` are its restarts. ``wanted`` says for which incident it wants a slot; it is None until
    the journal has been read.
    """

    known = NONE
    wanted: SlotWish | None = None

    def take(self, incident: str, policy: RestartBudget, at: float | None = None) -> Refusal | None:
        """Take a slot; return None if one is held, else the reason why not.

        ``at`` counts a restart of this replica at that time, in Unix seconds, if its budget allows
        one. None takes a slot back that was lost.
        """
        return None

    def held(self, incident: str, policy: RestartBudget) -> Refusal | None:
        """Renew the slot or take it back; return why there is none, None where one is held."""
        return None

    def follow(self, policy: RestartBudget) -> None:
        """Make the Leases what is wanted: renew the slot, or give it back."""

    def stored(self) -> ReplicaRestarts:
        """Read the restarts of this replica that are kept outside of its journal."""
        return NONE

    def keep(self, policy: RestartBudget) -> None:
        """Write ``known`` outside of the journal, if it has changed."""


class LeaseSlots(Slots):
    """Restart slots as Leases of the API server. Safe to use from several threads.

    ``uid`` is the pod's: a replica's count ends with its pod. The methods raise KubeError if the
    API server does not answer, and UnreadableError for a count that cannot be read.
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
        self._seen: dict[str, tuple[Object, float]] = {}
        self._mine: str | None = None
        self._renewed = 0.0
        self._free = False
        """Whether this replica certainly holds no slot: an earlier process of it may have one."""
        self._kept: ReplicaRestarts | None = None
        self._lock = threading.RLock()

    def take(self, incident: str, policy: RestartBudget, at: float | None = None) -> Refusal | None:
        """Take the replica's own slot again, or one that is free or expired.

        Returns None if a slot is held, else a Refusal with the reason.
        """
        with self._lock:
            try:
                return self._take(incident, policy, at)
            except NOT_YET as error:
                text = f"the operator has no restart slot for this pod yet: {error}"
                return Refusal(WaitReason.NO_SLOT, text)

    def replicas(self) -> list[tuple[str, ...]]:
        """Read which pods may take this slot, by replica. Raises KubeError.

        Empty if its Lease names none, or does not exist yet.
        """
        try:
            lease = self._kube.get(f"{self._path}/{self._names[0]}")
        except NOT_YET:
            return []
        return replicas_in((lease["metadata"].get("annotations") or {}).get(SLOT_REPLICAS, ""))

    def _take(self, incident: str, policy: RestartBudget, at: float | None) -> Refusal | None:
        leases = self._leases()
        for lease in leases:
            if _holder(lease) == self._holder:
                return self._put(lease, leases, incident, policy, at)
        spent = self._spent(leases, policy, at)
        if spent is not None:
            return spent
        refusals = []
        for lease in leases:
            refusal = self._refused(lease)
            refusal = refusal or self._put(lease, leases, incident, policy, at)
            if refusal is None:
                return None
            refusals.append(refusal)
        if not refusals:
            return Refusal(WaitReason.NO_SLOT, "the service has no restart slot")
        return Refusal(refusals[0].reason, "; ".join(one.message for one in refusals))

    def held(self, incident: str, policy: RestartBudget) -> Refusal | None:
        """Renew the slot when that is due, or take it back; return why there is none."""
        with self._lock:
            return None if self._renewed_in_time() else self.take(incident, policy)

    def follow(self, policy: RestartBudget) -> None:
        """Renew the slot for as long as it is wanted, then free it for the next replica.

        Raises SlotLostError if another replica has taken it meanwhile.
        """
        with self._lock:
            # Read under the lock: a command that takes a slot writes ``wanted`` before.
            wanted = self.wanted
            if wanted is None or wanted.taking:
                return
            if wanted.incident is None:
                self.release()
            elif (refusal := self.held(wanted.incident, policy)) is not None:
                raise SlotLostError(f"the restart slot was lost: {refusal.message}")

    def _renewed_in_time(self) -> bool:
        """Whether the slot is ours, renewed when it is due; False once another may have it."""
        if self._mine is None:
            return False
        age = self._clock() - self._renewed
        if age < RENEW_S:
            return True
        try:
            lease = self._kube.get(f"{self._path}/{self._mine}")
            if _holder(lease) == self._holder:
                lease["spec"]["renewTime"] = self._now()
                self._kube.put(f"{self._path}/{self._mine}", lease)
                self._renewed = self._clock()
                return True
        except KubeError as error:
            if error.transient or isinstance(error, Conflict):
                return age < DURATION_S
        self._mine = None
        return False

    def release(self) -> None:
        """Free every slot of this holder, also from before its own restart. Once."""
        with self._lock:
            if self._free:
                return
            for lease in self._leases():
                if _holder(lease) == self._holder:
                    spec = lease["spec"]
                    spec.update(holderIdentity="", renewTime=self._now(), leaseDurationSeconds=1)
                    self._kube.put(self._url(lease), lease)
            self._mine, self._free = None, True

    def stored(self) -> ReplicaRestarts:
        """Read the restarts that the Leases count for this replica; they outlive its journal."""
        with self._lock:
            found = self._stored(self._leases())
            self._kept = found
            return found

    def keep(self, policy: RestartBudget) -> None:
        """Write a count that changed without a slot: a crash, a restart by hand, a reset."""
        with self._lock:
            known = self.known
            if known == self._kept:
                return
            for number, lease in enumerate(self._leases()):
                kept = known if number == 0 else NONE
                if lease_counts.of_replica(lease, self._uid) != kept:
                    now = self._kube.now()
                    lease_counts.keep_replica(lease, self._uid, kept, policy.window_s, now)
                    self._kube.put(self._url(lease), lease)
            self._kept = known

    def _now(self) -> str:
        """Return the present time as the API writes a MicroTime."""
        return rfc3339_micro(self._kube.now())

    def _leases(self) -> list[Object]:
        return [self._kube.get(f"{self._path}/{name}") for name in self._names]

    def _url(self, lease: Object) -> str:
        return f"{self._path}/{lease['metadata']['name']}"

    def _stored(self, leases: list[Object]) -> ReplicaRestarts:
        found = NONE
        for lease in leases:
            found = found.joined(lease_counts.of_replica(lease, self._uid))
        return found

    def _spent(
        self, leases: list[Object], policy: RestartBudget, at: float | None
    ) -> Refusal | None:
        """Whether the budget of the service or of this replica forbids one more restart."""
        now, within = self._kube.now(), f"within {policy.window_s:.0f} s"
        counts = [len(lease_counts.service_restarts(one, policy.window_s, now)) for one in leases]
        limit = policy.count * len(leases)
        if sum(counts) >= limit:
            return Refusal(
                WaitReason.SERVICE_RESTART_BUDGET,
                f"the service had {sum(counts)} restarts {within}; the limit is {limit}",
            )
        mine = self._stored(leases).joined(self.known)
        # By the clock of this replica's journal, which counted them.
        count = 0 if at is None else len(mine.within(policy.window_s, at))
        if at is None or at in mine.at or not (mine.exhausted or count >= policy.count):
            return None
        return Refusal(
            WaitReason.REPLICA_RESTART_BUDGET,
            f"this replica had {count} restarts {within}; the limit is {policy.count}",
        )

    def _refused(self, lease: Object) -> Refusal | None:
        """Why this slot is not free; None where it is."""
        name, spec, now = lease["metadata"]["name"], lease.get("spec") or {}, self._clock()
        known, since = self._seen.get(name, ({}, now))
        if known != spec:
            # Its metadata is written by others, too: that a holder lives shows in the spec alone.
            self._seen[name] = (spec, now)
            since = now
        holder = _holder(lease)
        if not holder or now - since > (spec.get("leaseDurationSeconds") or DURATION_S):
            return None
        if holder == OPERATOR:
            return Refusal(
                WaitReason.CIRCUIT_BREAKER,
                f"the circuit breaker holds {name}: as many replicas as the operator"
                " allows are restarting",
            )
        return Refusal(WaitReason.SLOT_HELD, f"{name} is held by {holder}")

    def _put(
        self, lease: Object, leases: list[Object], incident: str, policy: RestartBudget,
        at: float | None,
    ) -> Refusal | None:  # fmt: skip
        metadata, spec, now = lease["metadata"], lease.get("spec") or {}, self._kube.now()
        if spec.get("holderIdentity") != self._holder:
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = self._now()
        spec.update(
            holderIdentity=self._holder, renewTime=self._now(), leaseDurationSeconds=DURATION_S
        )
        lease["spec"] = spec
        lease_counts.count_service(lease, incident, policy.window_s, now)
        mine = self._stored(leases).joined(self.known)
        if at is not None:
            mine = mine.joined(ReplicaRestarts((at,)))
        lease_counts.keep_replica(lease, self._uid, mine, policy.window_s, now)
        self._free = False  # a request without an answer may have succeeded
        try:
            self._kube.put(self._url(lease), lease)
        except Conflict:
            return Refusal(
                WaitReason.SLOT_CONFLICT,
                f"another replica took {metadata['name']} at the same moment",
            )
        self._mine, self._renewed, self._kept = metadata["name"], self._clock(), None
        return None


def _holder(lease: Object) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""
