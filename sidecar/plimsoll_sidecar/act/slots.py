"""Restart slots: Leases that bound how many replicas of a service restart at once.

The operator creates them; a supervisor takes, renews and releases them by PUT with the resource
version it read, so that of two supervisors one always loses. A holder is expired when its Lease
did not change for its duration *by this machine's clock*: clocks of two nodes are never compared.

The service's restarts are counted in an annotation that is written by the same PUT that takes the
slot: the count outlives pods, and nobody can restart without being counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from plimsoll_api.supervision import RestartBudget
from plimsoll_sidecar.record.kube import KubeClient, KubeError, Object

DURATION_S = 60
"""A holder that does not renew for this long is dead: its container restarts in seconds."""
RENEW_S = 15.0
ANNOTATION = "plimsoll.dev/restarts"
KEPT = 100


class ServiceRestart(msgspec.Struct):
    """One restart within the service: Unix seconds, and the incident it was for."""

    at: float
    incident: str


class Slots(Protocol):
    def take(self, incident: str, policy: RestartBudget) -> str | None:
        """None when a slot is held, else why not."""

    def held(self) -> bool:
        """Whether the slot is still ours, renewed when it is time for it."""

    def release(self) -> None:
        """Gives back whatever this replica holds, also from before a restart of its own."""


class LocalSlots:
    """Without a cluster there is one replica, and it may always restart."""

    def take(self, incident: str, policy: RestartBudget) -> str | None:
        return None

    def held(self) -> bool:
        return True

    def release(self) -> None:
        return None


class LeaseSlots:
    """``release`` and ``take`` raise KubeError when the API server does not answer."""

    def __init__(
        self,
        kube: KubeClient,
        namespace: str,
        names: tuple[str, ...],
        holder: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._names, self._holder, self._clock = kube, names, holder, clock
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._seen: dict[str, tuple[str, float]] = {}
        self._mine: str | None = None
        self._renewed = 0.0

    def take(self, incident: str, policy: RestartBudget) -> str | None:
        leases = [self._kube.get(f"{self._path}/{name}") for name in self._names]
        for lease in leases:
            if _holder(lease) == self._holder:
                return self._put(lease, incident, policy)
        restarts = sum(len(_restarts(lease, policy.window_s)) for lease in leases)
        limit = policy.count * len(leases)
        if restarts >= limit:
            return (
                f"the service had {restarts} restarts within {policy.window_s:.0f} s,"
                f" {limit} are allowed"
            )
        reasons = []
        for lease in leases:
            name = lease["metadata"]["name"]
            if self._free(lease):
                reason = self._put(lease, incident, policy)
                if reason is None:
                    return None
                reasons.append(reason)
            else:
                reasons.append(f"{name} is held by {_holder(lease)}")
        return "; ".join(reasons) or "the service has no restart slot"

    def held(self) -> bool:
        if self._mine is None:
            return False
        age = self._clock() - self._renewed
        if age < RENEW_S:
            return True
        try:
            lease = self._kube.get(f"{self._path}/{self._mine}")
            if _holder(lease) == self._holder:
                lease["spec"]["renewTime"] = _now()
                self._kube.put(f"{self._path}/{self._mine}", lease)
                self._renewed = self._clock()
                return True
        except KubeError as error:
            if error.transient or error.status == 409:
                return age < DURATION_S
        self._mine = None
        return False

    def release(self) -> None:
        for name in self._names:
            lease = self._kube.get(f"{self._path}/{name}")
            if _holder(lease) == self._holder:
                spec = lease["spec"]
                spec.update(holderIdentity="", renewTime=_now(), leaseDurationSeconds=1)
                self._kube.put(f"{self._path}/{name}", lease)
        self._mine = None

    def _free(self, lease: Object) -> bool:
        metadata, spec = lease["metadata"], lease.get("spec") or {}
        version, now = metadata["resourceVersion"], self._clock()
        known, since = self._seen.get(metadata["name"], ("", now))
        if known != version:
            self._seen[metadata["name"]] = (version, now)
            since = now
        return not _holder(lease) or now - since > (spec.get("leaseDurationSeconds") or DURATION_S)

    def _put(self, lease: Object, incident: str, policy: RestartBudget) -> str | None:
        metadata, spec = lease["metadata"], lease.get("spec") or {}
        if spec.get("holderIdentity") != self._holder:
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = _now()
        spec.update(holderIdentity=self._holder, renewTime=_now(), leaseDurationSeconds=DURATION_S)
        restarts = _restarts(lease, policy.window_s)
        if all(restart.incident != incident for restart in restarts):
            restarts.append(ServiceRestart(time.time(), incident))
        annotations = metadata.get("annotations") or {}
        annotations[ANNOTATION] = msgspec.json.encode(restarts[-KEPT:]).decode()
        metadata["annotations"], lease["spec"] = annotations, spec
        try:
            self._kube.put(f"{self._path}/{metadata['name']}", lease)
        except KubeError as error:
            if error.status == 409:
                return f"{metadata['name']} was taken at the same moment"
            raise
        self._mine, self._renewed = metadata["name"], self._clock()
        return None


def _holder(lease: Object) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""


def _restarts(lease: Object, window_s: float) -> list[ServiceRestart]:
    """The service's restarts within the window; a count that cannot be read is not zero."""
    text = (lease["metadata"].get("annotations") or {}).get(ANNOTATION, "[]")
    try:
        restarts = msgspec.json.decode(text, type=list[ServiceRestart])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        name = lease["metadata"]["name"]
        raise KubeError(422, f"lease {name}: annotation {ANNOTATION}: {error}") from error
    now = time.time()
    return [restart for restart in restarts if now - restart.at < window_s]


def _now() -> str:
    """A MicroTime as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
