"""The reconcile of one InferenceService: plan, write what differs, report in its status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.times import rfc3339
from plimsoll_operator.config import Config
from plimsoll_operator.controllers.pods import outlive, pod_events, reconcile_pods
from plimsoll_operator.controllers.writes import (
    Claims,
    NameConflict,
    OwnedObjects,
    Recorder,
    Refusals,
    write_status,
)
from plimsoll_operator.fleet.figures import Summaries, replicas_of_service
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.kinds import (
    BY_KIND,
    INCIDENT,
    OPTIONAL,
    OWNED,
    SERVICE,
    InvalidSpec,
    Key,
    Object,
    Ref,
    ref,
)
from plimsoll_operator.plans.service import Failure, Plan, claims_of, parse, reconcile
from plimsoll_operator.render.compare import absent
from plimsoll_operator.render.objects import first_replicas
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.scraper import Scraper
from plimsoll_operator.status.notices import applied, finished, refused
from plimsoll_operator.status.service import status

log = logging.getLogger(__name__)


def now() -> str:
    """Return the present time as the API writes it."""
    return rfc3339(time.time())


class Controller:
    """Reconcile services, one call a service; safe to call at any time, any number of times."""

    def __init__(
        self,
        api: Api,
        store: Store,
        scraper: Scraper,
        config: Config,
        served: Collection[str],
        later: Callable[[Key, float], None] = lambda *_: None,
        clock: Callable[[], str] = now,
    ) -> None:
        """Prepare a controller for the services in ``store``.

        ``served`` has the optional kinds that the cluster has now; ``later`` asks for another
        reconcile of a service after some seconds.
        """
        self._api, self._store, self._scraper = api, store, scraper
        self._config, self._later, self._clock = config, later, clock
        self._served, self._recorder = served, Recorder(api, clock)
        self._owned = OwnedObjects(api, store)
        self._refusals, self._claims = Refusals(), Claims(api, time.monotonic)
        self._peers = Summaries(time.monotonic, config.clocks.publish)
        self.suspects: set[Key] = set()
        """Services whose current revision leaks in most replicas."""

    async def handle(self, key: Key) -> None:
        """Carry out the spec of the service ``key``, and update its status."""
        item = self._store.service(key)
        if item is None:
            self._scraper.forget(key)
            self._refusals.forget(key)
            self._peers.forget(key)
            self._owned.forget(key)
            self.suspects.discard(key)
            known, now = self._incidents(key), self._clock()
            left = await outlive(self._api, self._store, key, known, now, self._config)
            if left is not None:
                self._later(key, left)
            return
        if item["metadata"].get("deletionTimestamp"):
            return
        service: InferenceService | None = None
        failure: Failure | None = None
        error: Exception | None = None
        plan: Plan | None = None
        again: list[float | None] = []
        every = [PodView.of(one) for one in self._store.of(key, {"Pod"})]
        pods = [one for one in every if not (one.leaving or one.over)]
        try:
            service = parse(item)
            plan = await self._carry_out(key, item, service, pods)
            again.append(self._peers.next_s(key))
            incidents, now, config = self._incidents(key), self._clock(), self._config
            look = reconcile_pods(self._api, self._store, key, item, every, incidents, now, config)
            again.append(await look)
        except (InvalidSpec, NameConflict, ApiError) as problem:
            failure, error = self._refusals.judge(key, problem)
        else:
            self._refusals.forget(key)
        if failure is not None:
            await self._recorder.write(item, [refused(failure)])
        again.append(await self._report(key, item, service, pods, failure, plan))
        if due := [one for one in again if one is not None]:
            self._later(key, min(due))
        if error:
            raise error

    async def _carry_out(
        self, key: Key, item: Object, service: InferenceService, pods: list[PodView]
    ) -> Plan:
        owned = {ref(item): item for item in self._store.of(key, _OWNED)}
        incidents = self._incidents(key)
        plan = reconcile(
            service,
            owned,
            pods,
            incidents,
            self._config.images,
            (self._store.service(key) or {}).get("status"),
            key.namespace not in self._config.unrestricted_namespaces,
            self._peers.text(key, replicas_of_service(pods), incidents, self._scraper.latest(key)),
            [one for one in claims_of(service) if await self._claims.shared(key.namespace, one)],
        )
        uid, replicas = service.metadata.uid, first_replicas(service)
        for desired in plan.desired:
            if not self._available(desired["kind"]):
                continue
            live = self._store.get(key, ref(desired))
            written = await self._owned.apply(key, uid, desired, replicas)
            if written and desired["kind"] == "Deployment":
                await self._recorder.write(item, applied(live, desired, plan.decision))
        await self._owned.remove(key, plan.surplus)
        lacking = []
        for desired in plan.desired:
            live = self._store.get(key, ref(desired))
            fields = absent(live, desired) if live is not None else []
            lacking += [f"{' '.join(ref(desired))}: {', '.join(fields)}"] if fields else []
        return replace(plan, absent=tuple(lacking))

    def _available(self, kind: str) -> bool:
        return BY_KIND[kind].watched or kind in self._served

    async def _report(
        self,
        key: Key,
        item: Object,
        service: InferenceService | None,
        pods: list[PodView],
        failure: Failure | None,
        plan: Plan | None,
    ) -> float | None:
        """Write the status if it changed.

        Returns the seconds after which it may change by the passage of time alone; None for never.
        """
        item = self._store.service(key) or item
        now = self._clock()
        events, again = await pod_events(self._api, key.namespace, pods, now, self._config.clocks)
        wanted = status(
            item,
            service,
            self._store.get(key, Ref("Deployment", key.name)),
            pods,
            self._incidents(key),
            self._scraper.published(key),
            failure,
            now,
            [kind.kind for kind in OPTIONAL if not self._available(kind.kind)],
            plan,
            events,
        )
        (self.suspects.add if "suspectRevision" in wanted else self.suspects.discard)(key)
        if wanted == item.get("status"):
            return again
        if await write_status(self._api, self._store, SERVICE, item, wanted):
            await self._recorder.write(item, finished(item.get("status") or {}, wanted))
        return again

    def _incidents(self, key: Key) -> list[Object]:
        return self._store.of(key, {INCIDENT.kind})


_OWNED = frozenset(kind.kind for kind in OWNED)
