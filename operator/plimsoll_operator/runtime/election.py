"""Leader election: of several operators one works, by a Lease.

As in client-go, a holder counts as dead when its Lease did not change for its duration by the
observer's own clock; clocks of two machines are never compared. Who cannot renew in time ends its
process, so that two never work at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from plimsoll_api.times import rfc3339_micro
from plimsoll_operator.kinds import LEASE, Object
from plimsoll_operator.render.names import MANAGED_BY, MANAGER
from plimsoll_operator.runtime.client import Api, ApiError

log = logging.getLogger(__name__)

DURATION_S = 15.0
RENEW_WITHIN_S = 10.0
RETRY_S = 2.0
"""client-go's defaults."""


class LeadershipLost(Exception):
    """The Lease could not be renewed in time, or somebody else has it."""


class Election:
    """``acquire``, then ``keep`` as long as the work goes on, then ``release``."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._identity, self._clock, self._sleep = identity, clock, sleep
        self._seen = ("", 0.0)
        self.leading = False

    async def acquire(self) -> None:
        """Wait until this process leads."""
        said = ""
        while True:
            try:
                holder = await self._try()
            except (ApiError, OSError, TimeoutError) as error:
                holder = f"nobody known: {error or repr(error)}"
            if self.leading:
                log.info("leading as %s", self._identity)
                return
            if holder != said:
                log.info("on standby; the leader is %s", holder)
                said = holder
            await self._sleep(RETRY_S * (1.0 + 0.2 * random.random()))

    async def keep(self) -> None:
        """Renews for ever; :class:`LeadershipLost` where that failed for too long."""
        renewed = self._clock()
        while True:
            await self._sleep(RETRY_S)
            try:
                holder = await self._try()
            except (ApiError, OSError, TimeoutError) as error:
                log.warning("renewing the leader's lease: %s", error or repr(error))
            else:
                if not self.leading:
                    raise LeadershipLost(f"{self._name} is held by {holder}")
                renewed = self._clock()
            if self._clock() - renewed > RENEW_WITHIN_S:
                self.leading = False
                raise LeadershipLost(f"not renewed for {self._clock() - renewed:.0f} s")

    async def release(self) -> None:
        """Give the Lease back, so that the next one need not wait; a failure only costs time."""
        if not self.leading:
            return
        self.leading = False
        try:
            lease = await self._api.get(LEASE, self._namespace, self._name)
            if lease and _holder(lease) == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(LEASE, lease)
        except (ApiError, OSError, TimeoutError) as error:
            log.warning("releasing the leader's lease: %s", error or repr(error))

    async def _try(self) -> str:
        """Take or renew the Lease if possible; return who holds it."""
        lease = await self._api.get(LEASE, self._namespace, self._name)
        if lease is None:
            await self._write(self._new())
            return self._identity
        holder = _holder(lease)
        if holder not in ("", self._identity) and not self._expired(lease):
            self.leading = False
            return holder
        spec = lease.get("spec") or {}
        if holder != self._identity:
            spec["acquireTime"] = _now()
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        spec |= {
            "holderIdentity": self._identity,
            "renewTime": _now(),
            "leaseDurationSeconds": int(DURATION_S),
        }
        await self._write(lease | {"spec": spec})
        return self._identity

    async def _write(self, lease: Object) -> None:
        try:
            if "resourceVersion" in lease["metadata"]:
                await self._api.replace(LEASE, lease)
            else:
                await self._api.create(LEASE, lease)
            self.leading = True
        except ApiError as error:
            if error.status != 409:
                raise
            self.leading = False  # somebody was quicker

    def _expired(self, lease: Object) -> bool:
        version, now = lease["metadata"]["resourceVersion"], self._clock()
        if self._seen[0] != version:
            self._seen = (version, now)
        # Not what the Lease says: a holder's typing error would keep the others out for ever.
        return now - self._seen[1] > DURATION_S

    def _new(self) -> Object:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            # The label lets the operator's own watch of Leases see the renewals: its heartbeat.
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": {MANAGED_BY: MANAGER},
            },
            "spec": {
                "holderIdentity": self._identity,
                "acquireTime": _now(),
                "renewTime": _now(),
                "leaseDurationSeconds": int(DURATION_S),
                "leaseTransitions": 0,
            },
        }


def _holder(lease: Object) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


def _now() -> str:
    return rfc3339_micro(time.time())
