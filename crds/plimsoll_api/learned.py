"""Observed memory growth of a workload's replicas, which outlives their pods.

Supervisors observe the growth, and the operator stores it in the ConfigMap with their
configuration. The values come from pods, so a file that exceeds a limit is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from plimsoll_api import decoding
from plimsoll_api.growth import MAX_REPORTED_BYTES

LEARNED_FILE = "learned.json"
MAX_LEARNED_WORKLOADS = 100
MAX_LEARNED_BYTES = 128 << 10
"""Maximum size of a file; a workload takes 300 bytes, or 700 with the longest possible names."""
LEARNED_WINDOWS_H = (1, 6, 24)
"""Windows in hours over which growth is measured."""
MAX_OBSERVED_S = 14 * 86400
"""Maximum observation time: two weeks, so that each weekday occurs twice."""
MAX_OBSERVED_H = MAX_OBSERVED_S // 3600
MAX_DAILY_RISE_FACTOR, MAX_DAILY_FALL_FACTOR = 1.25, 0.9
"""Factors by which a learned budget may rise or fall within a day; it falls slowly, so that a
busy week after a quiet week causes no alarm."""

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_REPORTED_BYTES)]


class LearnedMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """Growth of healthy replicas in one kind of memory, in bytes.

    Attributes:
        seen_s: The observation time in seconds.
        gains: The 99th percentile of the growth within each of :data:`LEARNED_WINDOWS_H`.
        start: The memory that a starting engine needs.
        budget: The learned budget; None until enough has been observed.

    """

    seen_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_OBSERVED_S)] = 0
    gains: tuple[Size, Size, Size] = (0, 0, 0)
    start: Size = 0
    budget: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPORTED_BYTES)] | None = None


class LearnedWorkload(msgspec.Struct, frozen=True, omit_defaults=True):
    """Learned memory of a workload's newest revision.

    ``workload`` is empty for the replicas of a service. ``at`` is in hours since 1970.
    """

    workload: Annotated[str, msgspec.Meta(max_length=317)]
    revision: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    at: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    host: LearnedMemory | None = None
    device: LearnedMemory | None = None


_WorkloadTuple = Annotated[
    tuple[LearnedWorkload, ...], msgspec.Meta(max_length=MAX_LEARNED_WORKLOADS)
]


def decode_learned_workloads(data: bytes) -> tuple[LearnedWorkload, ...]:
    """Parse a learned file. Raises :class:`decoding.MalformedError` if it is invalid."""
    if len(data) > MAX_LEARNED_BYTES:
        raise decoding.MalformedError(
            f"the file of learned budgets is larger than {MAX_LEARNED_BYTES >> 10} KiB"
        )
    workloads: tuple[LearnedWorkload, ...] = decoding.decode(data, _WorkloadTuple)
    return workloads


def encode_learned_workloads(workloads: Sequence[LearnedWorkload]) -> bytes:
    """Return the content of a learned file, with one workload per line for readability."""
    return b"[" + b",\n".join(msgspec.json.encode(one) for one in workloads) + b"]\n"


def compute_stepped_budget(current: int, target: int, days: float) -> int:
    """Return the budget after ``days`` in which it changes from ``current`` to ``target``.

    The factors :data:`MAX_DAILY_RISE_FACTOR` and :data:`MAX_DAILY_FALL_FACTOR` limit the change.
    """
    days = min(days, 365.0)
    most = math.ceil(current * math.pow(MAX_DAILY_RISE_FACTOR, days))
    least = math.floor(current * math.pow(MAX_DAILY_FALL_FACTOR, days))
    return max(1, min(max(target, least), most))
