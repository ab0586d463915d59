"""Carries out plans: one service at a time, reading what it does not know, writing what differs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.api import Api, ApiError
from plimsoll_operator.compare import needs_apply, with_replicas
from plimsoll_operator.config import Config
from plimsoll_operator.kinds import (
    BY_KIND,
    OPTIONAL,
    SERVICE,
    WATCHED,
    Object,
    Ref,
    owner_uid,
    ref,
)
from plimsoll_operator.reconcile import InvalidSpec, parse, reconcile, revision_ref
from plimsoll_operator.render.autoscaler import first_replicas
from plimsoll_operator.scrape import Scraper
from plimsoll_operator.status.build import status
from plimsoll_operator.status.conditions import Failure
from plimsoll_operator.store import Key, Store

log = logging.getLogger(__name__)


def now() -> str:
    """The present as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class NameConflict(Exception):
    """An object that is somebody else's has the name of one of ours."""


class Controller:
    """``handle`` is safe to call at any time and any number of times."""

    def __init__(
        self,
        api: Api,
        store: Store,
        scraper: Scraper,
        config: Config,
        clock: Callable[[], str] = now,
    ) -> None:
        self._api, self._store, self._scraper = api, store, scraper
        self._config, self._clock = config, clock
        self._served: frozenset[str] = frozenset()

    async def sync(self) -> list[Key]:
        """Lists everything anew, which heals whatever a watch has missed; returns the services.

        APIs that a cluster may lack are looked for each time.
        """
        items: list[Object] = []
        optional = [kind for kind in OPTIONAL if await self._api.serves(kind)]
        self._served = frozenset(kind.kind for kind in optional)
        for kind in (*WATCHED, *optional):
            for namespace in self._config.namespaces or (None,):
                items += await self._api.list(kind, namespace)
        self._store.replace(items)
        return self._store.keys()

    async def handle(self, key: Key) -> None:
        """Makes the service ``key`` what its spec says and its status what it is."""
        item = self._store.service(key)
        if item is None:
            self._scraper.forget(key)
            return
        if item["metadata"].get("deletionTimestamp"):
            return
        service: InferenceService | None = None
        failure: Failure | None = None
        error: Exception | None = None
        try:
            service = parse(item)
            await self._carry_out(key, service)
        except InvalidSpec as problem:
            failure = Failure("InvalidSpec", str(problem), lasting=True)
        except NameConflict as problem:
            failure, error = Failure("NameConflict", str(problem), lasting=True), problem
        except ApiError as problem:
            failure = Failure("ApplyFailed", problem.message, problem.lasting)
            error = problem
        await self._report(key, item, service, failure)
        if error:
            raise error

    async def _carry_out(self, key: Key, service: InferenceService) -> None:
        await self._live(key, revision_ref(service))
        owned = {ref(item): item for item in self._store.of(key) if item["kind"] not in _NOT_OWNED}
        plan = reconcile(
            service,
            owned,
            self._pods(key),
            self._incidents(key),
            self._config.images,
            self._config.kept_incidents,
        )
        for desired in plan.desired:
            if not self._available(desired["kind"]):
                continue
            live = await self._live(key, ref(desired))
            if live and owner_uid(live) != service.metadata.uid:
                raise NameConflict(
                    f"{desired['kind']} {key.namespace}/{desired['metadata']['name']} exists and "
                    "belongs to somebody else: remove it, or give the InferenceService another name"
                )
            if needs_apply(desired, live):
                log.info("%s: apply %s", key, " ".join(ref(desired)))
                whole = with_replicas(desired, live, first_replicas(service))
                self._store.put(await self._api.apply(BY_KIND[desired["kind"]], whole))
        for item in plan.surplus:
            log.info("%s: delete %s", key, " ".join(ref(item)))
            await self._api.delete(BY_KIND[item["kind"]], item)
            self._store.drop(item)

    def _available(self, kind: str) -> bool:
        return BY_KIND[kind].watched or kind in self._served

    async def _live(self, key: Key, wanted: Ref) -> Object | None:
        """The object as last seen. Asked for where it was never seen: what is not ours carries no
        label of ours, and must not be taken over."""
        known = self._store.get(key, wanted)
        if known is not None:
            return known
        found = await self._api.get(BY_KIND[wanted.kind], key.namespace, wanted.name)
        service = self._store.service(key)
        if found and service and owner_uid(found) == service["metadata"]["uid"]:
            self._store.put(found)
        return found

    async def _report(
        self, key: Key, item: Object, service: InferenceService | None, failure: Failure | None
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
        )
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
            for item in self._store.of(key)
            if item["kind"] == "Pod"
            and not item["metadata"].get("deletionTimestamp")
            and (item.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        ]

    def _incidents(self, key: Key) -> list[Object]:
        return [item for item in self._store.of(key) if item["kind"] == "LeakIncident"]


_NOT_OWNED = frozenset({"InferenceService", "LeakIncident", "Pod"})
