"""The report on slow growth: its rate, and the time until the memory limit."""

from __future__ import annotations

from plimsoll_api.assessment import Segment, SlowGrowth
from plimsoll_api.memory_policy import MemoryBudget
from plimsoll_api.trace import Sample
from plimsoll_sidecar.detect.leak.slow_leak import LIKELY_T, Drift


def limit_of(memory: str, budget: MemoryBudget | None, sample: Sample, shared: bool) -> int | None:
    """Return the limit of ``memory`` in bytes; None if it is unknown.

    A device ends with its size, unless others use it too (``shared``).
    """
    if budget is not None and budget.limit_bytes is not None:
        return budget.limit_bytes
    if memory == "host" or shared or not sample.device:
        return None
    sizes = [device.total for device in sample.device if device.total]
    return sum(sizes) if len(sizes) == len(sample.device) else None


def slow_growth(
    found: Drift | None, peak: int | None, limit: int | None, segment: Segment | None, why: str
) -> SlowGrowth:
    """Return the report on ``found``, which is None if nothing grows.

    ``peak`` is the highest floor of the last day, ``why`` says why there is no ``limit``.
    """
    if found is None:
        return SlowGrowth()
    slowest, fastest = max(0.0, found.lower(LIKELY_T)), found.upper(LIKELY_T)
    room = max(0, limit - peak) if limit is not None and peak is not None else None

    def lasts(rate: float) -> float | None:
        return None if room is None or rate <= 0 else round(room / rate, 1)

    return SlowGrowth(
        slow_leak=True,
        segment=segment,
        bytes_per_s=round(found.bytes_per_s, 3),
        slowest=round(slowest, 3),
        fastest=round(fastest, 3),
        span_s=round(found.span_s, 1),
        limit=limit,
        limit_s=lasts(found.bytes_per_s),
        limit_earliest_s=lasts(fastest),
        limit_latest_s=lasts(slowest),
        no_time=why if room is None else None,
    )
