"""Carries out plans: one service at a time, reading what it does not know, writing what differs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.api import Api, ApiError, Conflict
from plimsoll_operator.compare import needs_apply, with_replicas
from plimsoll_operator.config import Config
from plimsoll_operator.fleet.pods import examine
from plimsoll_operator.kinds import (
    BY_KIND,
    INCIDENT,
    OPTIONAL,
    OWNED,
    SERVICE,
    WATCHED,
    Kind,
    Object,
    Ref,
    owner_uid,
    ref,
)
from plimsoll_operator.reconcile import InvalidSpec, Plan, parse, reconcile
from plimsoll_operator.render.autoscaler import first_replicas
from plimsoll_operator.scrape import Scraper
from plimsoll_operator.status.build import status
from plimsoll_operator.status.conditions import Failure
from plimsoll_operator.store import Key, Listed, Store

log = logging.getLogger(__name__)

EVENT_S = 5.0
"""An event that is later than this behind a list is missing."""
EVICT_AGAIN_S = 15.0
TELLING = 3
"""A refusal that may pass is told in the status when it came this often."""


def now() -> str:
    """The present as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class NameConflict(Exception):
    """An object that is somebody else's has the name of one of ours."""

    def __init__(self, item: Object) -> None:
        super().__init__(
            f"{item['kind']} {item['metadata']['namespace']}/{item['metadata']['name']} exists and "
            "belongs to somebody else: remove it, or give the InferenceService another name"
        )


