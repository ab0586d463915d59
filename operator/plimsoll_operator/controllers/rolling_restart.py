"""Restart a policy's workloads whose pods wait for a supervisor, once per policy generation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from plimsoll_api.supervision_policy import PolicyRollout, SupervisionPolicy
from plimsoll_api.supervision_policy_status import MAX_STATUS_REASON_CHARS as MAX_SAID
from plimsoll_api.supervision_policy_status import Injection
from plimsoll_api.workloads import WorkloadRef
from plimsoll_operator.config import DEFAULT_INTERVALS, Intervals
from plimsoll_operator.fleet.selected_pods import SupervisionState
from plimsoll_operator.fleet.workloads import Workload
from plimsoll_operator.kinds import Key, Kind
from plimsoll_operator.plans.rolling_restart import (
    RESTART_REQUESTED_MESSAGE,
    ROLLOUT_FIELD_MANAGER,
    STOPPED_MESSAGE,
    SUSPECT_REVISION_MESSAGE,
    UNPROVEN_MESSAGE,
    WEBHOOK_NOT_READY_MESSAGE,
    WEBHOOK_OFF_MESSAGE,
    explain_manual_restart,
    find_restart_obstacle,
    find_restartable_kind,
    is_restart_requested,
    list_waiting_workloads,
    make_restart_patch,
)
from plimsoll_operator.runtime.client import Api, ApiError

log = logging.getLogger(__name__)

MAX_CHECKS_PER_RECONCILE = 10
"""Maximum number of workloads that are checked in one reconcile."""


class _WorkloadCheck(NamedTuple):
    """Result of checking a workload for one generation of a policy."""

    generation: tuple[str, int, bool]
    checked_at: float
    text: str

    @property
    def is_restart_requested(self) -> bool:
        return self.text == RESTART_REQUESTED_MESSAGE


class RollingRestarts:
    """Rolling restarts of workloads whose pods wait for a supervisor."""

    def __init__(
        self,
        api: Api,
        is_webhook_ready: Callable[[], bool] | None,
        clock: Callable[[], float] = time.monotonic,
        intervals: Intervals = DEFAULT_INTERVALS,
    ) -> None:
        self._api, self._is_webhook_ready, self._clock = api, is_webhook_ready, clock
        self._intervals = intervals
        self._first_seen: dict[Key, tuple[tuple[str, int, bool], float]] = {}
        self._checks: dict[Key, dict[WorkloadRef, _WorkloadCheck]] = {}

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted policy."""
        self._first_seen.pop(key, None)
        self._checks.pop(key, None)

    async def request(
        self,
        key: Key,
        policy: SupervisionPolicy,
        workloads: Sequence[Workload],
        suspects: Collection[WorkloadRef | None],
        now: str,
        injection: Injection | None = None,
        limit: int = 0,
    ) -> tuple[dict[WorkloadRef | None, str], list[WorkloadRef]]:
        """Request rolling restarts of workloads whose pods wait for a supervisor.

        If more than ``limit`` pods wait before any pod has started with a supervisor, restart one
        workload first as a trial. Return the status text of each workload, and the workloads whose
        restart this call requested. Raises ApiError if a request may succeed later.
        """
        if policy.spec.rollout is not PolicyRollout.RESTART:
            self.forget(key)
            return {}, []
        waiting, at = list_waiting_workloads(workloads), self._clock()
        has_many_waiting = sum(one.count_pods(SupervisionState.WAITING) for one in waiting) > limit
        is_trial = injection is not None and not injection.proven and has_many_waiting
        generation = policy.metadata.uid, policy.metadata.generation, is_trial
        first_seen = self._first_seen.get(key)
        if first_seen is None or first_seen[0] != generation:
            first_seen = self._first_seen[key] = (generation, at)
        is_settled = at - first_seen[1] >= self._intervals.rollout_settle
        checks = self._checks.setdefault(key, {})
        for gone in checks.keys() - {one.ref for one in waiting}:
            del checks[gone]
        texts: dict[WorkloadRef | None, str] = {}
        requested: list[WorkloadRef] = []
        checked = 0
        is_trial_running = is_trial and any(
            one.is_restart_requested and one.generation == generation for one in checks.values()
        )
        for one in waiting:
            ref, kind = one.ref, find_restartable_kind(one)
            if ref is None or kind is None:
                texts[ref] = explain_manual_restart(ref)
                continue
            if injection is not None and injection.stopped is not None:
                texts[ref] = STOPPED_MESSAGE
                continue
            if self._is_webhook_ready is None or ref in suspects:
                texts[ref] = (
                    SUSPECT_REVISION_MESSAGE if self._is_webhook_ready else WEBHOOK_OFF_MESSAGE
                )
                continue
            check = checks.get(ref)
            is_outdated = check is None or check.generation != generation
            is_retry_due = (
                check is not None
                and not check.is_restart_requested
                and at - check.checked_at >= self._intervals.rollout_again
            )
            if is_trial_running and (check is None or not check.is_restart_requested):
                texts[ref] = UNPROVEN_MESSAGE
                continue
            if (is_outdated or is_retry_due) and not self._is_webhook_ready():
                texts[ref] = WEBHOOK_NOT_READY_MESSAGE
                continue
            if (is_outdated or is_retry_due) and is_settled and checked < MAX_CHECKS_PER_RECONCILE:
                checked += 1
                text, new = await self._request_restart(
                    kind, key.namespace, ref.name, policy, now, is_trial
                )
                check = checks[ref] = _WorkloadCheck(generation, at, text)
                requested += [ref] if new else []
                is_trial_running = is_trial and check.is_restart_requested
            if check is not None and check.generation == generation:
                texts[ref] = check.text
        return texts, requested

    async def _request_restart(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        policy: SupervisionPolicy,
        now: str,
        is_trial: bool,
    ) -> tuple[str, bool]:
        """Return the workload's status text, and whether this call requested the restart."""
        try:
            live = await self._api.get(kind, namespace, name)
            if live is None:
                return "the workload no longer exists", False
            live |= {"apiVersion": kind.api_version, "kind": kind.kind}
            if is_restart_requested(live, policy, is_trial):
                return RESTART_REQUESTED_MESSAGE, False
            if obstacle := find_restart_obstacle(live, policy):
                return obstacle, False
            log.info(
                "%s/%s: requesting a rolling restart of %s %s for a supervisor",
                namespace,
                policy.metadata.name,
                kind.kind,
                name,
            )
            await self._api.apply(
                kind, make_restart_patch(live, policy, now, is_trial), manager=ROLLOUT_FIELD_MANAGER
            )
        except ApiError as error:
            if not error.is_lasting:
                raise
            return f"the API server rejected the rolling restart: {error.message}"[:MAX_SAID], False
        return RESTART_REQUESTED_MESSAGE, True
