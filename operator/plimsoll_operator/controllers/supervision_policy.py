"""The reconcile of one SupervisionPolicy: plan, write what differs, report in its status."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.config import Config
from plimsoll_operator.controllers.inference_service import now
from plimsoll_operator.controllers.pods import outlive, pod_events, reconcile_pods
from plimsoll_operator.controllers.refused_creations import RefusedCreations
from plimsoll_operator.controllers.rolling_restart import RollingRestarts
from plimsoll_operator.controllers.selected_pods import PolicyPods
from plimsoll_operator.controllers.writes import (
    NameConflict,
    OwnedObjects,
    Recorder,
    Refusals,
    write_status,
)
from plimsoll_operator.fleet.figures import Summaries, replicas_of_policy
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.refused_creations import RefusedCreation
from plimsoll_operator.fleet.selected_pods import SelectedPod, State, stuck_s
from plimsoll_operator.fleet.workloads import of_workloads
from plimsoll_operator.injection.policy import images_of
from plimsoll_operator.kinds import (
    INCIDENT,
    OWNED,
    POLICY,
    InvalidSpec,
    Key,
    Object,
    Ref,
    read,
    ref,
)
from plimsoll_operator.plans.injection import decide, known
from plimsoll_operator.plans.policy import PolicyPlan, reconcile
from plimsoll_operator.plans.service import Failure
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.scraper import Scraper
from plimsoll_operator.status.notices import (
    not_starting,
    refused,
    restart_asked,
    suspected,
)
from plimsoll_operator.status.policy import status

log = logging.getLogger(__name__)


_OWNED = frozenset(kind.kind for kind in OWNED)


class PolicyController:
    """Reconcile policies, one call a policy; safe to call at any time, any number of times."""

    def __init__(
        self,
        api: Api,
        store: Store,
        scraper: Scraper,
        config: Config,
        add: Callable[[Key], None] = lambda _: None,
        later: Callable[[Key, float], None] = lambda *_: None,
        clock: Callable[[], str] = now,
        webhook: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare a controller for the policies in ``store``.

        ``add`` asks for another reconcile of a policy, ``later`` for one after some seconds.
        ``webhook`` says whether pods that are created now get a supervisor.
        """
        self._api, self._store, self._scraper = api, store, scraper
        self._config, self._later, self._clock = config, later, clock
        self._owned, self._recorder = OwnedObjects(api, store), Recorder(api, clock)
        self._restarts = RollingRestarts(
            api, webhook if config.webhook is not None else None, clocks=config.clocks
        )
        self._refusals = Refusals()
        self._peers = Summaries(time.monotonic, config.clocks.publish)
        self._selected = PolicyPods(
            api,
            store,
            config.images,
            add,
            config.request_timeout_s,
            config.clocks.policy_pods,
            clock,
        )
        self._refused = RefusedCreations(api, config.images, add, clock)
        self.suspects: dict[Key, tuple[str, ...]] = {}
        """Workloads with a revision that leaks in most replicas."""
        self.pods: dict[Key, dict[State, int]] = {}
        """How many pods of each policy are in each state; those that end are left out."""

        self.stopped: dict[Key, bool] = {}
        """Whether new pods of each policy get no supervisor, because others do not start."""

    async def handle(self, key: Key) -> None:
        """Carry out the spec of the policy ``key``, and update its status."""
        self._selected.sync(key)
        item = self._store.get(key, Ref(POLICY.kind, key.name))
        if item is None:
            self._scraper.forget(key)
            self._refusals.forget(key)
            self._peers.forget(key)
            self._owned.forget(key)
            self._restarts.forget(key)
            self._refused.forget(key)
            self.suspects.pop(key, None)
            self.pods.pop(key, None)
            await self._leave(key)
            self.stopped.pop(key, None)
            return
        if item["metadata"].get("deletionTimestamp"):
            return
        failure: Failure | None = None
        error: Exception | None = None
        pods: tuple[SelectedPod, ...] | None = None
        not_created: tuple[RefusedCreation, ...] = ()
        said: dict[WorkloadRef | None, str] = {}
        again: list[float | None] = []
        try:
            policy = read(SupervisionPolicy, item)
            pods, addresses = await self._selected.of(key, policy)
            self._scraper.follow(key, addresses)
            if self._config.webhook is not None:
                created = item["metadata"].get("creationTimestamp") or ""
                not_created = await self._refused.of(key, policy, created)
            there = Counter(one.state for one in pods)
            self.pods[key] = {state: there[state] for state in State if state is not State.LEAVING}
            plan = await self._carry_out(key, item, policy, pods)
            failure = plan.failure
            again += [self._peers.next_s(key), stuck_s(pods, self._clock())]
            look = await reconcile_pods(
                self._api, self._store, key, item, _brief(pods), self._incidents(key),
                self._clock(), self._config,
                {one.name for one in pods if one.member.workload is None},
            )  # fmt: skip
            again.append(look)
            said = await self._restart(key, item, policy, plan)
            again.append(self._config.clocks.rollout_settle if said else None)
        except (InvalidSpec, NameConflict, ApiError) as problem:
            failure, error = self._refusals.judge(key, problem)
        else:
            self._refusals.forget(key)
        if failure is not None:
            await self._recorder.write(item, [refused(failure)])
        again.append(await self._report(key, item, pods, failure, said, not_created))
        if error:
            raise error
        if due := [one for one in again if one is not None]:
            self._later(key, min(due))

    async def _carry_out(
        self, key: Key, item: Object, policy: SupervisionPolicy, pods: tuple[SelectedPod, ...]
    ) -> PolicyPlan:
        incidents, latest = self._incidents(key), self._scraper.latest(key)
        plan = reconcile(
            policy,
            {ref(one): one for one in self._store.of(key, _OWNED)},
            pods,
            incidents,
            self._clock(),
            item.get("status"),
            self._peers.text(key, replicas_of_policy(pods), incidents, latest),
        )
        for one in plan.desired:
            await self._owned.apply(key, policy.metadata.uid, one, 0)
        await self._owned.remove(key, plan.surplus)
        return plan

    async def _restart(
        self, key: Key, item: Object, policy: SupervisionPolicy, plan: PolicyPlan
    ) -> dict[WorkloadRef | None, str]:
        """Ask for rolling restarts; return what waiting pods wait for, by workload."""
        said, asked = await self._restarts.turn(
            key,
            policy,
            plan.workloads,
            plan.suspects,
            self._clock(),
            known(item.get("status")),
            self._config.max_waiting_pods,
        )
        await self._recorder.write(item, [restart_asked(str(ref)) for ref in asked])
        return said

    async def _report(
        self,
        key: Key,
        item: Object,
        pods: tuple[SelectedPod, ...] | None,
        failure: Failure | None,
        said: dict[WorkloadRef | None, str],
        refused: tuple[RefusedCreation, ...],
    ) -> float | None:
        """Write the status where it changed.

        Returns the seconds after which it may change by the passage of time alone; None for never.
        """
        item = self._store.get(key, Ref(POLICY.kind, key.name)) or item
        figures, now = self._scraper.published(key), self._clock()
        views = [one.view for one in pods or () if one.view]
        events, again = await pod_events(self._api, key.namespace, views, now, self._config.clocks)
        incidents, injection = self._incidents(key), self._injection(item, pods, refused)
        wanted = status(item, pods, incidents, figures, failure, now, said, events, injection)
        self.stopped[key] = "stopped" in (wanted.get("injection") or {})
        shown = of_workloads(wanted)
        self.suspects[key] = tuple(name for name in shown if "suspectRevision" in shown[name])
        if wanted == item.get("status"):
            return again
        if await write_status(self._api, self._store, POLICY, item, wanted):
            before = item.get("status") or {}
            notices = [*suspected(before, wanted), *not_starting(before, wanted)]
            await self._recorder.write(item, notices)
        return again

    def _injection(
        self,
        item: Object,
        pods: tuple[SelectedPod, ...] | None,
        refused: tuple[RefusedCreation, ...],
    ) -> Object | None:
        """Decide whether new pods get a supervisor; None if the spec selects none."""
        if pods is None:
            return None
        policy, config = read(SupervisionPolicy, item), self._config
        images = images_of(policy, config.images)
        before = known(item.get("status"))
        limit, now = config.max_waiting_pods, self._clock()
        return decide(before, policy, images, pods, limit, now, refused)

    async def _leave(self, key: Key) -> None:
        """Keep the incidents of a policy that is gone for a while."""
        known, now = self._incidents(key), self._clock()
        left = await outlive(self._api, self._store, key, known, now, self._config)
        if left is not None:
            self._later(key, left)

    def _incidents(self, key: Key) -> list[Object]:
        return self._store.of(key, {INCIDENT.kind})


def _brief(pods: tuple[SelectedPod, ...]) -> list[PodView]:
    """Return the pods that are supervised or terminating, without their containers."""
    return [
        PodView.brief(one.name, one.created, one.state is State.LEAVING)
        for one in pods
        if one.state in (State.SUPERVISED, State.LEAVING)
    ]
