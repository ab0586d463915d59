"""Leader election with a Lease, so that only one of several operators leads.

As in client-go, a holder counts as dead if its Lease has not changed for the Lease's duration on
the observer's own clock. Two operators never write at the same time, because each write must
complete within :meth:`Election.get_remaining_s`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable

from plimsoll_api.times import format_rfc3339_micro
from plimsoll_operator.config import DEFAULT_INTERVALS, Intervals
from plimsoll_operator.kinds import LEASE, Object
from plimsoll_operator.render.names import FIELD_MANAGER, MANAGED_BY_LABEL
from plimsoll_operator.runtime.client import Api, ApiError, ConflictError

log = logging.getLogger(__name__)

MAX_LEASE_DURATION_S = 120
"""Maximum duration of a Lease. A longer one is ignored, because it could exclude other operators
forever."""


class LeadershipLostError(Exception):
    """Raised if the Lease was not renewed in time, or if another process holds the Lease."""


class Election:
    """Leader election: call ``acquire``, then ``keep_renewing``, and ``release`` at exit."""

    # ``api`` must not wait when the server throttles its requests.
    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        intervals: Intervals = DEFAULT_INTERVALS,
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._identity, self._clock, self._intervals = identity, clock, intervals
        self._observed_spec: tuple[Object, float] = ({}, -math.inf)
        self._renewed = -math.inf
        self.leading = False

    def is_leader(self) -> bool:
        """Report whether this process leads, and no other process can lead yet."""
        return self.get_remaining_s() > 0

    def get_remaining_s(self) -> float:
        """Return the seconds for which no other process can become the leader; 0 for a standby."""
        if not self.leading:
            return 0.0
        return max(0.0, self._renewed + self._intervals.renew - self._clock())

    async def acquire(self) -> None:
        """Wait until this process leads."""
        logged = ""
        while True:
            try:
                holder = await self._try_acquire(self._intervals.renew)
            except (ApiError, OSError, TimeoutError) as error:
                holder = f"unknown: {str(error) or repr(error)}"
            if self.is_leader():
                log.info("this operator is now the leader, as %s", self._identity)
                return
            if holder != logged:
                log.info("this operator is on standby; the leader is %s", holder)
                logged = holder
            await asyncio.sleep(self._intervals.retry * (1.0 + 0.2 * random.random()))

    async def keep_renewing(self) -> None:
        """Renew the Lease until cancelled. Raises :class:`LeadershipLostError` if it is lost."""
        while self.is_leader():
            await asyncio.sleep(min(self._intervals.retry, self.get_remaining_s()))
            if not self.is_leader():
                break
            try:
                holder = await self._try_acquire(self.get_remaining_s())
            except (ApiError, OSError, TimeoutError) as error:
                log.warning(
                    "failed to renew the leader election Lease: %s", str(error) or repr(error)
                )
            else:
                if not self.leading:
                    raise LeadershipLostError(f"Lease {self._name} is now held by {holder}")
        self.leading = False
        raise LeadershipLostError(
            f"Lease {self._name} was not renewed for {self._clock() - self._renewed:.0f} s"
        )

    async def release(self) -> None:
        """Release the Lease, so that the next leader need not wait; a failure is only logged."""
        if not self.leading:
            return
        self.leading = False
        try:
            async with asyncio.timeout(self._intervals.renew):
                lease = await self._api.get(LEASE, self._namespace, self._name)
                if lease and _get_holder(lease) == self._identity:
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._api.replace(LEASE, lease)
        except (ApiError, OSError, TimeoutError) as error:
            log.warning(
                "failed to release the leader election Lease: %s", str(error) or repr(error)
            )

    # Raises TimeoutError after ``timeout_s`` seconds or half of ``renew``, whichever is shorter.
    async def _try_acquire(self, timeout_s: float) -> str:
        async with asyncio.timeout(min(timeout_s, self._intervals.renew / 2)):
            lease = await self._api.get(LEASE, self._namespace, self._name)
            if lease is None:
                return await self._write(self._make_lease())
            holder = _get_holder(lease)
            if holder not in ("", self._identity) and not self._is_expired(lease):
                self.leading = False
                return holder
            return await self._write(lease | {"spec": self._make_acquired_spec(lease)})

    def _make_acquired_spec(self, lease: Object) -> Object:
        spec = dict(lease.get("spec") or {})
        if _get_holder(lease) != self._identity:
            spec["acquireTime"] = _format_now()
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        return spec | {
            "holderIdentity": self._identity,
            "renewTime": _format_now(),
            "leaseDurationSeconds": self._duration_s,
        }

    async def _write(self, lease: Object) -> str:
        """Write the Lease; return its holder, or "" if another process wrote it first."""
        started = self._clock()
        try:
            if "resourceVersion" in lease["metadata"]:
                await self._api.replace(LEASE, lease)
            else:
                await self._api.create(LEASE, lease)
        except ConflictError:
            # The next read shows the holder. If someone edited the leader's own Lease, the leader
            # can read it again in the remaining time.
            return ""
        self.leading, self._renewed = True, started
        return self._identity

    @property
    def _duration_s(self) -> int:
        return math.ceil(self._intervals.lease)

    # Other clients may change the metadata, so only the spec shows that the holder is alive.
    def _is_expired(self, lease: Object) -> bool:
        spec, now = lease.get("spec") or {}, self._clock()
        if self._observed_spec[0] != spec:
            self._observed_spec = (spec, now)
        declared_s = spec.get("leaseDurationSeconds") or 0
        duration_s = max(self._intervals.lease, min(declared_s, MAX_LEASE_DURATION_S))
        return now - self._observed_spec[1] > duration_s

    def _make_lease(self) -> Object:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            # With this label, the operator's watch of Leases receives the renewals as a heartbeat.
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": {MANAGED_BY_LABEL: FIELD_MANAGER},
            },
            "spec": {
                "holderIdentity": self._identity,
                "acquireTime": _format_now(),
                "renewTime": _format_now(),
                "leaseDurationSeconds": self._duration_s,
                "leaseTransitions": 0,
            },
        }


def _get_holder(lease: Object) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


def _format_now() -> str:
    return format_rfc3339_micro(time.time())
