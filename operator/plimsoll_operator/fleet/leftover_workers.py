"""Find workers of an earlier start of their group that Kubernetes has not deleted.

When the leader pod of a LeaderWorkerSet group is replaced, the garbage collector deletes the
StatefulSet of its workers, and then their pods. It misses the deletion if its watch breaks
meanwhile and a StatefulSet of the same name exists when it lists again. The pods then stay until
kube-controller-manager restarts, and their names block the workers of the new leader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from plimsoll_operator.fleet.pods import Cause, PodView, compute_seconds_between

MIN_LEADER_AGE_S = 120.0
"""Age of the leader from which an older worker counts as left over. After an outage of the API
server, the watches of client-go wait up to 60 s, and two of them must notice the deletion."""


def find_leftover_workers(pods: Iterable[PodView], now: str) -> Cause | None:
    """Return a cause that names the left-over workers among ``pods``; None if there are none.

    ``pods`` are pods that are not terminating. ``now`` is RFC 3339. Only creation times are
    compared: with several API servers, a skew of their clocks can look the same, so the cause only
    explains why a group is not ready.
    """
    groups: dict[str, list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.group and pod.created:
            groups[pod.group].append(pod)
    found = []
    for members in groups.values():
        leader = min(members, key=lambda one: len(one.name))
        if compute_seconds_between(leader.created, now) >= MIN_LEADER_AGE_S:
            found += [
                one.name
                for one in members
                if one.name.startswith(f"{leader.name}-")
                and compute_seconds_between(one.created, leader.created) > 0.0
            ]
    if not found:
        return None
    text = "older than their leader, and not deleted by the garbage collector; delete them"
    return Cause(
        "PodLeftOver", f"left over from an earlier start: {', '.join(sorted(found))}; {text}"
    )
