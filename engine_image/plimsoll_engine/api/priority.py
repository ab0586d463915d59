"""Who may ask for which priority. Pure.

A priority orders the requests of one tenant alone, but where clients are not told apart they are
one tenant. So without flags a request may step back behind others, and not ahead of them.
"""

from __future__ import annotations

from plimsoll_engine.api.errors import ApiError, invalid
from plimsoll_engine.settings import Settings


def allowed(settings: Settings, priority: int, tenant: str) -> int:
    """``priority``, where a request of ``tenant`` may have it. Raises ApiError."""
    if priority == 0:
        return priority
    keys = settings.priority_keys
    if keys is not None and tenant not in {f"key {number}" for number in keys}:
        raise ApiError(
            403,
            "this API key may not set a priority (--priority-keys): leave the field out",
            param="priority",
            code="priority_not_allowed",
        )
    lowest, highest = settings.priority_range
    if not lowest <= priority <= highest:
        raise invalid(
            f"{priority} is outside of the range of this engine, {lowest} to {highest}"
            " (--priority-range); lower numbers go first",
            "priority",
        )
    return priority
