"""The detector's output after each sample, with its vocabulary.

The detector is level-based: each :class:`Assessment` contains everything that is suspected *now*.
The governor turns that into incidents with a life cycle; it never asks the detector for history.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from plimsoll_api.incidents import IncidentKind
from plimsoll_api.open_enum import OpenEnum
from plimsoll_api.units import format_bytes, format_left


class Segment(OpenEnum):
    """A part of the memory of the engine's processes or devices."""

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
    """The present state of a leak budget. Bytes and seconds; null is unknown.

    ``baseline`` is the memory of this epoch after its warm-up, and ``current`` the floor of the
    recent samples. ``explained`` is the growth that the engine's ledger accounts for within its
    bounds. ``unexplained`` is the rest of ``current - baseline``, never below zero.
    ``exhaustion_s`` forecasts when the budget is exhausted; null if nothing grows. ``limit`` is the
    container's limit, or the size of the devices. ``age_s`` is the time since the baseline, and
    ``requests`` counts the engine's answers in that time.
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
    """Whether a memory grows without a limit, however slowly. It leads to no action.

    ``slow_leak`` is true if the memory grew for hours, beyond chance and without slowing down. Only
    then are the other fields set. ``bytes_per_s`` lies between ``slowest`` and ``fastest`` (90 %),
    observed for ``span_s``. ``limit`` is the memory limit and ``limit_s`` the time until it is
    reached at that rate; ``limit_earliest_s`` is for the fastest rate and ``limit_latest_s`` for
    the slowest. Without a limit the times are null, and ``no_time`` says why.
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


def suspicion_texts(suspicions: Iterable[Suspicion]) -> list[str]:
    """Describe suspicions, with their confidence, for people."""
    texts = []
    for one in suspicions:
        where = f" of {one.segment.value}" if one.segment else ""
        who = f" in {one.process}" if one.process else ""
        why = f"; {one.unconfirmed}" if one.unconfirmed else ""
        texts.append(f"{one.kind.value}{where}{who}, confidence {one.confidence:.0%}{why}")
    return texts


def slow_leak_texts(slow: Mapping[str, SlowGrowth]) -> list[str]:
    """Describe the slow leaks of one replica for people; ``slow`` is from its assessment."""
    return [
        slow_leak_text(memory, one.segment, one.bytes_per_s, one.limit_s)
        for memory, one in sorted(slow.items())
        if one.slow_leak and one.bytes_per_s is not None
    ]


def slow_leak_text(
    memory: str, segment: str | None, bytes_per_s: float, limit_s: float | None
) -> str:
    """Describe a slow leak of ``memory`` (host or device) for people.

    The rate has two digits, so that the text, which a status shows, seldom changes.
    """
    mib = max(bytes_per_s * 3600 / (1 << 20), 0.01)
    rate = format_bytes(round(mib, 1 - math.floor(math.log10(mib))) * (1 << 20))
    where = f"{memory} memory ({segment})" if segment else f"{memory} memory"
    if limit_s is None:
        return f"{where} grows by {rate} an hour, and no memory limit is known"
    return f"{where} grows by {rate} an hour and reaches its limit in about {format_left(limit_s)}"


class Trigger(msgspec.Struct, frozen=True):
    """A hypothesis about the cause: the growth follows ``counter``.

    Each increment adds ``bytes_each`` (for ``time``: each hour). ``confidence`` is between 0 and
    1.
    """

    counter: str
    bytes_each: float
    confidence: float


class Suspicion(msgspec.Struct, omit_defaults=True):
    """A suspected problem. ``segment`` is null for a stall.

    ``over_budget`` says that the budget is exhausted, or would be before a drain could end. A
    disruptive action requires it. ``growing`` says that the memory grows at present; otherwise a
    restart can wait. ``unconfirmed`` names another explanation and what would settle it, for
    example garbage that was not collected yet, or memory that an allocator keeps. An unconfirmed
    suspicion justifies a trim, but no restart. ``pod`` names another pod of the same multi-node
    group if the memory is that pod's.
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

    ``warm`` says that this epoch has a baseline. ``segments`` has the last known size of each
    segment; an unreadable segment is absent. ``in_long_step`` says that work waits and no step
    completed for seconds: a call to the engine's worker may hang now.

    If the engine's device allocator reports its unused memory, ``device`` excludes that memory and
    ``reserved`` includes it. Otherwise ``device`` includes everything and ``reserved`` is null.

    ``slow`` has ``host`` and ``device``, each once the memory was observed for long enough.

    ``shared_device`` gives the evidence that others use the engine's devices, in which case only
    the engine's own allocator counts; empty if there is none.
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
