"""Detect multi-node groups that their controller recreates repeatedly.

The kubelet reports no crash loop for new pods, so the operator counts the leader pods since its
start.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from plimsoll_operator.fleet.pods import compute_seconds_between
from plimsoll_operator.fleet.selected_pods import SUPERVISED_STATES, SelectedPod, SupervisionState
from plimsoll_operator.kinds import Key

RECREATION_WINDOW_S = 600.0
"""Seconds for which a recreation counts, equal to the kubelet's time for restarts."""
MIN_RECREATIONS_IN_LOOP = 4
"""Number of recreations that count as a crash loop; a rollout causes one."""
MIN_LEADER_AGE_FOR_RECOVERY_S = 120.0
"""Minimum age of a ready leader whose group counts as recovered."""
MAX_LEADERS_PER_GROUP = 32


@dataclass(frozen=True)
class GroupStarts:
    """Recent starts of a group.

    ``leader`` is its newest leader pod, and ``age_s`` the pod's age. ``recreations`` are those
    within :data:`RECREATION_WINDOW_S`.
    """

    leader: SelectedPod
    recreations: int
    age_s: float

    @property
    def has_recovered(self) -> bool:
        """Whether the leader is ready and older than :data:`MIN_LEADER_AGE_FOR_RECOVERY_S`."""
        ready = self.leader.state is SupervisionState.SUPERVISED and self.leader.view is None
        return ready and self.age_s >= MIN_LEADER_AGE_FOR_RECOVERY_S

    @property
    def is_looping(self) -> bool:
        """Whether the group has been recreated too often and has not recovered."""
        return self.recreations >= MIN_RECREATIONS_IN_LOOP and not self.has_recovered


class GroupHistory:
    """Creation times of the leader pods of each policy's groups."""

    def __init__(self) -> None:
        self._created: dict[Key, dict[tuple[str, str], deque[str]]] = {}

    def forget(self, key: Key) -> None:
        """Drop the history of a deleted policy."""
        self._created.pop(key, None)

    def record_starts(self, key: Key, pods: Iterable[SelectedPod], now: str) -> list[GroupStarts]:
        """Return the recent starts of each LeaderWorkerSet group among ``pods``.

        ``now`` is RFC 3339.
        """
        groups: dict[tuple[str, str], list[SelectedPod]] = defaultdict(list)
        for one in pods:
            ref, name = one.member.workload, one.member.group
            leads = bool(name) and not one.member.worker and one.state in SUPERVISED_STATES
            if leads and ref is not None and not one.member.ray_cluster:
                groups[str(ref), name].append(one)
        history = self._created.get(key, {})
        kept = {group: times for group, times in history.items() if _is_recent(times[-1], now)}
        starts = []
        for group, leaders in groups.items():
            times = kept[group] = history.get(group, deque(maxlen=MAX_LEADERS_PER_GROUP))
            for one in sorted(leaders, key=lambda one: one.created):
                if one.created and (not times or one.created > times[-1]):
                    times.append(one.created)
            newest = max(leaders, key=lambda one: one.created)
            recent = sum(_is_recent(at, now) for at in times)
            age_s = compute_seconds_between(newest.created, now) if newest.created else 0.0
            starts.append(GroupStarts(newest, max(0, recent - 1), age_s))
        self._created[key] = {group: times for group, times in kept.items() if times}
        return starts


def _is_recent(created: str, now: str) -> bool:
    return compute_seconds_between(created, now) < RECREATION_WINDOW_S
