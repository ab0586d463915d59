"""Reconcile an InferenceService: plan its objects, apply the differences, and update its status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.config import Config
from plimsoll_operator.controllers.pods import read_pod_events, reconcile_pods
from plimsoll_operator.controllers.reconciler import (
    Reconciler,
    find_shortest_delay_s,
    format_current_time,
)
from plimsoll_operator.controllers.writes import ClaimModeCache, NameConflictError
from plimsoll_operator.fleet.learned import HOUR_S
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.replicas import list_service_replicas
from plimsoll_operator.fleet.verdict import may_change_with_time
from plimsoll_operator.kinds import (
    KINDS_BY_NAME,
    OPTIONAL_KINDS,
    SERVICE,
    InvalidSpecError,
    Key,
    MissingApiError,
    Object,
    Ref,
    make_ref,
)
from plimsoll_operator.plans.service import Failure, Plan, list_claims, make_plan, parse_service
from plimsoll_operator.render.compare import WORKLOAD_KINDS, list_missing_fields
from plimsoll_operator.render.groups import get_workload_kind_and_name
from plimsoll_operator.render.names import make_supervisor_name as supervisor_object
from plimsoll_operator.render.objects import compute_initial_replicas
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.scraper import Scraper
from plimsoll_operator.status.events import Notice, make_completion_notices, make_rollout_notices
from plimsoll_operator.status.service import make_status

log = logging.getLogger(__name__)

NO_GROUPS_MESSAGE = (
    "spec.parallelism: a replica needs {} nodes, but the API LeaderWorkerSet"
    " (leaderworkerset.x-k8s.io/v1) is not installed: install it, or request more devices per pod."
    " Nothing was changed. The operator checks again at each resync"
)


@dataclass
class _Observation:
    """Observations of one reconcile; ``pods`` excludes terminating and finished pods."""

    pods: list[PodView] = field(default_factory=list)
    service: InferenceService | None = None
    plan: Plan | None = None


class InferenceServiceController(Reconciler[_Observation]):
    """Controller of InferenceServices."""

    KIND, OBSERVATION = SERVICE, _Observation

    def __init__(
        self,
        api: Api,
        store: Store,
        scraper: Scraper,
        config: Config,
        served_kinds: Collection[str],
        requeue_later: Callable[[Key, float], None] = lambda *_: None,
        clock: Callable[[], str] = format_current_time,
    ) -> None:
        super().__init__(api, store, scraper, config, requeue_later, clock)
        self._served_kinds, self._claims = served_kinds, ClaimModeCache(api, time.monotonic)
        self.suspects: set[Key] = set()
        """Services whose current revision leaks memory in most replicas."""
        self.verdicts: dict[Key, list[tuple[str, Object]]] = {}
        """Verdicts on the revisions of each service; the workload names are empty."""

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted service."""
        self.suspects.discard(key)
        self.verdicts.pop(key, None)

    async def apply_spec(
        self,
        key: Key,
        item: Object,
        observation: _Observation,
        requeue_delays_s: list[float | None],
    ) -> None:
        """Apply and delete the service's objects, then reconcile its pods."""
        all_pods = [PodView.parse(pod) for pod in self._store.list_children(key, {"Pod"})]
        observation.pods = [pod for pod in all_pods if not (pod.terminating or pod.has_ended)]
        try:
            observation.service = parse_service(item)
            observation.plan = await self._apply(key, item, observation.service, observation.pods)
        except (InvalidSpecError, NameConflictError, ApiError):
            # The pods of the last spec run on, and their supervisors may request evictions.
            requeue_delays_s.append(await self._reconcile_pods(key, item, all_pods))
            raise
        requeue_delays_s += [await self._reconcile_pods(key, item, all_pods), HOUR_S]

    async def _reconcile_pods(
        self, key: Key, item: Object, pods: Sequence[PodView]
    ) -> float | None:
        incidents, now = self._list_incidents(key), self._clock()
        return await reconcile_pods(
            self._api, self._store, key, item, pods, incidents, now, self._config, self.evictions
        )

    async def _apply(
        self, key: Key, item: Object, service: InferenceService, pods: list[PodView]
    ) -> Plan:
        incidents, owned = self._list_incidents(key), self._find_live_objects(key)
        known = list_service_replicas(sorted(pods, key=lambda one: one.created))
        published = owned.get(Ref("ConfigMap", supervisor_object(key.name)))
        plan = make_plan(
            service,
            owned,
            pods,
            incidents,
            self._config.images,
            (self._get_item(key) or {}).get("status"),
            key.namespace not in self._config.unrestricted_namespaces,
            await self._make_extra_files(key, pods, known, service.spec.memory, published),
            [
                one
                for one in list_claims(service)
                if await self._claims.is_shared(key.namespace, one)
            ],
        )
        kind, _ = workload = get_workload_kind_and_name(service)
        if not self._is_kind_served(kind):
            raise MissingApiError(NO_GROUPS_MESSAGE.format(service.spec.nodes))
        uid, replicas = service.metadata.uid, compute_initial_replicas(service)
        # KEDA's webhook refuses a ScaledObject while another autoscaler has the workload. The event
        # of the deletion starts the pass that creates the ScaledObject.
        replaced = [one for one in plan.surplus if one["kind"] == "HorizontalPodAutoscaler"]
        await self._owned.remove(key, replaced)
        for desired in plan.desired:
            if not self._is_kind_served(desired["kind"]):
                continue
            if replaced and desired["kind"] == "ScaledObject":
                continue
            live = self._store.get(key, make_ref(desired))
            written = await self._owned.apply(key, uid, desired, replicas)
            if written and make_ref(desired) == workload:
                await self._recorder.write(item, make_rollout_notices(live, desired, plan.decision))
        await self._owned.remove(key, [one for one in plan.surplus if one not in replaced])
        lacking = []
        for desired in plan.desired:
            live = self._store.get(key, make_ref(desired))
            fields = list_missing_fields(live, desired) if live is not None else []
            lacking += [f"{' '.join(make_ref(desired))}: {', '.join(fields)}"] if fields else []
        return replace(plan, dropped_fields=tuple(lacking))

    def _find_workload(self, key: Key, service: InferenceService | None) -> Object | None:
        """Return the workload that creates the pods; for an invalid spec, any of the service's."""
        if service is not None:
            return self._store.get(key, Ref(*get_workload_kind_and_name(service)))
        workloads = self._store.list_children(key, set(WORKLOAD_KINDS))
        return workloads[0] if workloads else None

    def _is_kind_served(self, kind: str) -> bool:
        prerequisites = KINDS_BY_NAME[kind].prerequisites
        return KINDS_BY_NAME[kind].watched or all(
            one in self._served_kinds for one in (kind, *prerequisites)
        )

    async def make_status(
        self, key: Key, item: Object, observation: _Observation, failure: Failure | None
    ) -> tuple[Object, float | None]:
        """Return the status, and the seconds until it may change without an event, or None."""
        now, intervals = self._clock(), self._config.intervals
        events, next_s = await read_pod_events(
            self._api, key.namespace, observation.pods, now, intervals
        )
        wanted = make_status(
            item,
            observation.service,
            self._find_workload(key, observation.service),
            observation.pods,
            self._list_incidents(key),
            self._scraper.get_published(key),
            failure,
            now,
            [kind.kind for kind in OPTIONAL_KINDS if kind.kind not in self._served_kinds],
            observation.plan,
            events,
            self._scraper.get_latest(key),
            self._store.get(key, Ref("ScaledObject", key.name)),
        )
        (self.suspects.add if "suspectRevision" in wanted else self.suspects.discard)(key)
        verdicts = wanted.get("verdicts") or []
        self.verdicts[key] = [("", one) for one in verdicts]
        return wanted, find_shortest_delay_s(
            next_s, intervals.publish if may_change_with_time(verdicts) else None
        )

    def list_notices(self, previous: Object, status: Object) -> Iterable[Notice]:
        """Return the Events for a completed rollout or a new revision."""
        return make_completion_notices(previous, status)
