"""Check the priority in a request, which orders the requests of one tenant.

All clients without separate API keys are one tenant. By default, a request may therefore only lower
its priority.
"""

from __future__ import annotations

from plimsoll_engine.api.errors import ApiError, make_invalid_error
from plimsoll_engine.settings import Settings


def check_priority(settings: Settings, priority: int, tenant: str) -> int:
    """Return ``priority`` if a request of ``tenant`` may have it. Raises ApiError otherwise."""
    if priority == 0:
        return priority
    keys = settings.priority_keys
    if keys is not None and tenant not in {f"key {number}" for number in keys}:
        raise ApiError(
            403,
            "this API key may not set a priority (--priority-keys): omit the field",
            param="priority",
            code="priority_not_allowed",
        )
    lowest, highest = settings.priority_range
    if not lowest <= priority <= highest:
        raise make_invalid_error(
            f"priority must be from {lowest} to {highest} (--priority-range), got "
            f"{priority}; requests with lower numbers run first",
            "priority",
        )
    return priority
