"""The detector's output after each sample.

Each :class:`Assessment` contains all current suspicions. The governor turns them into incidents
with a life cycle; the detector does not know about incidents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from plimsoll_api.incidents import IncidentKind
from plimsoll_api.open_enum import OpenEnum
from plimsoll_api.units import format_bytes, format_remaining_time


class Segment(OpenEnum):
    """Part of the memory of the engine's processes or devices."""

    PYTHON_OBJECTS = "python_objects"
    MALLOC_IN_USE = "malloc_in_use"
    MALLOC_RETAINED = "malloc_retained"
    ANONYMOUS_OTHER = "anonymous_other"
    SHARED = "shared"
    SHARED_ORPHAN = "shared_orphan"
    HUGETLB = "hugetlb"
    KERNEL = "kernel"
    SOCKETS = "sockets"
    CHARGED_OTHER = "charged_other"
    TORCH_ALLOCATED = "torch_allocated"
    TORCH_RESERVED_UNUSED = "torch_reserved_unused"
    NON_TORCH = "non_torch"
    ORPHAN = "orphan"


HOST_SEGMENTS = (
    Segment.PYTHON_OBJECTS,
    Segment.MALLOC_IN_USE,
    Segment.MALLOC_RETAINED,
    Segment.ANONYMOUS_OTHER,
    Segment.SHARED,
    Segment.SHARED_ORPHAN,
    Segment.HUGETLB,
    Segment.KERNEL,
    Segment.SOCKETS,
    Segment.CHARGED_OTHER,
)
DEVICE_SEGMENTS = (
    Segment.TORCH_ALLOCATED,
    Segment.TORCH_RESERVED_UNUSED,
    Segment.NON_TORCH,
    Segment.ORPHAN,
)


class BudgetState(msgspec.Struct, omit_defaults=True):
    """Current state of a leak budget, in bytes and seconds; null is unknown.

    ``baseline`` is the memory after the warm-up of this epoch, and ``current`` the minimum of
    recent samples. ``explained`` is the growth within the bounds of the engine's ledger.
    ``unexplained`` is the rest of the growth ``current - baseline``, at least zero.
    ``exhaustion_s`` is the estimated time until the budget is exhausted; null if memory does not
    grow. ``limit`` is the container's memory limit, or the size of the devices. ``age_s`` is the
    time since the baseline, and ``requests`` the number of completed requests since the baseline.
    """

    current: int | None = None
    baseline: int | None = None
    explained: int | None = None
    unexplained: int | None = None
    consumed_ratio: float | None = None
    bytes_per_s: float | None = None
    exhaustion_s: float | None = None
    limit: int | None = None
    age_s: float | None = None
    requests: int | None = None


class SlowGrowth(msgspec.Struct, omit_defaults=True):
    """Evidence on whether memory grows without bound, however slowly. It triggers no action.

    ``slow_leak`` is true if the memory has grown for hours, beyond chance and without slowing down.
    The other fields are set only if ``slow_leak`` is true. ``slowest`` and ``fastest`` are the 90 %
    confidence interval of ``bytes_per_s``, which was observed for ``span_s``. ``limit`` is the
    memory limit, and ``limit_s`` the time until memory reaches the limit at ``bytes_per_s``.
    ``limit_earliest_s`` is the time at the fastest rate, and ``limit_latest_s`` at the slowest. If
    these times are null, ``no_time`` says why.
    """

    slow_leak: bool = False
    segment: Segment | None = None
    bytes_per_s: float | None = None
    slowest: float | None = None
    fastest: float | None = None
    span_s: float | None = None
    limit: int | None = None
    limit_s: float | None = None
    limit_earliest_s: float | None = None
    limit_latest_s: float | None = None
    no_time: str | None = None


def format_suspicions(suspicions: Iterable[Suspicion]) -> list[str]:
    """Return a human-readable description of each suspicion, with its confidence."""
    texts = []
    for one in suspicions:
        where = f" of {one.segment.value}" if one.segment else ""
        who = f" in {one.process}" if one.process else ""
        why = f"; {one.unconfirmed}" if one.unconfirmed else ""
        texts.append(f"{one.kind.value}{where}{who}, confidence {one.confidence:.0%}{why}")
    return texts


def format_slow_leaks(slow: Mapping[str, SlowGrowth]) -> list[str]:
    """Return a human-readable description of each slow leak in the assessment of one replica."""
    return [
        format_slow_leak(memory, one.segment, one.bytes_per_s, one.limit_s)
        for memory, one in sorted(slow.items())
        if one.slow_leak and one.bytes_per_s is not None
    ]


def format_slow_leak(
    memory: str, segment: str | None, bytes_per_s: float, limit_s: float | None
) -> str:
    """Return a human-readable description of a slow leak of host or device memory.

    The rate is rounded to two digits, so that a status with this text seldom changes.
    """
    mib = max(bytes_per_s * 3600 / (1 << 20), 0.01)
    rate = format_bytes(round(mib, 1 - math.floor(math.log10(mib))) * (1 << 20))
    where = f"{memory} memory ({segment})" if segment else f"{memory} memory"
    if limit_s is None:
        return f"{where} grows by {rate} an hour, and no memory limit is known"
    remaining = format_remaining_time(limit_s)
    return f"{where} grows by {rate} an hour and reaches its limit in about {remaining}"


class Trigger(msgspec.Struct, frozen=True):
    """Hypothesis that memory grows whenever ``counter`` increases.

    ``bytes_each`` is the growth per increment of the counter, or per hour if the counter is
    ``time``. ``confidence`` is from 0 to 1.
    """

    counter: str
    bytes_each: float
    confidence: float


class Suspicion(msgspec.Struct, omit_defaults=True):
    """Suspected problem. ``segment`` is null for a stall.

    ``over_budget`` means that the budget is exhausted, or will be exhausted before a drain can end.
    Disruptive actions require it. ``growing`` means that the memory is still growing; otherwise a
    restart can wait. ``unconfirmed`` is another possible explanation, such as garbage that has not
    been collected yet, with the evidence that would settle the question. It permits a trim, but no
    restart. ``pod`` is the pod that holds the memory, if this is another pod of the same multi-node
    group.
    """

    kind: IncidentKind
    segment: Segment | None
    confidence: float
    consumed_ratio: float
    bytes: int = 0
    bytes_per_s: float | None = None
    bytes_per_request: float | None = None
    over_budget: bool = False
    growing: bool = True
    unconfirmed: str | None = None
    process: str | None = None
    pod: str | None = None
    trigger: Trigger | None = None
    evidence: list[str] = []


class Assessment(msgspec.Struct, omit_defaults=True):
    """The detector's complete output after the sample at ``t``.

    ``warm`` means that this epoch has a baseline. ``segments`` are the last known sizes in bytes;
    segments that cannot be read are absent. ``in_long_step`` means that work is waiting and no step
    has completed for seconds: a call to the worker may hang.

    If the engine's device allocator reports its unused memory, ``device`` excludes the unused
    memory and ``reserved`` includes it. Otherwise, ``device`` includes the unused memory and
    ``reserved`` is null. After enough observation, ``slow`` has the keys ``host`` and ``device``.

    ``shared_device`` is the evidence that other pods or programs use the engine's devices, or
    empty. If it is set, only the memory of the engine's own allocator is judged.
    """

    t: float
    epoch: int
    warm: bool
    segments: dict[Segment, int] = {}
    host: BudgetState | None = None
    device: BudgetState | None = None
    reserved: BudgetState | None = None
    suspicions: list[Suspicion] = []
    slow: dict[str, SlowGrowth] = {}
    in_long_step: bool = False
    shared_device: str = ""
