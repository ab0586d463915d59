"""Merge what supervisors have learned about memory growth, for new pods and revisions.

The operator stores the result as ``learned.json`` in the supervisors' ConfigMap. It uses the lower
median of the replicas that were observed for long enough and have no open growth incident.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from plimsoll_api.decoding import MalformedError
from plimsoll_api.learned import (
    LEARNED_WINDOWS_H,
    MAX_LEARNED_WORKLOADS,
    MAX_OBSERVED_H,
    MAX_OBSERVED_S,
    LearnedMemory,
    LearnedWorkload,
    compute_stepped_budget,
    decode_learned_workloads,
    encode_learned_workloads,
)
from plimsoll_operator.fleet.replicas import Replica, list_pods_with_growth
from plimsoll_operator.fleet.supervisor_metrics import SupervisorMetrics
from plimsoll_operator.kinds import Object

HOUR_S = 3600.0
MAX_BUDGET_CHANGE_DAYS = 1.0
"""Maximum number of days that count for one update of a budget."""
MIN_CHANGE_SHARE = 0.05
"""Smallest relative change of a value that is published."""
LEARNED_MEMORY_GETTERS: tuple[
    tuple[str, Callable[[SupervisorMetrics], LearnedMemory | None]], ...
] = (
    ("host", lambda one: one.host_learned),
    ("device", lambda one: one.device_learned),
)


def make_learned_file(
    published: str,
    replicas: Sequence[Replica],
    incidents: Iterable[Object],
    metrics: Mapping[str, SupervisorMetrics],
    now: float,
) -> str:
    """Return the content of the learned file; empty if nothing is known.

    ``published`` is the current content, and ``now`` is Unix time. ``replicas`` are sorted, oldest
    first.
    """
    hour = int(now // HOUR_S)
    known = {
        one.workload: replace(one, at=min(one.at, hour))
        for one in _parse_learned_file(published)
        if one.at >= hour - MAX_OBSERVED_H
    }
    revisions = {one.workload: one.revision for one in replicas}
    with_growth = list_pods_with_growth(incidents)
    for workload, revision in revisions.items():
        old = known.get(workload)
        if old is not None and (old.at, old.revision) == (hour, revision):
            continue
        reports = [
            metrics[one.pod] for one in replicas
            if (one.workload, one.revision) == (workload, revision)
            and one.pod in metrics and one.pod not in with_growth
        ]  # fmt: skip
        memories = {
            name: _merge_learned_memory(old, name, read, revision, reports, hour)
            for name, read in LEARNED_MEMORY_GETTERS
        }
        new = LearnedWorkload(workload, revision, hour, **memories)
        if any(memories.values()) and (old is None or _has_significant_change(old, new)):
            known[workload] = new
    newest = sorted(known.values(), key=lambda one: (-one.at, one.workload))[:MAX_LEARNED_WORKLOADS]
    kept = sorted(newest, key=lambda one: one.workload)
    return encode_learned_workloads(kept).decode() if kept else ""


def _parse_learned_file(text: str) -> tuple[LearnedWorkload, ...]:
    try:
        return decode_learned_workloads(text.encode()) if text else ()
    except MalformedError:
        return ()


def _merge_learned_memory(
    previous: LearnedWorkload | None,
    memory: str,
    get_memory: Callable[[SupervisorMetrics], LearnedMemory | None],
    revision: str,
    reports: Sequence[SupervisorMetrics],
    hour: int,
) -> LearnedMemory | None:
    """Return the values that the replicas learned for one kind of memory; None if none did."""
    old: LearnedMemory | None = getattr(previous, memory) if previous is not None else None
    if old is not None and previous is not None and previous.revision != revision:
        # The next revision starts with the budget, and learns its own growth.
        old = LearnedMemory(budget=old.budget) if old.budget is not None else None
    valid = [
        one for report in reports if (one := get_memory(report)) is not None and one.seen_s > 0
    ]
    longest = max((one.seen_s for one in valid), default=0)
    valid = [one for one in valid if one.seen_s * 2 >= longest]
    if not valid:
        return old
    budgets = [one.budget for one in valid if one.budget is not None]
    budget = statistics.median_low(budgets) if budgets else None
    current = old.budget if old is not None else None
    if current is not None and previous is not None:
        days = min(MAX_BUDGET_CHANGE_DAYS, (hour - previous.at) / 24)
        budget = current if budget is None else compute_stepped_budget(current, budget, days)
    seen_s = max(longest, old.seen_s if old is not None else 0)
    first, second, third = (
        statistics.median_low(one.gains[index] for one in valid)
        for index in range(len(LEARNED_WINDOWS_H))
    )
    return LearnedMemory(
        seen_s=int(min(seen_s, MAX_OBSERVED_S) // HOUR_S * HOUR_S),
        gains=(first, second, third),
        start=statistics.median_low(one.start for one in valid),
        budget=budget,
    )


def _has_significant_change(old: LearnedWorkload, new: LearnedWorkload) -> bool:
    if old.revision != new.revision:
        return True
    for name, _ in LEARNED_MEMORY_GETTERS:
        one, other = (getattr(each, name) or LearnedMemory() for each in (old, new))
        if (one.budget is None) != (other.budget is None):
            return True
        if other.budget is None and one.seen_s != other.seen_s:
            return True
        sizes = zip((*one.gains, one.budget or 0), (*other.gains, other.budget or 0), strict=True)
        if any(abs(a - b) > MIN_CHANGE_SHARE * max(a, b) for a, b in sizes):
            return True
    return False
