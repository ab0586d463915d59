"""Find workers that are left over from an earlier start of their multi-node group.

The garbage collector may miss that a StatefulSet was replaced by one with the same name. The old
pods then stay, and their names block the new workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from plimsoll_operator.fleet.pods import Cause, PodView, compute_seconds_between

LEFTOVER_MESSAGE = "workers left over from an earlier start of the group"
"""Start of the cause's message, before the names of the pods."""
MIN_LEADER_AGE_S = 120.0
"""Minimum age of a leader whose older workers count as left over. After an outage, two watches
of up to 60 s each must notice a deletion."""


def find_leftover_workers(pods: Iterable[PodView], now: str) -> Cause | None:
    """Return a cause that names the left-over workers among ``pods``; None if there are none.

    ``pods`` must not be terminating. ``now`` is RFC 3339. Use the cause only to explain why a group
    is not ready: clock skew between API servers can look the same.
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
    text = (
        "these pods are older than their leader, but the garbage collector did not delete them:"
        " delete them yourself"
    )
    return Cause("PodLeftOver", f"{LEFTOVER_MESSAGE}: {', '.join(sorted(found))}; {text}")
