"""From a sample to sizes: of each segment, and of all host and device memory.

What a sample does not say is absent here, never zero, and nothing is made up from a difference that
comes out negative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plimsoll_sidecar.detect.assessment import Segment
from plimsoll_sidecar.trace import Host, Sample


def known(value: int | None) -> int | None:
    """The value, or None where it cannot be a size."""
    return value if value is not None and value >= 0 else None


def total(values: Iterable[int | None]) -> int | None:
    """The sum, unknown if any part of it is."""
    result = 0
    for value in values:
        if known(value) is None:
            return None
        result += value or 0
    return result


@dataclass(frozen=True, slots=True)
class HostSource:
    """Which fields make up an epoch's host memory: one choice for all samples of a series.

    The cgroup's anonymous memory is preferred: resident sums count copy-on-write pages once for
    each forked process.
    """

    anon: str
    shared: str | None

    @classmethod
    def best(cls, host: Host) -> HostSource | None:
        """The best source that ``host`` offers; None where anonymous memory is unknown."""
        anon = _first_known(host, "cgroup_anon", "rss_anon")
        if anon is None:
            return None
        shared = ("cgroup_shmem", "rss_shmem") if anon == "cgroup_anon" else ("rss_shmem",)
        return cls(anon, _first_known(host, *shared))

    def anonymous(self, host: Host) -> int | None:
        return known(getattr(host, self.anon))

    def shared_bytes(self, host: Host) -> int | None:
        return None if self.shared is None else known(getattr(host, self.shared))

    def total(self, host: Host) -> int | None:
        """Anonymous and shared memory; unknown where a part that this source has is missing."""
        if self.shared is None:
            return self.anonymous(host)
        return total((self.anonymous(host), self.shared_bytes(host)))


def _first_known(host: Host, *fields: str) -> str | None:
    return next((field for field in fields if known(getattr(host, field)) is not None), None)


def host_segments(sample: Sample, source: HostSource) -> dict[Segment, int]:
    """``anonymous_other`` is what the allocators' own account leaves over. An engine without such
    an account has all its anonymous memory there."""
    sizes: dict[Segment, int] = {}
    malloc = sample.malloc
    if malloc is not None:
        _put(sizes, Segment.PYTHON_OBJECTS, malloc.python_objects)
        _put(sizes, Segment.MALLOC_IN_USE, malloc.in_use)
        _put(sizes, Segment.MALLOC_RETAINED, malloc.retained)
    anon = source.anonymous(sample.host)
    if anon is not None and sample.scrape_ok:
        _put(sizes, Segment.ANONYMOUS_OTHER, anon - sum(sizes.values()))
    _put(sizes, Segment.SHARED, source.shared_bytes(sample.host))
    return sizes


def device_total(sample: Sample) -> int | None:
    """Used memory of all devices; unknown where one of them is, or where there is none."""
    return total(device.used for device in sample.device) if sample.device else None


def device_own(sample: Sample) -> int | None:
    """What the engine's own allocator holds on all devices, whoever else uses them."""
    torch = [device.torch for device in sample.device]
    return total(t.reserved if t else None for t in torch) if torch else None


def device_segments(sample: Sample) -> dict[Segment, int]:
    torch = [device.torch for device in sample.device]
    allocated = total(t.allocated if t else None for t in torch)
    reserved = total(t.reserved if t else None for t in torch)
    used = device_total(sample)
    sizes: dict[Segment, int] = {}
    if not sample.device:
        return sizes
    _put(sizes, Segment.TORCH_ALLOCATED, allocated)
    if allocated is not None and reserved is not None:
        _put(sizes, Segment.TORCH_RESERVED_UNUSED, reserved - allocated)
    if used is not None and reserved is not None:
        _put(sizes, Segment.NON_TORCH, used - reserved)
    return sizes


def _put(sizes: dict[Segment, int], segment: Segment, value: int | None) -> None:
    if value is not None and value >= 0:
        sizes[segment] = value
