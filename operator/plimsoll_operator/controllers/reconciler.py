"""Base class for the reconcilers of services and policies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Generic, TypeVar

from plimsoll_api.learned import LEARNED_FILE
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.pod_devices import (
    CLAIMED_DEVICES_FILE,
    DEVICE_HEALTH_FILE,
    MAX_CLAIMING_CONTAINERS,
    MAX_UNHEALTHY_PODS,
    encode_pod_devices,
)
from plimsoll_api.times import format_rfc3339, parse_rfc3339
from plimsoll_operator.config import Config
from plimsoll_operator.controllers.claimed_devices import ClaimedDevices
from plimsoll_operator.controllers.pods import Evictions, delete_expired_incidents
from plimsoll_operator.controllers.writes import (
    EventRecorder,
    FailureCounter,
    NameConflictError,
    OwnedObjectWriter,
    write_status,
)
from plimsoll_operator.fleet.learned import make_learned_file
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.replicas import Replica
from plimsoll_operator.fleet.selected_pods import SelectedPod
from plimsoll_operator.kinds import (
    INCIDENT,
    OWNED_KINDS,
    InvalidSpecError,
    Key,
    Kind,
    Object,
    Ref,
    make_ref,
)
from plimsoll_operator.plans.service import Failure
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.scraper import Scraper
from plimsoll_operator.status.events import Notice, make_failure_notice

_OWNED_KINDS = frozenset(kind.kind for kind in OWNED_KINDS)
Observation = TypeVar("Observation")


def format_current_time() -> str:
    """Return the current time in RFC 3339."""
    return format_rfc3339(time.time())


def find_shortest_delay_s(*delays_s: float | None) -> float | None:
    """Return the shortest of the delays; None if every delay is None."""
    return min((delay_s for delay_s in delays_s if delay_s is not None), default=None)


class Reconciler(ABC, Generic[Observation]):
    """Reconciler of one kind; a reconcile is idempotent.

    :meth:`apply_spec` stores what it observes. :meth:`make_status` derives the status from it, even
    after a failure.
    """

    KIND: ClassVar[Kind]
    OBSERVATION: Callable[[], Observation]

    def __init__(
        self,
        api: Api,
        store: Store,
        scraper: Scraper,
        config: Config,
        requeue_later: Callable[[Key, float], None],
        clock: Callable[[], str],
    ) -> None:
        self._api, self._store, self._scraper = api, store, scraper
        self._config, self._requeue_later, self._clock = config, requeue_later, clock
        self._owned, self._recorder = OwnedObjectWriter(api, store), EventRecorder(api, clock)
        self.evictions = Evictions(api, time.monotonic, config.intervals.evict_again)
        self._refusals = FailureCounter()
        self._claimed_devices = ClaimedDevices(api, time.monotonic)

    async def handle(self, key: Key) -> None:
        """Reconcile ``key`` and update its status."""
        item = self._get_item(key)
        if item is None:
            for stateful in (self._scraper, self._refusals, self._owned, self.evictions, self):
                stateful.forget(key)
            retention_s = await delete_expired_incidents(
                self._api, self._store, key, self._list_incidents(key), self._clock(), self._config
            )
            if retention_s is not None:
                self._requeue_later(key, retention_s)
            return
        if item["metadata"].get("deletionTimestamp"):
            return
        observation, requeue_delays_s = self.OBSERVATION(), list[float | None]()
        failure: Failure | None = None
        error: Exception | None = None
        try:
            failure = await self.apply_spec(key, item, observation, requeue_delays_s)
        except (InvalidSpecError, NameConflictError, ApiError) as problem:
            failure, error = self._refusals.classify(key, problem)
        else:
            self._refusals.forget(key)
        if failure is not None:
            await self._recorder.write(item, [make_failure_notice(failure)])
        # Only the status: a spec that changed meanwhile has not been applied yet.
        item = item | {"status": (self._get_item(key) or item).get("status")}
        wanted, next_s = await self.make_status(key, item, observation, failure)
        before = item.get("status")
        if wanted != before and await write_status(self._api, self._store, self.KIND, item, wanted):
            await self._recorder.write(item, self.list_notices(before or {}, wanted))
        if (due_s := find_shortest_delay_s(*requeue_delays_s, next_s)) is not None:
            self._requeue_later(key, due_s)
        if error:
            raise error

    @abstractmethod
    async def apply_spec(
        self, key: Key, item: Object, observation: Observation, requeue_delays_s: list[float | None]
    ) -> Failure | None:
        """Apply the spec; return a failure if part of it was not applied, otherwise None.

        Append the seconds until the next check to ``requeue_delays_s``. Raises InvalidSpecError,
        NameConflictError and ApiError.
        """

    @abstractmethod
    async def make_status(
        self, key: Key, item: Object, observation: Observation, failure: Failure | None
    ) -> tuple[Object, float | None]:
        """Return the status, and the seconds until it may change without an event, or None."""

    @abstractmethod
    def list_notices(self, previous: Object, status: Object) -> Iterable[Notice]:
        """Return the Events for a change of the status."""

    @abstractmethod
    def forget(self, key: Key) -> None:
        """Drop the state of a deleted object."""

    async def _make_extra_files(
        self,
        key: Key,
        pods: Sequence[PodView | SelectedPod],
        replicas: Sequence[Replica],
        memory: MemoryPolicy,
        published: Object | None,
    ) -> dict[str, str]:
        """Return the further files of the supervisors' ConfigMap, by name."""
        files: dict[str, str] = {}
        if memory.has_auto_budget:
            before = str(((published or {}).get("data") or {}).get(LEARNED_FILE) or "")
            incidents, metrics = self._list_incidents(key), self._scraper.get_latest(key)
            now = parse_rfc3339(self._clock())
            files[LEARNED_FILE] = make_learned_file(before, replicas, incidents, metrics, now)
        files[DEVICE_HEALTH_FILE] = encode_pod_devices(
            {one.uid: one.unhealthy_devices for one in pods}, MAX_UNHEALTHY_PODS
        )
        files[CLAIMED_DEVICES_FILE] = encode_pod_devices(
            await self._claimed_devices.find(key.namespace, pods), MAX_CLAIMING_CONTAINERS
        )
        return {name: text for name, text in files.items() if text}

    def _get_item(self, key: Key) -> Object | None:
        return self._store.get(key, Ref(self.KIND.kind, key.name))

    def _list_incidents(self, key: Key) -> list[Object]:
        return self._store.list_children(key, {INCIDENT.kind})

    def _find_live_objects(self, key: Key) -> dict[Ref, Object]:
        return {make_ref(one): one for one in self._store.list_children(key, _OWNED_KINDS)}
