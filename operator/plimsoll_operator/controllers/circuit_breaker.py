"""Acquire, renew and release slot Leases, as the module ``fleet.circuit_breaker`` decides.

The operator measures times itself, because the holder of a Lease may write any time into it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from plimsoll_api.times import format_rfc3339_micro
from plimsoll_operator.config import DEFAULT_INTERVALS, Intervals
from plimsoll_operator.fleet.circuit_breaker import (
    LEASE_DURATION_S,
    OPERATOR_HOLDER,
    RENEW_INTERVAL_S,
    SlotAllocation,
    allocate_slots,
    get_holder,
)
from plimsoll_operator.kinds import INCIDENT, LEASE, Object
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError, ConflictError

log = logging.getLogger(__name__)

MAX_WRITE_ATTEMPTS = 3
MAX_LOST_RACES = 5
"""Number of times in a row that the operator may fail to close a Lease, mostly because a supervisor
acquires it first. After that, the operator reopens other Leases anyway."""


MAX_LEASE_TRANSITIONS = 2**31
"""Maximum value of ``leaseTransitions``, a signed 32-bit integer."""


class _LeaseState(NamedTuple):
    """Observed state of a Lease, with monotonic times."""

    version: str
    changed_at: float
    is_held: bool
    is_held_since: float


class CircuitBreaker:
    """Limit on the number of restart slots that supervisors hold in the whole cluster."""

    def __init__(
        self,
        api: Api,
        store: Store,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        intervals: Intervals = DEFAULT_INTERVALS,
    ) -> None:
        self._api, self._store, self._limit, self._clock = api, store, limit, clock
        self._intervals = intervals
        self._renewed: dict[str, float] = {}
        self._leases: dict[str, _LeaseState] = {}
        self._opened: dict[str, float] = {}
        self._last_turn: dict[str, float] = {}
        self._lost: Counter[str] = Counter()
        self._changes: tuple[int, ...] = ()
        self._next = -math.inf
        self.last = SlotAllocation()

    async def run(self) -> None:
        """Run the allocation loop until cancelled."""
        while True:
            await asyncio.sleep(self._intervals.breaker)
            try:
                await self.run_once()
            except (ApiError, OSError, TimeoutError) as error:
                log.warning(
                    "circuit breaker: failed to read or write a Lease: %s; retrying in %.1f s",
                    str(error) or repr(error), self._intervals.breaker,
                )  # fmt: skip

    async def run_once(self) -> None:
        """Allocate the slots and write the Leases if a Lease changed or a deadline passed."""
        changes, now = self._store.changes, self._clock()
        versions = (changes[LEASE.kind], changes[INCIDENT.kind])
        if versions == self._changes and not self.last.close and now < self._next:
            return
        leases = self._store.list_kind(LEASE.kind)
        dead, overlong = self._find_expired_leases(leases, now)
        incidents = self._store.list_kind(INCIDENT.kind)
        self.last = allocate_slots(leases, incidents, self._limit, dead, overlong, self._last_turn)
        self._revoke_unused_grants(now)
        due = [lease for lease in self.last.close if self._needs_renewal(lease, now)]
        if due:
            log.warning(
                "circuit breaker: %d of %d restart slots are in use, and %d services are waiting",
                self.last.held, self._limit, len(self.last.close),
            )  # fmt: skip
        # A failure in one namespace, for example of its webhook, must not keep other Leases shut.
        closed = await asyncio.gather(*map(self._close, due), return_exceptions=True)
        failures = [one for one in closed if isinstance(one, BaseException)]
        if all(
            self._may_ignore(lease) if isinstance(result, BaseException) else result
            for lease, result in zip(due, closed, strict=True)
        ):  # otherwise, a supervisor may be faster: count again before opening other Leases
            opened = await asyncio.gather(
                *map(self._reopen, self.last.reopen), return_exceptions=True
            )
            failures += [one for one in opened if isinstance(one, BaseException)]
            self._changes = () if failures else versions
        if failures:
            raise failures[0]

    def _find_expired_leases(self, leases: list[Object], now: float) -> tuple[set[str], set[str]]:
        """Return the UIDs of Leases with a dead holder, and of Leases held for too long."""
        dead: set[str] = set()
        overlong: set[str] = set()
        fresh, due = {}, math.inf
        for lease in leases:
            meta = lease["metadata"]
            # Other clients may change the metadata: only the spec shows that the holder is alive.
            uid, version = meta["uid"], repr(lease.get("spec"))
            taken = get_holder(lease) not in ("", OPERATOR_HOLDER)
            previous = self._leases.get(uid)
            changed_at = previous.changed_at if previous and previous.version == version else now
            since = previous.is_held_since if previous and previous.is_held == taken else now
            fresh[uid] = _LeaseState(version, changed_at, taken, since)
            if not taken:
                continue
            self._last_turn[uid] = now
            for end, exceeded in (
                (changed_at + self._intervals.slot_expiry, dead),
                (since + self._intervals.slot_hold, overlong),
            ):
                if now >= end:
                    exceeded.add(uid)
                else:
                    due = min(due, end)
        self._leases, self._next = fresh, due
        for per_lease in (self._last_turn, self._renewed, self._lost):
            for uid in per_lease.keys() - fresh.keys():
                del per_lease[uid]
        return dead, overlong

    def _revoke_unused_grants(self, now: float) -> None:
        opened = {lease["metadata"]["uid"] for lease in self.last.granted}
        self._opened = {uid: self._opened.get(uid, now) for uid in opened}
        if not self.last.asking:
            return
        for uid, since in list(self._opened.items()):
            if now - since >= self._intervals.slot_turn:
                self._last_turn[uid] = now
                del self._opened[uid]

    def _needs_renewal(self, lease: Object, now: float) -> bool:
        renewed = self._renewed.get(lease["metadata"]["uid"], -RENEW_INTERVAL_S)
        return get_holder(lease) != OPERATOR_HOLDER or now - renewed >= RENEW_INTERVAL_S

    async def _close(self, lease: Object) -> bool:
        """Close a Lease; return False if a supervisor acquired it first."""
        uid = lease["metadata"]["uid"]
        for _ in range(MAX_WRITE_ATTEMPTS):
            newer = await self._write(lease, OPERATOR_HOLDER)
            if newer is None:
                self._renewed[uid] = self._clock()
                self._lost.pop(uid, None)
                return True
            if get_holder(newer) not in ("", OPERATOR_HOLDER):
                # A client that writes one Lease constantly must not delay the other Leases.
                return self._may_ignore(lease)
            lease = newer
        return True

    def _may_ignore(self, lease: Object) -> bool:
        """Count a failure to close ``lease``, and report whether there were too many."""
        self._lost[lease["metadata"]["uid"]] += 1
        return self._lost[lease["metadata"]["uid"]] > MAX_LOST_RACES

    async def _reopen(self, lease: Object) -> None:
        await self._write(lease, "")
        self._renewed.pop(lease["metadata"]["uid"], None)

    async def _write(self, lease: Object, holder: str) -> Object | None:
        """Set the holder. If another client changed the Lease first, return the current Lease.

        Return None after a write or a lasting rejection. Raises ApiError if it may succeed later.
        """
        spec = dict(lease.get("spec") or {})
        timestamp = format_rfc3339_micro(time.time())
        if spec.get("holderIdentity") != holder:
            spec["leaseTransitions"] = (
                (spec.get("leaseTransitions") or 0) + 1
            ) % MAX_LEASE_TRANSITIONS
            spec["acquireTime"] = timestamp
        spec |= {
            "holderIdentity": holder,
            "renewTime": timestamp,
            "leaseDurationSeconds": LEASE_DURATION_S if holder else 1,
        }
        meta = lease["metadata"]
        self._api.writes["replace", LEASE.kind] += 1
        try:
            self._store.put(await self._api.replace(LEASE, lease | {"spec": spec}))
        except ConflictError:
            newer = await self._api.get(LEASE, meta["namespace"], meta["name"])
            if newer is not None:
                self._store.put(newer)
            return newer
        except ApiError as error:
            if not error.is_lasting:
                raise
            if error.status != 404:
                where = f"{meta['namespace']}/{meta['name']}"
                log.warning("circuit breaker: failed to write Lease %s: %s", where, error)
        return None
