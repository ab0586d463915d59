"""The detector's output after each sample.

The detector does not know about incidents; the governor opens and ends them.
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
    """Current state of a leak budget, in bytes and seconds. Unknown values are null.

    Attributes:
        current: The minimum of recent samples.
        baseline: The memory after the warm-up of this epoch.
        explained: The part of the growth that is within the bounds of the engine's ledger.
        unexplained: The rest of the growth ``current - baseline``, at least zero.
        exhaustion_s: The estimated time until the budget is exhausted; null if memory does not
            grow.
        limit: The container's memory limit, or the size of the devices.
        age_s: The time since the baseline was measured.
        requests: The number of requests that were completed in this time.

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
    """Evidence for a slow leak of one kind of memory. A slow leak triggers no action.

    The fields after ``slow_leak`` are set only if ``slow_leak`` is true.

    Attributes:
        slow_leak: Whether memory has grown for hours, beyond chance and without slowing down.
        bytes_per_s: The growth rate.
        limit_s: The seconds until memory reaches its limit at this rate; null if the limit is
            unknown.

    """

    slow_leak: bool = False
    segment: Segment | None = None
    bytes_per_s: float | None = None
    limit_s: float | None = None


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
    """Return a human-readable description of each slow leak; ``slow`` is by kind of memory."""
    return [
        format_slow_leak(memory, one.segment, one.bytes_per_s, one.limit_s)
        for memory, one in sorted(slow.items())
        if one.slow_leak and one.bytes_per_s is not None
    ]


def format_slow_leak(
    memory: str, segment: str | None, bytes_per_s: float, limit_s: float | None
) -> str:
    """Return a human-readable description of a slow leak of host or device memory.

    The rate has two significant digits, so that a status with this text seldom changes.
    """
    mib = max(bytes_per_s * 3600 / (1 << 20), 0.01)
    rate = format_bytes(round(mib, 1 - math.floor(math.log10(mib))) * (1 << 20))
    where = f"{memory} memory ({segment})" if segment else f"{memory} memory"
    if limit_s is None:
        return f"{where} grows by {rate} an hour, and no memory limit is known"
    remaining = format_remaining_time(limit_s)
    return f"{where} grows by {rate} an hour and reaches its limit in about {remaining}"


class Trigger(msgspec.Struct, frozen=True):
    """Hypothesis that memory grows with each increment of ``counter``.

    ``bytes_each`` is the growth per increment, or per hour if ``counter`` is ``time``.
    ``confidence`` is from 0 to 1.
    """

    counter: str
    bytes_each: float
    confidence: float


class Suspicion(msgspec.Struct, omit_defaults=True):
    """Suspected problem.

    Attributes:
        segment: The segment that grows; null for a stall.
        over_budget: Whether the budget is exhausted, or will be before a drain can end. Disruptive
            actions require this.
        growing: Whether the memory is still growing. If not, a restart can wait.
        unconfirmed: Another possible explanation, such as garbage that has not been collected yet,
            and the missing evidence. While it is set, the supervisor may trim, but not restart.
        pod: The pod that holds the memory, if it is another pod of the same multi-node group.
        unhealthy_device: A device of this pod that the kubelet reports as unhealthy, if it may
            explain the suspicion.

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
    unhealthy_device: str | None = None
    process: str | None = None
    pod: str | None = None
    trigger: Trigger | None = None
    evidence: list[str] = []


class Assessment(msgspec.Struct, omit_defaults=True):
    """The detector's complete output after the sample at ``t``.

    Attributes:
        warm: Whether this epoch has a baseline.
        segments: The last known sizes in bytes. Segments that cannot be read are absent.
        device: How much of the budget of device memory is consumed. Memory that the engine's
            allocator reports as reserved but unused does not count.
        reserved: The same with this unused memory; null if the allocator does not report it.
        slow: The growth by kind of memory: ``host``, ``device``. Empty until there is enough data.
        in_long_step: Whether work is waiting, but no step has completed for seconds. A call to the
            worker may then hang.
        shared_device: The evidence that other pods or programs use the engine's devices, or empty.
            If it is set, only the memory of the engine's own allocator is judged.

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
