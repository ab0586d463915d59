"""Reads a service's pods and acts on them.

It records incidents that only a pod's status shows and deletes old incidents. It evicts pods at the
request of their supervisors, and reads the Events of pods whose status does not show a cause.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from plimsoll_operator.config import CLOCKS, Clocks, Config
from plimsoll_operator.fleet.group_loops import GroupStarts
from plimsoll_operator.fleet.incidents import plan_incidents, surplus_incidents
from plimsoll_operator.fleet.pods import CREATING_S, PodView, next_change_s, seconds_between
from plimsoll_operator.kinds import INCIDENT, Key, Object
from plimsoll_operator.render.names import MANAGER
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError

log = logging.getLogger(__name__)

MARK_MANAGER = "plimsoll-operator-incidents"
"""Field manager of the mark alone: its applications own no other field of an incident."""
OWNER_GONE = "plimsoll.dev/owner-gone-at"
"""Annotation of an incident: when its service or policy was first found missing (RFC 3339)."""
MAX_PODS = 4
"""Maximum number of pods whose Events are read: the pods of one service have the same problem."""


async def reconcile_pods(
    api: Api, store: Store, key: Key, item: Object, pods: Sequence[PodView],
    incidents: list[Object], now: str, config: Config, kept: Collection[str] = (),
    groups: Sequence[GroupStarts] = (),
) -> float | None:  # fmt: skip
    """Write and delete incidents, and evict pods; return the seconds until the next check.

    ``pods`` are all pods of the service or policy, including terminating ones. ``kept`` names the
    pods that nothing would replace, and ``groups`` are the multi-node groups.
    """
    incidents = await _prune(api, store, key, incidents, now, config)
    for one in incidents:
        if _owner_gone_at(one):  # the owner exists again
            await _apply_incident(api, store, _mark_patch(one), manager=MARK_MANAGER)
    found = plan_incidents(item, pods, incidents, now, groups)
    for incident in found.new:
        identity = {name: value for name, value in incident.items() if name != "status"}
        store.put(await api.apply(INCIDENT, identity))
        status = {name: value for name, value in incident.items() if name != "spec"}
        store.put(await api.apply(INCIDENT, status, "status"))
    for incident in found.updates:
        await _apply_incident(api, store, incident, "status")
    requeue_s = [found.requeue_s + 1.0] if found.requeue_s is not None else []
    for pod in filter(lambda name: name not in kept, found.evict):
        log.info("%s: evicting %s at its supervisor's request", key, pod)
        if not await api.evict(key.namespace, pod):
            requeue_s.append(config.clocks.evict_again)
    return min(requeue_s, default=None)


async def retain_incidents(
    api: Api, store: Store, key: Key, incidents: list[Object], now: str, config: Config
) -> float | None:
    """Keep the incidents of a deleted service or policy for :attr:`Clocks.orphans`.

    The time of the deletion is written on the incidents, so that it survives a restart of the
    operator. Returns the seconds until the next incident is deleted; None if none is left.
    """
    due = []
    for one in await _prune(api, store, key, incidents, now, config):
        try:
            left = config.clocks.orphans - max(0.0, seconds_between(_owner_gone_at(one), now))
        except (ValueError, OverflowError):
            await _apply_incident(api, store, _mark_patch(one, now), manager=MARK_MANAGER)
            left = config.clocks.orphans
        if left > 0.0:
            due.append(left)
        else:
            await _delete(api, store, key, one)
    return min(due, default=None)


async def _prune(
    api: Api, store: Store, key: Key, incidents: list[Object], now: str, config: Config
) -> list[Object]:
    """Delete surplus incidents; return the others."""
    elsewhere = store.count(INCIDENT.kind, key.namespace) - len(incidents) if incidents else 0
    least_age_s = config.clocks.incident_age
    old = surplus_incidents(incidents, config.kept_incidents, now, least_age_s, elsewhere)
    for one in old:
        await _delete(api, store, key, one)
    gone = {one["metadata"]["name"] for one in old}
    return [one for one in incidents if one["metadata"]["name"] not in gone]


async def _apply_incident(
    api: Api, store: Store, item: Object, subresource: str = "", manager: str = MANAGER
) -> None:
    """Apply to an existing incident of any writer; log a refusal and continue.

    Raises ApiError if the API server may answer differently later.
    """
    try:
        store.put(await api.apply(INCIDENT, item, subresource, manager))
    except ApiError as error:
        if not error.is_lasting:
            raise
        meta = item["metadata"]
        log.warning("cannot update incident %s/%s: %s", meta["namespace"], meta["name"], error)


async def _delete(api: Api, store: Store, key: Key, incident: Object) -> None:
    log.info("%s: deleting incident %s", key, incident["metadata"]["name"])
    if await api.delete(INCIDENT, incident):
        store.remove(incident)


def _owner_gone_at(incident: Object) -> str:
    """Return when the incident's service or policy was deleted; empty without a mark."""
    return str((incident["metadata"].get("annotations") or {}).get(OWNER_GONE, ""))


def _mark_patch(incident: Object, at: str = "") -> Object:
    """Build the patch that marks an incident, or without ``at`` removes the mark.

    With the UID, the API server refuses another object of the same name.
    """
    meta = {name: incident["metadata"][name] for name in ("name", "namespace", "uid")}
    marks = {"annotations": {OWNER_GONE: at}} if at else {}
    return {name: incident[name] for name in ("apiVersion", "kind")} | {"metadata": meta | marks}


async def pod_events(
    api: Api, namespace: str, pods: Sequence[PodView], now: str, clocks: Clocks = CLOCKS
) -> tuple[dict[str, list[Object]], float | None]:
    """Read the Events of some pods whose containers are not created, by the pod's name.

    Also returns the seconds until the next check. A pod's status does not show a volume that
    cannot be mounted, and does not change meanwhile. Raises ApiError if the API server may
    answer later: without Events, the status would lose its reason and then get it back.
    """
    requeue_s = [due] if (due := next_change_s(pods, now)) is not None else []
    found: dict[str, list[Object]] = {}
    for pod in pods:
        age = pod.creating_s(now)
        if age is None or age < CREATING_S or len(found) == MAX_PODS:
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
