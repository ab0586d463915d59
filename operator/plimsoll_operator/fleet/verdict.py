"""Decide the verdict in a status on whether a revision leaks: Yes, No or Unknown.

- **Yes**: more than half of its replicas have the same confirmed leak.
- **No**: more than half of its replicas have served enough requests for long enough, and stay
  within their leak budgets at their current growth rate.
- **Unknown**: otherwise.

A verdict has no effect on rollouts, unlike a suspect revision
(:mod:`plimsoll_operator.fleet.revisions`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from plimsoll_api.inferenceservice_status import Leaks
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_operator.fleet.revisions import (
    ReplicaPod,
    describe_same_leak,
    find_suspect_revision,
    list_suspected_pods,
)
from plimsoll_operator.fleet.supervisor_metrics import UNKNOWN_METRICS, SupervisorMetrics
from plimsoll_operator.kinds import Object

MIN_OBSERVED_S = 1800.0
"""Minimum observation time of a replica, by choice. Half of the recorded leaks of real engines
were confirmed within 130 seconds (``docs/detection.md``)."""
MIN_OBSERVED_REQUESTS = 100
"""Minimum number of requests in that time, by choice: a replica without traffic proves nothing."""
REMAINING_STEPS_MINUTES = (
    5,
    10,
    15,
    20,
    30,
    45,
    60,
    90,
    120,
    180,
    240,
    360,
    720,
    1440,
    2880,
    7200,
    43_200,
)
"""Steps of the remaining minutes in a status, so that the status does not change with each
scrape."""
MAX_REVISIONS = 4
"""Maximum number of revisions of a service or workload that have a verdict."""


def make_verdicts(
    pods: Sequence[tuple[str, ReplicaPod]],
    incidents: Sequence[Object],
    metrics: Mapping[str, SupervisorMetrics],
    memory: MemoryPolicy,
    previous: Object,
) -> list[Object]:
    """Return ``status.verdicts`` for the revisions that have pods, newest revision first.

    ``pods`` are pairs of a creation time and a pod. ``previous`` is the last status.
    """
    newest: dict[str, str] = {}
    for created, pod in pods:
        if pod.revision:
            newest[pod.revision] = max(newest.get(pod.revision, ""), created)
    previous_answers = {one["revision"]: one["leaks"] for one in previous.get("verdicts") or ()}
    suspect = (previous.get("suspectRevision") or {}).get("revision")
    results = []
    for revision in sorted(newest, key=lambda one: (newest[one], one), reverse=True):
        replica_pods = [pod for _, pod in pods]
        verdict = (
            _find_leak_verdict(revision, replica_pods, incidents, suspect)
            or _find_unknown_verdict(revision, replica_pods, incidents, metrics, memory)
            or _make_growth_verdict(
                revision, replica_pods, metrics, memory, previous_answers.get(revision) == Leaks.NO
            )
        )
        results.append({"revision": revision} | verdict)
    return results[:MAX_REVISIONS]


def may_change_with_time(verdicts: Iterable[Object]) -> bool:
    """Report whether the passage of time alone may change one of the verdicts."""
    return any("minutesLeft" in one for one in verdicts)


def _find_leak_verdict(
    revision: str, pods: list[ReplicaPod], incidents: Sequence[Object], suspect: str | None
) -> Object | None:
    if leaking := find_suspect_revision(revision, pods, incidents, min_leaking=1):
        text = describe_same_leak(
            leaking.leak, leaking.leaking, leaking.replicas, revision, leaking.since
        )
        return {"leaks": Leaks.YES.value, "message": text}
    if revision == suspect:
        return {"leaks": Leaks.YES.value, "message": "the leaking replicas no longer exist"}
    return None


def _find_unknown_verdict(
    revision: str,
    pods: list[ReplicaPod],
    incidents: Sequence[Object],
    metrics: Mapping[str, SupervisorMetrics],
    memory: MemoryPolicy,
) -> Object | None:
    """Return the verdict Unknown if there are signs of a leak, or no budget; None otherwise."""
    if not _list_budgets(memory):
        text = "the growth of memory has no budget: set memory.host or memory.device"
        return {"leaks": Leaks.UNKNOWN.value, "message": text}
    own = [one.pod for one in pods if one.revision == revision]
    seen = {one: metrics.get(one, UNKNOWN_METRICS) for one in own}
    reasons = {
        "a leak is suspected or confirmed in": list_suspected_pods(revision, pods, incidents),
        "the leak budget is exhausted in": [
            pod
            for pod, one in seen.items()
            if any((getattr(one, kind) or 0.0) >= 1.0 for kind, _ in _list_budgets(memory))
        ],
        "memory keeps growing slowly in": [pod for pod, one in seen.items() if one.slow_leaks],
    }
    for text, some in reasons.items():
        if some:
            names = ", ".join(sorted(some)[:MAX_REVISIONS])
            return {"leaks": Leaks.UNKNOWN.value, "message": f"{text} {names}"}
    return None


def _make_growth_verdict(
    revision: str,
    pods: list[ReplicaPod],
    metrics: Mapping[str, SupervisorMetrics],
    memory: MemoryPolicy,
    was_clean: bool,
) -> Object:
    """Return the verdict No, or the verdict Unknown with the reason why it is not No."""
    replicas: dict[str, list[_TimeToVerdict]] = defaultdict(list)
    for one in pods:
        if one.revision == revision:
            for kind, budget in _list_budgets(memory):
                left = _compute_time_to_verdict(kind, budget, metrics.get(one.pod, UNKNOWN_METRICS))
                replicas[one.replica].append(left)
    remaining = sorted(max(one) for one in replicas.values())
    left_s, reason = remaining[len(replicas) // 2]
    if was_clean or left_s <= 0.0:
        text = "most replicas stay within their leak budgets at their current growth rate"
        return {"leaks": Leaks.NO.value, "message": text}
    unknown: Object = {"leaks": Leaks.UNKNOWN.value, "message": reason}
    steps = [one for one in REMAINING_STEPS_MINUTES if left_s <= one * 60]
    return unknown | ({"minutesLeft": steps[0]} if steps else {})


def _list_budgets(memory: MemoryPolicy) -> list[tuple[str, MemoryBudget]]:
    both = (("host", memory.host), ("device", memory.device))
    return [(kind, budget) for kind, budget in both if budget is not None]


class _TimeToVerdict(NamedTuple):
    """Seconds until memory counts as free of leaks, at most 0 if it does now, and why to wait."""

    left_s: float
    reason: str


# A replica that used ``share`` of its budget since the warm-up stays within the budget for a
# whole window only if the warm-up was more than ``share * window`` ago.
def _compute_time_to_verdict(
    kind: str, budget: MemoryBudget, metrics: SupervisorMetrics
) -> _TimeToVerdict:
    share, growth = getattr(metrics, kind), getattr(metrics, f"{kind}_growth")
    if share is None or growth is None:
        reason = f"the growth of {kind} memory is known in too few replicas"
        return _TimeToVerdict(MIN_OBSERVED_S, reason)
    if growth.requests == 0:
        reason = "too few replicas have processed requests since their warm-up"
        return _TimeToVerdict(math.inf, reason)
    requests_s = growth.age_s * MIN_OBSERVED_REQUESTS / growth.requests
    needed = max(
        (MIN_OBSERVED_S, "the replicas have not been observed for long enough"),
        (
            share * budget.window_s,
            "at their current growth rate, replicas would exceed their leak budgets",
        ),
        (
            requests_s if growth.requests < MIN_OBSERVED_REQUESTS else 0.0,
            "the replicas have not processed enough requests",
        ),
    )
    return _TimeToVerdict(needed[0] - growth.age_s, needed[1])
