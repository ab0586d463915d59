"""The growth that the replicas of a workload have learned, kept over their pods.

Supervisors report it in their metrics. The operator keeps it beside their configuration, in the
same ConfigMap, so that a new pod or revision does not learn from the beginning. It comes from pods,
so it is limited here, and a file that exceeds a limit is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from plimsoll_api import decoding
from plimsoll_api.peers import MAX_GROWTH_BYTES

LEARNED_FILE = "learned.json"
MAX_LEARNED = 100
"""Maximum number of workloads in a file."""
MAX_LEARNED_BYTES = 128 << 10
"""Maximum size of a file. A workload takes 300 bytes, and 700 with Kubernetes' longest names."""
WINDOWS_H = (1, 6, 24)
"""Windows in hours over which growth is observed."""
MAX_SEEN_S = 14 * 86400
"""Longest observation in seconds: two weeks, so that each weekday occurs twice."""
KEPT_H = MAX_SEEN_S // 3600
"""Hours for which observations are kept."""
RISE_A_DAY, FALL_A_DAY = 1.25, 0.9
"""Most by which a learned budget rises or falls in a day. It falls slowly, because a busy week
after a quiet one must not raise an alarm."""

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_GROWTH_BYTES)]


class LearnedMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The growth of healthy replicas in one memory, in bytes.

    ``seen_s`` is for how long they were observed, ``gains`` the 99th percentile of their growth
    within each of :data:`WINDOWS_H`, and ``start`` what a start takes. ``budget`` is None while it
    is learned.
    """

    seen_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEEN_S)] = 0
    gains: tuple[Size, Size, Size] = (0, 0, 0)
    start: Size = 0
    budget: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROWTH_BYTES)] | None = None


class LearnedWorkload(msgspec.Struct, frozen=True, omit_defaults=True):
    """The lessons of the newest revision of a workload.

    ``workload`` is empty for a service. ``at`` is the hour of the last change, since 1970.
    """

    workload: Annotated[str, msgspec.Meta(max_length=317)]
    revision: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    at: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    host: LearnedMemory | None = None
    device: LearnedMemory | None = None


_Workloads = Annotated[tuple[LearnedWorkload, ...], msgspec.Meta(max_length=MAX_LEARNED)]


def decode(data: bytes) -> tuple[LearnedWorkload, ...]:
    """Parse a file. Raises :class:`~plimsoll_api.decoding.Malformed` if it is invalid."""
    if len(data) > MAX_LEARNED_BYTES:
        raise decoding.Malformed(f"it has more than {MAX_LEARNED_BYTES >> 10} KiB")
    found: tuple[LearnedWorkload, ...] = decoding.decode(data, _Workloads)
    return found


def encode(workloads: Sequence[LearnedWorkload]) -> bytes:
    """Format a file with one workload per line, for people."""
    return b"[" + b",\n".join(msgspec.json.encode(one) for one in workloads) + b"]\n"


def stepped(now: int, wanted: int, days: float) -> int:
    """Return the budget ``days`` after it was ``now``, on its way to ``wanted`` bytes."""
    days = min(days, 365.0)
    most = math.ceil(now * math.pow(RISE_A_DAY, days))
    least = math.floor(now * math.pow(FALL_A_DAY, days))
    return max(1, min(max(wanted, least), most))
