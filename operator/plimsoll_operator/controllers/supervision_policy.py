"""Reconcile a SupervisionPolicy: plan its objects, apply the differences, and update its status."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from plimsoll_api.names import make_policy_object_name
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.config import Config
from plimsoll_operator.controllers.pods import read_pod_events, reconcile_pods
from plimsoll_operator.controllers.reconciler import (
    Reconciler,
    find_shortest_delay_s,
    format_current_time,
)
from plimsoll_operator.controllers.refused_creations import RefusedCreationWatch
from plimsoll_operator.controllers.rolling_restart import RollingRestarts
from plimsoll_operator.controllers.selected_pods import PolicyPods
from plimsoll_operator.controllers.writes import NameConflictError
from plimsoll_operator.fleet.group_loops import GroupHistory
from plimsoll_operator.fleet.learned import HOUR_S
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.refused_creations import RefusedCreation
from plimsoll_operator.fleet.replicas import list_policy_replicas
from plimsoll_operator.fleet.selected_pods import (
    SelectedPod,
    SupervisionState,
    compute_next_stuck_s,
)
from plimsoll_operator.fleet.verdict import may_change_with_time
from plimsoll_operator.fleet.workloads import index_workload_statuses
from plimsoll_operator.injection.policy import format_images
from plimsoll_operator.kinds import POLICY, Key, Object, Ref, parse_object
from plimsoll_operator.plans.injection import decide_injection, parse_injection
from plimsoll_operator.plans.policy import PolicyPlan, make_plan
from plimsoll_operator.plans.service import Failure
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.scraper import Scraper
from plimsoll_operator.status.events import (
    Notice,
    make_injection_notices,
    make_restart_notice,
    make_suspect_notices,
)
from plimsoll_operator.status.policy import make_status

log = logging.getLogger(__name__)


@dataclass
class _Observation:
    """Observations of one reconcile; ``pods`` is None if the pods could not be read."""

    pods: tuple[SelectedPod, ...] | None = None
    refused: tuple[RefusedCreation, ...] = ()
    wait_reasons: dict[WorkloadRef | None, str] = field(default_factory=dict)


class PolicyController(Reconciler[_Observation]):
    """Controller of SupervisionPolicies."""

    KIND, OBSERVATION = POLICY, _Observation

    def __init__(
        self,
        api: Api,
        store: Store,
        scraper: Scraper,
        config: Config,
        requeue: Callable[[Key], None],
        requeue_later: Callable[[Key, float], None],
        is_webhook_ready: Callable[[], bool],
    ) -> None:
        super().__init__(api, store, scraper, config, requeue_later, format_current_time)
        intervals, images = config.intervals, config.images
        check = is_webhook_ready if config.webhook is not None else None
        self._restarts = RollingRestarts(api, check, intervals=intervals)
        self._selected = PolicyPods(
            api, store, images, requeue, config.request_timeout_s, intervals.policy_pods,
            format_current_time,
        )  # fmt: skip
        self._refused = RefusedCreationWatch(api, images, requeue, format_current_time)
        self._groups = GroupHistory()
        self.suspects: dict[Key, tuple[str, ...]] = {}
        """Names of each policy's workloads with a suspect revision."""
        self.verdicts: dict[Key, list[tuple[str, Object]]] = {}
        """Verdicts on the revisions of each policy's workloads, each with the workload's name."""
        self.pods: dict[Key, dict[SupervisionState, int]] = {}
        """Number of each policy's pods by state, excluding terminating ones."""
        self.stopped: dict[Key, bool] = {}
        """Whether each policy's injection has stopped."""

    async def handle(self, key: Key) -> None:
        """Reconcile ``key`` and update its status."""
        self._selected.sync(key)
        await super().handle(key)

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted policy."""
        self._restarts.forget(key)
        self._refused.forget(key)
        self._groups.forget(key)
        for kept in (self.suspects, self.pods, self.stopped, self.verdicts):
            kept.pop(key, None)

    async def apply_spec(
        self,
        key: Key,
        item: Object,
        observation: _Observation,
        requeue_delays_s: list[float | None],
    ) -> Failure | None:
        """Read the pods, apply and delete objects, reconcile the pods, and request restarts."""
        policy = parse_object(SupervisionPolicy, item)
        observation.pods, addresses = pods, _ = await self._selected.read(key, policy)
        self._scraper.set_addresses(key, addresses)
        if self._config.webhook is not None:
            created = item["metadata"].get("creationTimestamp") or ""
            observation.refused = await self._refused.list_recent(key, policy, created)
        counts = Counter(one.state for one in pods)
        self.pods[key] = {
            state: counts[state]
            for state in SupervisionState
            if state is not SupervisionState.LEAVING
        }
        try:
            plan = await self._apply(key, item, policy, pods)
        except (NameConflictError, ApiError):
            # The pods run on, and their supervisors may request evictions.
            requeue_delays_s.append(await self._reconcile_pods(key, item, pods))
            raise
        requeue_delays_s += [compute_next_stuck_s(pods, self._clock()), HOUR_S]
        requeue_delays_s.append(await self._reconcile_pods(key, item, pods))
        observation.wait_reasons = await self._request_restarts(key, item, policy, plan)
        requeue_delays_s.append(
            self._config.intervals.rollout_settle if observation.wait_reasons else None
        )
        return plan.failure

    async def _reconcile_pods(
        self, key: Key, item: Object, pods: tuple[SelectedPod, ...]
    ) -> float | None:
        return await reconcile_pods(
            self._api, self._store, key, item, _make_views_without_containers(pods),
            self._list_incidents(key), self._clock(), self._config,
            self.evictions, {one.name for one in pods if one.member.workload is None},
            self._groups.record_starts(key, pods, self._clock()),
        )  # fmt: skip

    async def _apply(
        self, key: Key, item: Object, policy: SupervisionPolicy, pods: tuple[SelectedPod, ...]
    ) -> PolicyPlan:
        incidents, owned = self._list_incidents(key), self._find_live_objects(key)
        replicas = list_policy_replicas(sorted(pods, key=lambda one: one.created))
        published = owned.get(Ref("ConfigMap", make_policy_object_name(key.name)))
        files = await self._make_extra_files(key, pods, replicas, policy.spec.memory, published)
        now, before = self._clock(), item.get("status")
        plan = make_plan(policy, owned, pods, incidents, now, before, files)
        for one in plan.desired:
            await self._owned.apply(key, policy.metadata.uid, one, 0)
        await self._owned.remove(key, plan.surplus)
        return plan

    async def _request_restarts(
        self, key: Key, item: Object, policy: SupervisionPolicy, plan: PolicyPlan
    ) -> dict[WorkloadRef | None, str]:
        """Request rolling restarts, and return why each workload's pods still wait."""
        wait_reasons, requested = await self._restarts.request(
            key,
            policy,
            plan.workloads,
            plan.suspects,
            self._clock(),
            parse_injection(item.get("status")),
            self._config.max_waiting_pods,
        )
        await self._recorder.write(item, [make_restart_notice(str(ref)) for ref in requested])
        return wait_reasons

    async def make_status(
        self, key: Key, item: Object, observation: _Observation, failure: Failure | None
    ) -> tuple[Object, float | None]:
        """Return the status, and the seconds until it may change without an event, or None."""
        metrics, now = self._scraper.get_published(key), self._clock()
        views = [one.view for one in observation.pods or () if one.view]
        intervals, incidents = self._config.intervals, self._list_incidents(key)
        events, next_s = await read_pod_events(self._api, key.namespace, views, now, intervals)
        injection = self._decide_injection(item, observation)
        wanted = make_status(
            item,
            observation.pods,
            incidents,
            metrics,
            failure,
            now,
            observation.wait_reasons,
            events,
            injection,
            parse_object(SupervisionPolicy, item).spec.memory
            if observation.pods is not None
            else None,
            self._scraper.get_latest(key),
        )
        self.stopped[key] = "stopped" in (wanted.get("injection") or {})
        shown = index_workload_statuses(wanted)
        self.suspects[key] = tuple(name for name in shown if "suspectRevision" in shown[name])
        self.verdicts[key] = verdicts = [
            (name, one) for name in shown for one in shown[name].get("verdicts") or ()
        ]
        again_s = intervals.publish if may_change_with_time(one for _, one in verdicts) else None
        return wanted, find_shortest_delay_s(next_s, again_s)

    def list_notices(self, previous: Object, status: Object) -> Iterable[Notice]:
        """Return the Events for suspect revisions and for a stopped injection."""
        return [*make_suspect_notices(previous, status), *make_injection_notices(previous, status)]

    def _decide_injection(self, item: Object, observation: _Observation) -> Object | None:
        """Return the new ``status.injection``; None if the pods have not been read."""
        if observation.pods is None:
            return None
        policy, config = parse_object(SupervisionPolicy, item), self._config
        images, before = format_images(policy, config.images), parse_injection(item.get("status"))
        limit, now = config.max_waiting_pods, self._clock()
        return decide_injection(
            before, policy, images, observation.pods, limit, now, observation.refused
        )


def _make_views_without_containers(pods: tuple[SelectedPod, ...]) -> list[PodView]:
    return [
        PodView.make_without_containers(
            pod.name, pod.uid, pod.created, pod.state is SupervisionState.LEAVING
        )
        for pod in pods
        if pod.state in (SupervisionState.SUPERVISED, SupervisionState.LEAVING)
    ]
