"""Hold restart slots: Leases that limit how many replicas of a service restart at the same time.

Each supervisor measures the expiry of a slot with the clock of its own node, because clocks of
different nodes may differ. The PUT request that takes a slot also counts the restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from plimsoll_api.incidents import WaitReason
from plimsoll_api.names import (
    EXPECTED_REPLICAS_ANNOTATION,
    OPERATOR_NAME,
    SLOT_REPLICAS_ANNOTATION,
    SLOT_ROLES_ANNOTATION,
)
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import RestartBudget
from plimsoll_api.times import format_rfc3339_micro
from plimsoll_api.units import parse_whole_number
from plimsoll_api.workloads import PARTNER_ROLES, parse_replicas, parse_roles
from plimsoll_sidecar.act import lease_counts
from plimsoll_sidecar.clients.kube import (
    ConflictError,
    ForbiddenError,
    KubeClient,
    KubeError,
    NotFoundError,
    Object,
)
from plimsoll_sidecar.govern.command import Refusal, SlotRequest
from plimsoll_sidecar.govern.restart_budget import NO_RESTARTS, ReplicaRestarts

# A container restarts within seconds.
LEASE_DURATION_S = 60
# A restart of the group may replace all its pods. Until the new leader runs, nothing renews the
# slot.
GROUP_LEASE_DURATION_S = 300
RENEW_INTERVAL_S = 15.0
NOT_CREATED_ERRORS = (ForbiddenError, NotFoundError)
"""Errors before the operator has created the slot and granted this pod access to it."""


class SlotLostError(Exception):
    """Another replica has taken the slot of a running restart."""


class Slots:
    """Restart slots without a cluster, in which the only replica may always restart.

    The owner of the journal sets ``known_restarts`` and ``slot_request``, which is None until the
    journal has been read.
    """

    known_restarts = NO_RESTARTS
    slot_request: SlotRequest | None = None

    def acquire(
        self, incident: str, budget: RestartBudget, counted_at: float | None = None
    ) -> Refusal | None:
        """Acquire a slot, and return None if this replica now holds it, or else the refusal.

        A restart within ``budget`` is counted at ``counted_at``, in Unix seconds. None acquires a
        lost slot again without counting a restart.
        """
        return None

    def ensure_held(self, incident: str, budget: RestartBudget) -> Refusal | None:
        """Renew the slot or acquire it again. Return None on success, or else the refusal."""
        return None

    def reconcile(self, budget: RestartBudget) -> None:
        """Renew the slot if ``slot_request`` names an incident, or else release it."""

    def read_stored_restarts(self) -> ReplicaRestarts:
        """Return the restarts of this replica that are stored outside its journal."""
        return NO_RESTARTS

    def store_restarts(self, budget: RestartBudget) -> None:
        """Store ``known_restarts`` outside the journal if they have changed."""


class LeaseSlots(Slots):
    """Restart slots as Leases of the API server. Thread-safe.

    The methods raise KubeError if the API server does not answer, and UnreadableCountError if a
    restart count is invalid. ``holder`` is the name of this replica's pod.
    """

    def __init__(
        self,
        kube: KubeClient,
        namespace: str,
        lease_names: tuple[str, ...],
        holder: str,
        clock: Callable[[], float] = time.monotonic,
        replica_key: str = "",
        lease_duration_s: int = LEASE_DURATION_S,
    ) -> None:
        self._kube, self._holder, self._clock = kube, holder, clock
        self._lease_duration_s = lease_duration_s
        self._lease_names, self._replica_key = lease_names, replica_key or holder
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._seen_specs: dict[str, tuple[Object, float]] = {}
        self._held_name: str | None = None
        self._renewed_at = 0.0
        self._has_released_all = False
        """True once all slots were released, including those of an earlier process."""
        self._last_stored: ReplicaRestarts | None = None
        self._lock = threading.RLock()

    def acquire(
        self, incident: str, budget: RestartBudget, counted_at: float | None = None
    ) -> Refusal | None:
        """Acquire a free or expired slot. Return None on success, or else the refusal."""
        with self._lock:
            try:
                return self._acquire_any_slot(incident, budget, counted_at)
            except NOT_CREATED_ERRORS as error:
                text = f"the operator has not created a restart slot for this pod yet: {error}"
                return Refusal(WaitReason.NO_SLOT, text)

    def list_replicas(self) -> list[tuple[str, ...]]:
        """Return the pods with this replica's role, grouped by replica. Raises KubeError.

        The result is empty if the Lease names no pods or does not exist yet.
        """
        annotations = self._read_annotations()
        replicas = parse_replicas(annotations.get(SLOT_REPLICAS_ANNOTATION, ""))
        roles = parse_roles(annotations.get(SLOT_ROLES_ANNOTATION, ""))
        own = next((set(pods) for pods in roles.values() if self._holder in pods), None)
        return (
            replicas
            if own is None
            else [replica for replica in replicas if not own.isdisjoint(replica)]
        )

    def read_expected_replicas(self) -> int:
        """Return the number of desired replicas; 0 if unknown. Raises KubeError."""
        text = self._read_annotations().get(EXPECTED_REPLICAS_ANNOTATION, "")
        return parse_whole_number(text) or 0

    def list_partners(self, role: PodRole | None) -> tuple[str, ...]:
        """Return the pods that exchange KV blocks with pods of ``role``. Raises KubeError."""
        partner = PARTNER_ROLES.get(role) if role is not None else None
        if partner is None:
            return ()
        return parse_roles(self._read_annotations().get(SLOT_ROLES_ANNOTATION, "")).get(partner, ())

    def _read_annotations(self) -> dict[str, str]:
        try:
            lease = self._kube.get(f"{self._path}/{self._lease_names[0]}")
        except NOT_CREATED_ERRORS:
            return {}
        return lease["metadata"].get("annotations") or {}

    def _acquire_any_slot(
        self, incident: str, budget: RestartBudget, counted_at: float | None
    ) -> Refusal | None:
        leases = self._read_leases()
        leases.sort(key=lambda lease: _get_holder(lease) != self._holder)
        # A slot that an earlier incident still holds does not pay for this one.
        is_counted = counted_at is None or self._has_counted(leases, incident, budget)
        if not (is_counted and leases and _get_holder(leases[0]) == self._holder):
            spent = self._check_budgets(leases, budget, counted_at)
            if spent is not None:
                return spent
        refusals = []
        for lease in leases:
            refusal = self._refuse_if_occupied(lease)
            refusal = refusal or self._acquire_lease(lease, leases, incident, budget, counted_at)
            if refusal is None:
                return None
            refusals.append(refusal)
        if not refusals:
            return Refusal(
                WaitReason.NO_SLOT, "the configuration lists no restart slot for the service"
            )
        return Refusal(refusals[0].reason, "; ".join(refusal.message for refusal in refusals))

    def _has_counted(self, leases: list[Object], incident: str, budget: RestartBudget) -> bool:
        now = self._kube.estimate_server_time()
        return any(
            restart.incident == incident
            for lease in leases
            for restart in lease_counts.read_service_restarts(lease, budget.window_s, now)
        )

    def ensure_held(self, incident: str, budget: RestartBudget) -> Refusal | None:
        """Renew the slot or acquire it again. Return None on success, or else the refusal."""
        with self._lock:
            return None if self._renew_if_due() else self.acquire(incident, budget)

    def reconcile(self, budget: RestartBudget) -> None:
        """Renew the slot if ``slot_request`` names an incident, or else release it.

        Raises SlotLostError if another replica has taken the slot.
        """
        with self._lock:
            # Read under the lock: ``slot_request`` is set before the command that takes a slot.
            request = self.slot_request
            if request is None or request.taking:
                return
            if request.incident is None:
                self.release_all_slots()
            elif (refusal := self.ensure_held(request.incident, budget)) is not None:
                raise SlotLostError(f"the restart slot was lost: {refusal.message}")

    def _renew_if_due(self) -> bool:
        if self._held_name is None:
            return False
        age = self._clock() - self._renewed_at
        if age < RENEW_INTERVAL_S:
            return True
        try:
            lease = self._kube.get(f"{self._path}/{self._held_name}")
            if _get_holder(lease) == self._holder:
                lease["spec"]["renewTime"] = self._format_server_time()
                self._kube.put(f"{self._path}/{self._held_name}", lease)
                self._renewed_at = self._clock()
                return True
        except NotFoundError:
            pass
        except KubeError:
            # An API server that has just started answers 401 or 403 until it has read the roles.
            return age < self._lease_duration_s
        self._held_name = None
        return False

    def release_all_slots(self) -> None:
        """Release all slots of this replica, including those of an earlier process."""
        with self._lock:
            if self._has_released_all:
                return
            for lease in self._read_leases():
                if _get_holder(lease) == self._holder:
                    spec = lease["spec"]
                    spec.update(
                        holderIdentity="",
                        renewTime=self._format_server_time(),
                        leaseDurationSeconds=1,
                    )
                    self._kube.put(self._make_path(lease), lease)
            self._held_name, self._has_released_all = None, True

    def read_stored_restarts(self) -> ReplicaRestarts:
        """Return the restarts of this replica that are stored in the Leases."""
        with self._lock:
            restarts = self._merge_stored_restarts(self._read_leases())
            self._last_stored = restarts
            return restarts

    def store_restarts(self, budget: RestartBudget) -> None:
        """Store ``known_restarts`` in the Leases if they have changed without a slot."""
        with self._lock:
            restarts = self.known_restarts
            if restarts == self._last_stored:
                return
            for number, lease in enumerate(self._read_leases()):
                restarts_to_store = restarts if number == 0 else NO_RESTARTS
                if (
                    lease_counts.read_replica_restarts(lease, self._replica_key)
                    != restarts_to_store
                ):
                    now = self._kube.estimate_server_time()
                    lease_counts.store_replica_restarts(
                        lease, self._replica_key, restarts_to_store, budget.window_s, now
                    )
                    self._kube.put(self._make_path(lease), lease)
            self._last_stored = restarts

    def _format_server_time(self) -> str:
        return format_rfc3339_micro(self._kube.estimate_server_time())

    def _read_leases(self) -> list[Object]:
        return [self._kube.get(f"{self._path}/{name}") for name in self._lease_names]

    def _make_path(self, lease: Object) -> str:
        return f"{self._path}/{lease['metadata']['name']}"

    def _merge_stored_restarts(self, leases: list[Object]) -> ReplicaRestarts:
        restarts = NO_RESTARTS
        for lease in leases:
            restarts = restarts.merge(lease_counts.read_replica_restarts(lease, self._replica_key))
        return restarts

    def _check_budgets(
        self, leases: list[Object], budget: RestartBudget, counted_at: float | None
    ) -> Refusal | None:
        now, within = self._kube.estimate_server_time(), f"within {budget.window_s:.0f} s"
        counts = [
            len(lease_counts.read_service_restarts(lease, budget.window_s, now)) for lease in leases
        ]
        limit = budget.count * len(leases)
        if sum(counts) >= limit:
            return Refusal(
                WaitReason.SERVICE_RESTART_BUDGET,
                f"the service had {sum(counts)} restarts {within}, but the limit is {limit}",
            )
        mine = self._merge_stored_restarts(leases).merge(self.known_restarts)
        # These times come from the clock of this replica's journal, as does ``counted_at``.
        count = (
            0 if counted_at is None else len(mine.list_within_window(budget.window_s, counted_at))
        )
        if counted_at is None or counted_at in mine.at:
            return None
        if not mine.exhausted and count < budget.count:
            return None
        return Refusal(
            WaitReason.REPLICA_RESTART_BUDGET,
            f"this replica had {count} restarts {within}, but the limit is {budget.count}",
        )

    def _refuse_if_occupied(self, lease: Object) -> Refusal | None:
        name, spec, now = lease["metadata"]["name"], lease.get("spec") or {}, self._clock()
        seen_spec, since = self._seen_specs.get(name, ({}, now))
        if seen_spec != spec:
            # Others write the metadata, too, so only a change of the spec shows that the holder is
            # alive.
            self._seen_specs[name] = (spec, now)
            since = now
        holder = _get_holder(lease)
        if holder in ("", self._holder) or now - since > (
            spec.get("leaseDurationSeconds") or LEASE_DURATION_S
        ):
            return None
        if holder == OPERATOR_NAME:
            return Refusal(
                WaitReason.CIRCUIT_BREAKER,
                f"the circuit breaker holds the slot {name}, because the maximum number of "
                "replicas is already restarting",
            )
        return Refusal(WaitReason.SLOT_HELD, f"{holder} holds the slot {name}")

    def _acquire_lease(
        self, lease: Object, leases: list[Object], incident: str, budget: RestartBudget,
        counted_at: float | None,
    ) -> Refusal | None:  # fmt: skip
        metadata, spec, now = (
            lease["metadata"],
            lease.get("spec") or {},
            self._kube.estimate_server_time(),
        )
        if spec.get("holderIdentity") != self._holder:
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = self._format_server_time()
        spec.update(
            holderIdentity=self._holder,
            renewTime=self._format_server_time(),
            leaseDurationSeconds=self._lease_duration_s,
        )
        lease["spec"] = spec
        lease_counts.add_service_restart(lease, incident, budget.window_s, now)
        mine = self._merge_stored_restarts(leases).merge(self.known_restarts)
        if counted_at is not None:
            mine = mine.merge(ReplicaRestarts((counted_at,)))
        lease_counts.store_replica_restarts(lease, self._replica_key, mine, budget.window_s, now)
        self._has_released_all = False  # a request without a response may have succeeded
        try:
            self._kube.put(self._make_path(lease), lease)
        except ConflictError:
            return Refusal(
                WaitReason.SLOT_CONFLICT,
                f"another replica took the slot {metadata['name']} at the same time",
            )
        self._held_name, self._renewed_at, self._last_stored = metadata["name"], self._clock(), None
        return None


def _get_holder(lease: Object) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""
