"""Bad revisions: the same leak in most replicas of one revision is the revision's, not a replica's.

A pod's revision is its label; of a pod that is gone it is that of its ReplicaSet's other pods. What
a ReplicaSet does not make is only known while it is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from plimsoll_api.names import REVISION_LABEL
from plimsoll_operator.kinds import Object

LEAKS = frozenset({"HostGrowth", "DeviceGrowth", "CapacityLoss", "OutOfMemoryKill"})
MIN_LEAKING = 2
"""One replica's leak is an incident."""

MAX_CHANGES = 16


@dataclass(frozen=True)
class Suspect:
    """``since`` is when the leak began in the replica that made it most of them (RFC 3339)."""

    revision: str
    leak: str
    since: str
    leaking: int
    replicas: int


class ReplicaPod(NamedTuple):
    """A pod as evidence.

    ``replica`` names what it is, or is a part of; ``in_set`` says whether a ReplicaSet made it;
    ``created`` is RFC 3339, empty if no other pod ever has its name.
    """

    pod: str
    revision: str
    replica: str
    in_set: bool = True
    created: str = ""


def of_pods(pods: Iterable[Object]) -> list[ReplicaPod]:
    """Return the pods of an InferenceService as evidence."""
    return [ReplicaPod(name := pod["metadata"]["name"], revision_of(pod), name) for pod in pods]


def find(revision: str, pods: list[ReplicaPod], incidents: list[Object]) -> Suspect | None:
    """Whether most replicas of ``revision`` have the same leak; the earliest such leak."""
    present = {pod.pod: pod for pod in pods}
    of_sets = {_set(pod.pod): pod.revision for pod in pods if pod.in_set}
    replicas = len({pod.replica for pod in pods if pod.revision == revision})
    first: dict[str, dict[str, str]] = defaultdict(dict)
    for incident in incidents:
        spec = incident["spec"]
        if spec["kind"] not in LEAKS or not _confirmed(incident):
            continue
        pod = present.get(spec["pod"])
        if pod is not None and incident["metadata"].get("creationTimestamp", "") < pod.created:
            continue  # of an earlier pod of this name, whose revision nobody knows
        if (pod.revision if pod else of_sets.get(_set(spec["pod"]))) != revision:
            continue
        seen, replica = first[_leak(incident)], pod.replica if pod else spec["pod"]
        seen[replica] = min(seen.get(replica, spec["openedAt"]), spec["openedAt"])
    needed = max(MIN_LEAKING, replicas // 2 + 1)
    found = [
        Suspect(revision, leak, sorted(begun.values())[needed - 1], len(begun), replicas)
        for leak, begun in first.items()
        if len(begun) >= needed
    ]
    return min(found, key=lambda one: (one.since, one.leak), default=None)


def revision_of(pod: Object) -> str:
    """Return the revision that ``pod`` was made from, empty if it does not say."""
    return str((pod["metadata"].get("labels") or {}).get(REVISION_LABEL, ""))


def changes(before: Any, after: Any, path: str = "") -> list[str]:
    """Paths of a pod template that differ, as people write them; bounded."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        parts = (changes(before.get(k), after.get(k), f"{path}.{k}") for k in keys)
        return [one for part in parts for one in part][:MAX_CHANGES]
    if _named(before) and _named(after):
        old, new = ({one["name"]: one for one in items} for items in (before, after))
        keys = sorted(old.keys() | new.keys())
        parts = (changes(old.get(k), new.get(k), f"{path}[{k}]") for k in keys)
        return [one for part in parts for one in part][:MAX_CHANGES]
    if before == after:
        return []
    return [f"{path.removeprefix('.')}: {_short(before)} -> {_short(after)}"]


def _named(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(i, dict) and "name" in i for i in items)


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _confirmed(incident: Object) -> bool:
    status = incident.get("status") or {}
    return status.get("phase") not in (None, "Open") and status.get("outcome") != "Cleared"


def _leak(incident: Object) -> str:
    attribution = (incident.get("status") or {}).get("attribution") or {}
    segment = attribution.get("segment")
    kind = str(incident["spec"]["kind"])
    return f"{kind} in {segment}" if segment else kind


def _set(pod: str) -> str:
    """Name of the ReplicaSet: a pod's name without its last part."""
    return pod.rpartition("-")[0]
