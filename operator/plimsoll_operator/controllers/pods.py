"""Write incidents about pods, delete old incidents, and evict pods.

:mod:`plimsoll_operator.fleet.incidents` decides which.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from plimsoll_operator.config import DEFAULT_INTERVALS, Config, Intervals
from plimsoll_operator.fleet.group_loops import GroupStarts
from plimsoll_operator.fleet.incidents import find_surplus_incidents, plan_incidents
from plimsoll_operator.fleet.pods import (
    MIN_AGE_FOR_EVENTS_S,
    PodView,
    compute_next_change_s,
    compute_seconds_between,
)
from plimsoll_operator.kinds import INCIDENT, Key, Object
from plimsoll_operator.render.names import FIELD_MANAGER
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError

log = logging.getLogger(__name__)

DELETION_FIELD_MANAGER = "plimsoll-operator-incidents"
"""Field manager of the annotation :data:`OWNER_DELETED_ANNOTATION`."""
OWNER_DELETED_ANNOTATION = "plimsoll.dev/owner-gone-at"
"""Annotation of an incident: when the operator found its owner deleted (RFC 3339)."""
MAX_PODS_WITH_EVENTS = 4
"""Maximum number of pods whose Events are read in one reconcile."""


class Evictions:
    """Evictions, with at least ``retry_s`` seconds between two attempts for a pod.

    ``refusals`` counts the refused attempts of each service or policy.
    """

    def __init__(self, api: Api, clock: Callable[[], float], retry_s: float) -> None:
        self._api, self._clock, self._retry_s = api, clock, retry_s
        self._retry_at: dict[str, float] = {}
        self.refusals: Counter[Key] = Counter()

    def forget(self, key: Key) -> None:
        """Drop the count of a deleted service or policy."""
        self.refusals.pop(key, None)

    async def evict(self, key: Key, pod: PodView) -> float | None:
        """Evict ``pod`` if an attempt is due.

        Return the seconds until the next attempt; None if the pod was evicted.
        """
        now = self._clock()
        self._retry_at = {uid: at for uid, at in self._retry_at.items() if at > now}
        # Reconciles may follow each other within milliseconds.
        if (retry_at := self._retry_at.get(pod.uid)) is not None:
            return retry_at - now
        refusal = await self._api.evict(key.namespace, pod.name, pod.uid)
        if not refusal:
            log.info("%s: evicted Pod %s at the request of its supervisor", key, pod.name)
            return None
        log.warning("%s: Pod %s cannot be evicted yet: %s", key, pod.name, refusal)
        self.refusals[key] += 1
        self._retry_at[pod.uid] = now + self._retry_s
        return self._retry_s


async def reconcile_pods(
    api: Api, store: Store, key: Key, item: Object, pods: Sequence[PodView],
    incidents: list[Object], now: str, config: Config, evictions: Evictions,
    protected_pods: Collection[str] = (), groups: Sequence[GroupStarts] = (),
) -> float | None:  # fmt: skip
    """Write and delete incidents, and evict pods. Return the seconds until the next check, or None.

    ``pods`` include terminating pods. ``protected_pods`` are the names of pods that no controller
    would replace. ``groups`` are the multi-node groups.
    """
    incidents = await _delete_surplus_incidents(api, store, key, incidents, now, config)
    for one in incidents:
        if _read_deletion_time(one):  # the owner exists again
            await _apply_incident(
                api, store, _make_deletion_patch(one), manager=DELETION_FIELD_MANAGER
            )
    changes = plan_incidents(item, pods, incidents, now, groups, config.kept_incidents)
    for incident in changes.new:
        identity = {name: value for name, value in incident.items() if name != "status"}
        store.put(await api.apply(INCIDENT, identity))
        status = {name: value for name, value in incident.items() if name != "spec"}
        store.put(await api.apply(INCIDENT, status, "status"))
    for incident in changes.updates:
        await _apply_incident(api, store, incident, "status")
    requeue_s = [changes.requeue_s + 1.0] if changes.requeue_s is not None else []
    for pod in changes.evict:
        if (
            pod.name not in protected_pods
            and (retry_s := await evictions.evict(key, pod)) is not None
        ):
            requeue_s.append(retry_s)
    return min(requeue_s, default=None)


async def delete_expired_incidents(
    api: Api, store: Store, key: Key, incidents: list[Object], now: str, config: Config
) -> float | None:
    """Delete the incidents of a deleted service or policy after :attr:`Intervals.orphans` seconds.

    Return the seconds until the next deletion; None if no incident is left.
    """
    due = []
    for incident in await _delete_surplus_incidents(api, store, key, incidents, now, config):
        try:
            left = config.intervals.orphans - max(
                0.0, compute_seconds_between(_read_deletion_time(incident), now)
            )
        except (ValueError, OverflowError):
            await _apply_incident(
                api, store, _make_deletion_patch(incident, now), manager=DELETION_FIELD_MANAGER
            )
            left = config.intervals.orphans
        if left > 0.0:
            due.append(left)
        else:
            await _delete_incident(api, store, key, incident)
    return min(due, default=None)


async def _delete_surplus_incidents(
    api: Api, store: Store, key: Key, incidents: list[Object], now: str, config: Config
) -> list[Object]:
    """Delete the incidents that exceed the limits, and return the others."""
    elsewhere = store.count(INCIDENT.kind, key.namespace) - len(incidents) if incidents else 0
    least_age_s = config.intervals.incident_age
    surplus = find_surplus_incidents(incidents, config.kept_incidents, now, least_age_s, elsewhere)
    for incident in surplus:
        await _delete_incident(api, store, key, incident)
    deleted = {incident["metadata"]["name"] for incident in surplus}
    return [incident for incident in incidents if incident["metadata"]["name"] not in deleted]


async def _apply_incident(
    api: Api, store: Store, item: Object, subresource: str = "", manager: str = FIELD_MANAGER
) -> None:
    try:
        store.put(await api.apply(INCIDENT, item, subresource, manager))
    except ApiError as error:
        if not error.is_lasting:
            raise
        meta = item["metadata"]
        log.warning(
            "failed to update LeakIncident %s/%s: %s", meta["namespace"], meta["name"], error
        )


async def _delete_incident(api: Api, store: Store, key: Key, incident: Object) -> None:
    log.info("%s: deleting LeakIncident %s", key, incident["metadata"]["name"])
    if await api.delete(INCIDENT, incident):
        store.remove(incident)


# The time at which the operator found the owner deleted; empty if unset.
def _read_deletion_time(incident: Object) -> str:
    return str((incident["metadata"].get("annotations") or {}).get(OWNER_DELETED_ANNOTATION, ""))


# Without ``deleted_at``, the patch removes the time. It contains the UID, so that the API server
# rejects it for a new incident with the same name.
def _make_deletion_patch(incident: Object, deleted_at: str = "") -> Object:
    meta = {name: incident["metadata"][name] for name in ("name", "namespace", "uid")}
    marks = {"annotations": {OWNER_DELETED_ANNOTATION: deleted_at}} if deleted_at else {}
    return {name: incident[name] for name in ("apiVersion", "kind")} | {"metadata": meta | marks}


async def read_pod_events(
    api: Api,
    namespace: str,
    pods: Sequence[PodView],
    now: str,
    intervals: Intervals = DEFAULT_INTERVALS,
) -> tuple[dict[str, list[Object]], float | None]:
    """Return the Events of pods without containers by pod name, and the delay of the next check.

    The delay is in seconds; None if no check is needed. Raises ApiError if the request may succeed
    later.
    """
    requeue_s = [due_s] if (due_s := compute_next_change_s(pods, now)) is not None else []
    events: dict[str, list[Object]] = {}
    for pod in pods:
        age_s = pod.compute_creation_wait_s(now)
        if age_s is None or age_s < MIN_AGE_FOR_EVENTS_S or len(events) == MAX_PODS_WITH_EVENTS:
            continue
        requeue_s.append(intervals.creating_again)
        try:
            events[pod.name] = await api.list_object_events(namespace, pod.uid)
        except ApiError as error:
            if not error.is_lasting:
                raise
            log.warning("failed to list the Events of Pod %s/%s: %s", namespace, pod.name, error)
            events[pod.name] = []
    return events, min(requeue_s, default=None)