class Controller:
    """``handle`` is safe to call at any time and any number of times."""

    def __init__(
        self,
        api: Api,
        store: Store,
        scraper: Scraper,
        config: Config,
        later: Callable[[Key, float], None] = lambda *_: None,
        clock: Callable[[], str] = now,
    ) -> None:
        """``later`` asks for another turn of a service after some seconds."""
        self._api, self._store, self._scraper = api, store, scraper
        self._config, self._later, self._clock = config, later, clock
        self._served: frozenset[str] = frozenset()
        self._synced = False
        self._refused: Counter[Key] = Counter()
        self.suspects: set[Key] = set()
        """Services whose present revision leaks in most replicas."""

    async def sync(self, listed: Callable[[str, int], None] = lambda *_: None) -> list[Key]:
        """Lists everything anew, which heals whatever a watch has missed; returns the services.

        APIs that a cluster may lack are looked for each time. ``listed`` is told, for each kind
        that is watched, how many changes no event had told of, :data:`EVENT_S` after the list.
        """
        self._store.begin_listing()
        optional = [kind for kind in OPTIONAL if await self._api.serves(kind)]
        self._served = frozenset(kind.kind for kind in optional)
        lists = [(kind, *await self._list(kind)) for kind in (*WATCHED, *optional)]
        if self._synced:
            await asyncio.sleep(EVENT_S)
        for kind, items, version in lists:
            behind = self._store.replace(kind.kind, items, version)
            if kind.watched and self._synced:
                listed(kind.kind, behind)
        self._synced = True
        return self._store.keys()

    async def _list(self, kind: Kind) -> tuple[list[Listed], str]:
        """All objects of a kind; of several lists the oldest version counts."""
        items: list[Listed] = []
        versions = []
        for namespace in self._config.namespaces or (None,):
            async for page, version in self._api.pages(kind, namespace):
                # Packed at once: unpacked, all of them are ten times as large.
                items += self._store.listed(page)
                versions.append(version)
        return items, min(versions, key=lambda text: int(text) if text.isdigit() else 0)

    async def handle(self, key: Key) -> None:
        """Makes the service ``key`` what its spec says and its status what it is."""
        item = self._store.service(key)
        if item is None:
            self._scraper.forget(key)
            self.suspects.discard(key)
            return
        if item["metadata"].get("deletionTimestamp"):
            return
        service: InferenceService | None = None
        failure: Failure | None = None
        error: Exception | None = None
        plan: Plan | None = None
        try:
            service = parse(item)
            plan = await self._carry_out(key, service)
            await self._look_at_pods(key, item)
        except InvalidSpec as problem:
            failure = Failure("InvalidSpec", str(problem), lasting=True)
        except NameConflict as problem:
            failure, error = Failure("NameConflict", str(problem), lasting=True), problem
        except ApiError as problem:
            self._refused[key] += 1
            if not problem.lasting and self._refused[key] < TELLING:
                raise  # it comes again at once; a status that flickers helps nobody
            failure = Failure("ApplyFailed", problem.message, problem.lasting)
            error = problem
        else:
            self._refused.pop(key, None)
        await self._report(key, item, service, failure, plan)
        if error:
            raise error

    async def _carry_out(self, key: Key, service: InferenceService) -> Plan:
        owned = {ref(item): item for item in self._store.of(key, _OWNED)}
        plan = reconcile(
            service,
            owned,
            self._pods(key),
            self._incidents(key),
            self._config.images,
            self._config.kept_incidents,
            (self._store.service(key) or {}).get("status"),
        )
        for desired in plan.desired:
            if self._available(desired["kind"]):
                await self._apply(key, service, desired)
        for item in plan.surplus:
            log.info("%s: delete %s", key, " ".join(ref(item)))
            if await self._api.delete(BY_KIND[item["kind"]], item):
                self._store.drop(item)
        return plan

    async def _look_at_pods(self, key: Key, item: Object) -> None:
        """Incidents that only pods tell of, and replacements that supervisors ask for."""
        pods = self._store.of(key, {"Pod"})
        found = examine(item, pods, self._incidents(key), self._clock())
        for incident in found.new:
            identity = {name: value for name, value in incident.items() if name != "status"}
            self._store.put(await self._api.apply(INCIDENT, identity))
        for incident in (*found.new, *found.updates):
            status = {name: value for name, value in incident.items() if name != "spec"}
            self._store.put(await self._api.apply(INCIDENT, status, "status"))
        for pod in found.evict:
            log.info("%s: evict %s, as its supervisor asks", key, pod)
            if not await self._api.evict(key.namespace, pod):
                self._later(key, EVICT_AGAIN_S)
        if found.again_s is not None:
            self._later(key, found.again_s + 1.0)

    async def _apply(self, key: Key, service: InferenceService, desired: Object) -> None:
        """Makes one object what it should be. What is not ours carries no label of ours and is in
        no watch: a first application must find nothing, so that nothing is taken over."""
        kind = BY_KIND[desired["kind"]]
        live = self._store.get(key, ref(desired))
        if live is not None and owner_uid(live) != service.metadata.uid:
            raise NameConflict(desired)
        if live is not None and not needs_apply(desired, live):
            return
        log.info("%s: apply %s", key, " ".join(ref(desired)))
        whole = with_replicas(desired, live, first_replicas(service))
        try:
            send = self._api.apply if live is not None else self._api.apply_new
            self._store.put(await send(kind, whole))
        except Conflict:
            found = await self._api.get(kind, key.namespace, desired["metadata"]["name"])
            if found is not None and owner_uid(found) != service.metadata.uid:
                raise NameConflict(desired) from None
            if found is not None:
                self._store.put(found)
            raise  # what is there by now may change the plan

    def _available(self, kind: str) -> bool:
        return BY_KIND[kind].watched or kind in self._served

    async def _report(
        self,
        key: Key,
        item: Object,
        service: InferenceService | None,
        failure: Failure | None,
        plan: Plan | None,
    ) -> None:
        item = self._store.service(key) or item
        wanted = status(
            item,
            service,
            self._store.get(key, Ref("Deployment", key.name)),
            self._pods(key),
            self._incidents(key),
            self._scraper.published(key),
            failure,
            self._clock(),
            [kind.kind for kind in OPTIONAL if not self._available(kind.kind)],
            plan,
        )
        (self.suspects.add if "suspectRevision" in wanted else self.suspects.discard)(key)
        if wanted == item.get("status"):
            return
        body = {
            "apiVersion": item["apiVersion"],
            "kind": item["kind"],
            "metadata": {"name": key.name, "namespace": key.namespace},
            "status": wanted,
        }
        try:
            self._store.put(await self._api.apply(SERVICE, body, "status"))
        except ApiError as error:
            if error.status != 404:  # deleted meanwhile
                raise

    def _pods(self, key: Key) -> list[Object]:
        """The service's pods that are not on their way out."""
        return [
            item
            for item in self._store.of(key, {"Pod"})
            if not item["metadata"].get("deletionTimestamp")
            and (item.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        ]

    def _incidents(self, key: Key) -> list[Object]:
        return self._store.of(key, {INCIDENT.kind})


_OWNED = frozenset(kind.kind for kind in OWNED)
