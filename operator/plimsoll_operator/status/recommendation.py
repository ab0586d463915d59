"""Build the ``recommendation`` in a status: the memory contract for a revision."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll_api.memory_contract import MemoryContract, format_quantity, make_memory_contract
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_operator.fleet.pods import compute_seconds_between
from plimsoll_operator.fleet.supervisor_metrics import SupervisorMetrics
from plimsoll_operator.kinds import Object

MIN_CHANGE_INTERVAL_S = 3600.0


def make_recommendation(
    previous: Object | None,
    revision: str,
    metrics: Sequence[SupervisorMetrics],
    memory: MemoryPolicy,
    request: int | None,
    now: str,
) -> Object | None:
    """Return the recommendation for ``revision``; None without enough data.

    ``metrics`` are the values of the revision's pods, ``request`` is the current memory request in
    bytes, and ``now`` is RFC 3339.
    """
    same = previous if previous is not None and previous.get("revision") == revision else None
    if (
        same is not None
        and compute_seconds_between(str(same.get("time") or now), now) < MIN_CHANGE_INTERVAL_S
    ):
        return same
    host = _make_memory_contract("host", metrics, memory, request)
    device = _make_memory_contract("device", metrics, memory, None)
    said = [one.text for one in (host, device) if one is not None]
    if not said:
        return same
    found: Object = {"message": ". ".join(said), "revision": revision}
    if host is not None:
        found["resources"] = {
            "requests": {"memory": format_quantity(host.request)},
            "limits": {"memory": format_quantity(host.limit)},
        }
    unchanged = same is not None and {**same, **found} == same
    return same if unchanged else found | {"time": now}


def _make_memory_contract(
    kind: str, metrics: Sequence[SupervisorMetrics], memory: MemoryPolicy, request: int | None
) -> MemoryContract | None:
    needs = [found for one in metrics if (found := getattr(one, f"{kind}_needs")) is not None]
    if not needs:
        return None
    growth = [found for one in metrics if (found := getattr(one, f"{kind}_growth")) is not None]
    lessons = [found for one in metrics if (found := getattr(one, f"{kind}_learned")) is not None]
    budget = getattr(memory, kind)
    fixed = budget.growth_bytes if budget is not None and not budget.auto else 0
    learned = max((one.budget or 0 for one in lessons), default=0)
    return make_memory_contract(kind, needs, growth, fixed or learned, request)
