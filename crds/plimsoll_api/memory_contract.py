"""Build the memory contract of a revision: a text, and the recommended request and limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec

from plimsoll_api.admin import LedgerEntry
from plimsoll_api.growth import MAX_REPORTED_BYTES, ReportedGrowth
from plimsoll_api.units import DAY_S, format_bytes, format_remaining_time

ROUNDING_STEP_BYTES = 256 << 20
"""Step to which requests and limits are rounded up."""
MIN_REQUESTS, MIN_GROWTH_AGE_S = 1000, 3600
"""Minimum requests for a text about growth per request, and minimum seconds since the warm-up
for a text about the time until the limit."""
MAX_FORECAST_S = 3 * 365 * DAY_S
"""Maximum forecast of the time at which memory reaches the limit; a later one is not mentioned."""
MIN_SHOWN_SHARE = 0.01
"""Share of ``level`` above which the text mentions the unfilled part of the pools."""

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_REPORTED_BYTES)]


class MemoryNeeds(msgspec.Struct, frozen=True, omit_defaults=True):
    """Use of one kind of memory by a replica, in bytes.

    Attributes:
        level: The largest use while the replica was healthy.
        pools: The sum of the bounds in the engine's ledger.
        unfilled: The part of ``pools`` that is not in use yet.
        limit: The memory limit; None if unknown.

    """

    level: Size
    pools: Size = 0
    unfilled: Size = 0
    limit: Size | None = None


class MemoryContract(NamedTuple):
    """Recommended request and limit for one kind of memory in bytes, and a text about them."""

    text: str
    request: int
    limit: int


def make_memory_needs(
    memory: str, level: int, limit: int | None, ledger: Iterable[LedgerEntry]
) -> MemoryNeeds:
    """Return a replica's use of one kind of ``memory``: host or device.

    ``level`` and ``limit`` are as in :class:`MemoryNeeds`.
    """
    pools = [(one.bytes, one.bound) for one in ledger if one.kind == memory]
    bounded = [(size, bound) for size, bound in pools if bound is not None]
    return MemoryNeeds(
        level,
        min(sum(bound for _, bound in bounded), MAX_REPORTED_BYTES),
        min(sum(max(0, bound - size) for size, bound in bounded), MAX_REPORTED_BYTES),
        limit,
    )


def make_memory_contract(
    memory: str,
    needs: Sequence[MemoryNeeds],
    growth: Sequence[ReportedGrowth],
    budget: int,
    request: int | None = None,
) -> MemoryContract:
    """Return a contract that suffices for each replica of a revision.

    Args:
        memory: The kind of memory: host or device.
        needs: The memory use of each replica; at least one item.
        growth: The growth of each replica since its warm-up.
        budget: The leak budget in bytes.
        request: The current memory request in bytes; None if unknown.

    """
    worst = max(needs, key=lambda one: one.level + one.unfilled)
    level = max(one.level for one in needs)
    full = worst.level + worst.unfilled
    limit = min((one.limit for one in needs if one.limit is not None), default=None)
    facts = [f"{memory} memory needs {format_bytes(level)} at the current load"]
    if request is not None and request < level:
        facts.append(f"the request of {format_bytes(request)} is too small")
    if worst.unfilled > MIN_SHOWN_SHARE * level:
        pools = format_bytes(worst.pools)
        facts.append(f"it needs {format_bytes(full)} when its declared pools ({pools}) are full")
    if limit is not None and limit < full:
        facts.append(f"the limit of {format_bytes(limit)} is too small")
    per_request = max(
        (g.bytes / g.requests for g in growth if g.requests >= MIN_REQUESTS), default=0.0
    )
    if per_request >= 1:
        growth_text = format_bytes(_round_to_two_digits(per_request))
        facts.append(f"it grows by {growth_text} per request")
    rate = max((g.bytes / g.age_s for g in growth if g.age_s >= MIN_GROWTH_AGE_S), default=0.0)
    if rate > 0 and limit is not None and (left_s := (limit - level) / rate) <= MAX_FORECAST_S:
        remaining = format_remaining_time(max(0.0, left_s))
        facts.append(f"it reaches the limit in {remaining} at the current traffic")
    return MemoryContract("; ".join(facts), _round_up(level), _round_up(full + budget))


# A text with a rounded value seldom changes.
def _round_to_two_digits(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(value)))


def _round_up(size: int) -> int:
    return -(-size // ROUNDING_STEP_BYTES) * ROUNDING_STEP_BYTES


def format_quantity(size: int) -> str:
    """Format a multiple of 1 MiB as a quantity: ``17408Mi``, ``18Gi``."""
    return f"{size >> 30}Gi" if size % (1 << 30) == 0 else f"{size >> 20}Mi"
