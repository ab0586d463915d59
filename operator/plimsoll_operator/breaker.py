"""Carries out the circuit breaker's decisions: takes, renews and gives back slot Leases.

Leases are written by PUT with the version that was read, as supervisors write them: of two who
want one, one loses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from plimsoll_operator.api import Api, ApiError, Conflict
from plimsoll_operator.fleet.breaker import DURATION_S, HOLDER, RENEW_S, Turns, holder, turns
from plimsoll_operator.kinds import INCIDENT, LEASE, Object
from plimsoll_operator.store import Store

log = logging.getLogger(__name__)

EVERY_S = 1.0


class Breaker:
    """At most ``limit`` slots of the whole cluster are held by supervisors at once."""

    def __init__(self, api: Api, store: Store, limit: int) -> None:
        self._api, self._store, self._limit = api, store, limit
        self._renewed: dict[str, float] = {}
        self._seen: tuple[int, ...] = ()
        self.last = Turns()

    async def run(self) -> None:
        """Decides again and again, for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.turn()
            except (ApiError, OSError, TimeoutError) as error:
                log.warning("circuit breaker: %s", error or repr(error))

    async def turn(self) -> None:
        """One decision, carried out; none where nothing happened and nothing is held."""
        changes = self._store.changes
        seen = (changes[LEASE.kind], changes[INCIDENT.kind])
        if seen == self._seen and not self.last.take:
            return
        leases = self._store.of_kind(LEASE.kind)
        self.last = turns(leases, self._store.of_kind(INCIDENT.kind), self._limit)
        now = time.monotonic()
        due = [one for one in self.last.take if self._due(one, now)]
        if due:
            log.warning(
                "circuit breaker: %d of %d slots are in use, %d services wait",
                self.last.held, self._limit, len(self.last.take),
            )  # fmt: skip
        shut = await asyncio.gather(*(self._write(one, HOLDER) for one in due))
        if not all(shut):
            return  # a supervisor was quicker: what is open is counted anew before more is opened
        await asyncio.gather(*(self._write(one, "") for one in self.last.give))
        self._seen = seen

    def _due(self, lease: Object, now: float) -> bool:
        renewed = self._renewed.get(lease["metadata"]["uid"], -RENEW_S)
        return holder(lease) != HOLDER or now - renewed >= RENEW_S

    async def _write(self, lease: Object, who: str) -> bool:
        """Whether ``who`` has it now, or nobody can have it any more."""
        spec = dict(lease.get("spec") or {})
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if spec.get("holderIdentity") != who:
            spec["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = at
        spec |= {
            "holderIdentity": who,
            "renewTime": at,
            "leaseDurationSeconds": DURATION_S if who else 1,
        }
        self._api.writes["replace", LEASE.kind] += 1
        try:
            self._store.put(await self._api.replace(LEASE, lease | {"spec": spec}))
        except Conflict:
            meta = lease["metadata"]
            found = await self._api.get(LEASE, meta["namespace"], meta["name"])
            if found is not None:
                self._store.put(found)
            return found is None
        except ApiError as error:
            if error.status != 404:
                raise
        uid = lease["metadata"]["uid"]
        if who:
            self._renewed[uid] = time.monotonic()
        else:
            self._renewed.pop(uid, None)
        return True
