"""Read a service's pods and act on them.

This module records incidents that only a pod's status shows, and deletes old incidents. It evicts
pods at the request of their supervisors, and reads the Events of pods whose status does not show a
cause.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from plimsoll_operator.config import DEFAULT_INTERVALS, Config, Intervals
from plimsoll_operator.fleet.group_loops import GroupStarts
from plimsoll_operator.fleet.incidents import find_surplus_incidents, plan_incidents
from plimsoll_operator.fleet.pods import (
    MIN_CREATING_S,
    PodView,
    compute_next_change_s,
    subtract_times,
)
from plimsoll_operator.kinds import INCIDENT, Key, Object
from plimsoll_operator.render.names import MANAGER
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError

log = logging.getLogger(__name__)

DELETION_MANAGER = "plimsoll-operator-incidents"
"""Field manager that owns only the annotation of a deleted owner on an incident."""
OWNER_DELETED_ANNOTATION = "plimsoll.dev/owner-gone-at"
"""Annotation of an incident: the time when its service or policy was first found missing (RFC
3339)."""
MAX_PODS_WITH_EVENTS = 4
"""Maximum number of pods whose Events are read, because a service's pods have the same problem."""


async def reconcile_pods(
    api: Api, store: Store, key: Key, item: Object, pods: Sequence[PodView],
    incidents: list[Object], now: str, config: Config, kept: Collection[str] = (),
    groups: Sequence[GroupStarts] = (),
) -> float | None:  # fmt: skip
    """Write and delete incidents, and evict pods; return the seconds until the next check.

    ``pods`` are all pods of the service or policy, including terminating ones. ``kept`` names the
    pods that nothing would replace, and ``groups`` are the multi-node groups.
    """
    incidents = await _delete_surplus(api, store, key, incidents, now, config)
    for one in incidents:
        if _read_deletion_time(one):  # the owner exists again
            await _apply_incident(api, store, _make_deletion_patch(one), manager=DELETION_MANAGER)
    found = plan_incidents(item, pods, incidents, now, groups)
    for incident in found.new:
        identity = {name: value for name, value in incident.items() if name != "status"}
        store.put(await api.apply(INCIDENT, identity))
        status = {name: value for name, value in incident.items() if name != "spec"}
        store.put(await api.apply(INCIDENT, status, "status"))
    for incident in found.updates:
        await _apply_incident(api, store, incident, "status")
    requeue_s = [found.requeue_s + 1.0] if found.requeue_s is not None else []
    for pod in filter(lambda one: one.name not in kept, found.evict):
        log.info("%s: evicting %s at its supervisor's request", key, pod.name)
        if not await api.evict(key.namespace, pod.name, pod.uid):
            requeue_s.append(config.clocks.evict_again)
    return min(requeue_s, default=None)


async def retain_incidents(
    api: Api, store: Store, key: Key, incidents: list[Object], now: str, config: Config
) -> float | None:
    """Keep the incidents of a deleted service or policy for :attr:`Intervals.orphans`.

    The time of the deletion is written to the incidents, so that it survives a restart of the
    operator. Return the seconds until the next incident is deleted; None if none is left.
    """
    due = []
    for one in await _delete_surplus(api, store, key, incidents, now, config):
        try:
            left = config.clocks.orphans - max(0.0, subtract_times(_read_deletion_time(one), now))
        except (ValueError, OverflowError):
            await _apply_incident(
                api, store, _make_deletion_patch(one, now), manager=DELETION_MANAGER
            )
            left = config.clocks.orphans
        if left > 0.0:
            due.append(left)
        else:
            await _delete_incident(api, store, key, one)
    return min(due, default=None)


async def _delete_surplus(
    api: Api, store: Store, key: Key, incidents: list[Object], now: str, config: Config
) -> list[Object]:
    """Delete surplus incidents. Return the others."""
    elsewhere = store.count(INCIDENT.kind, key.namespace) - len(incidents) if incidents else 0
    least_age_s = config.clocks.incident_age
    old = find_surplus_incidents(incidents, config.kept_incidents, now, least_age_s, elsewhere)
    for one in old:
        await _delete_incident(api, store, key, one)
    gone = {one["metadata"]["name"] for one in old}
    return [one for one in incidents if one["metadata"]["name"] not in gone]


async def _apply_incident(
    api: Api, store: Store, item: Object, subresource: str = "", manager: str = MANAGER
) -> None:
    """Apply to an existing incident of any writer. Log a refusal and continue.

    Raises ApiError if the API server may answer differently later.
    """
    try:
        store.put(await api.apply(INCIDENT, item, subresource, manager))
    except ApiError as error:
        if not error.is_lasting:
            raise
        meta = item["metadata"]
        log.warning("cannot update incident %s/%s: %s", meta["namespace"], meta["name"], error)


async def _delete_incident(api: Api, store: Store, key: Key, incident: Object) -> None:
    log.info("%s: deleting incident %s", key, incident["metadata"]["name"])
    if await api.delete(INCIDENT, incident):
        store.remove(incident)


def _read_deletion_time(incident: Object) -> str:
    """Return when the incident's service or policy was deleted; empty without the annotation."""
    return str((incident["metadata"].get("annotations") or {}).get(OWNER_DELETED_ANNOTATION, ""))


def _make_deletion_patch(incident: Object, at: str = "") -> Object:
    """Return the patch that adds the deletion time to an incident, or removes it without ``at``.

    With the UID, the API server refuses another object of the same name.
    """
    meta = {name: incident["metadata"][name] for name in ("name", "namespace", "uid")}
    marks = {"annotations": {OWNER_DELETED_ANNOTATION: at}} if at else {}
    return {name: incident[name] for name in ("apiVersion", "kind")} | {"metadata": meta | marks}


async def read_pod_events(
    api: Api,
    namespace: str,
    pods: Sequence[PodView],
    now: str,
    clocks: Intervals = DEFAULT_INTERVALS,
) -> tuple[dict[str, list[Object]], float | None]:
    """Read the Events of some pods whose containers are not created, by pod name.

    Also return the seconds until the next check. A pod's status does not show a volume that cannot
    be mounted, and does not change meanwhile. Raises ApiError if the API server may answer later:
    without Events, the status would lose its reason and then get it back.
    """
    requeue_s = [due] if (due := compute_next_change_s(pods, now)) is not None else []
    found: dict[str, list[Object]] = {}
    for pod in pods:
        age = pod.measure_creating_s(now)
        if age is None or age < MIN_CREATING_S or len(found) == MAX_PODS_WITH_EVENTS:
            continue
        requeue_s.append(clocks.creating_again)
        try:
            found[pod.name] = await api.events_of(namespace, pod.uid)
        except ApiError as error:
            if not error.is_lasting:
                raise
            log.warning("cannot list Events of pod %s/%s: %s", namespace, pod.name, error)
            found[pod.name] = []
    return found, min(requeue_s, default=None)
