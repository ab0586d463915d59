"""Growth of memory that the supervisors of replicas report, and the limits of what is accepted."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_REPORTED_BYTES = 1 << 50
MAX_BASELINE_AGE_S = 1 << 32
MAX_BASELINE_REQUESTS = 1 << 53
"""Maximum number of requests, the largest exact double, which only rejects invalid values."""


class ReportedGrowth(msgspec.Struct, frozen=True):
    """Growth of one kind of memory since the warm-up, as the replica's supervisor reports it.

    ``bytes`` is the unexplained growth at comparable load. ``age_s`` is the time since the warm-up,
    in which ``requests`` were completed.
    """

    bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_REPORTED_BYTES)]
    age_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_BASELINE_AGE_S)]
    requests: Annotated[int, msgspec.Meta(ge=0, le=MAX_BASELINE_REQUESTS)]
