"""Compute memory segments, and the load at the last scrape.

A value that a sample lacks is absent, never zero. A negative difference is absent too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from plimsoll_api.assessment import Segment
from plimsoll_api.trace import Host, LedgerLine, RoleRss, Sample
from plimsoll_sidecar.detect.demand import DemandWatch, count_inflight

FIELDS_BESIDE = {
    Segment.HUGETLB: "hugetlb",
    Segment.KERNEL: "cgroup_kernel",
    Segment.SOCKETS: "cgroup_sock",
    Segment.CHARGED_OTHER: "cgroup_other",
}
"""Field of :class:`Host` with the memory that is neither anonymous nor shared, by segment."""
MAX_ROLES = 256
"""Maximum number of roles; an engine has a dozen at most."""


def _drop_invalid_size(value: int | None) -> int | None:
    return value if value is not None and value >= 0 else None


def _sum_sizes(values: Iterable[int | None]) -> int | None:
    """Return the sum of the values; None if any of them is unknown."""
    sizes = [_drop_invalid_size(value) for value in values]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


@dataclass(frozen=True, slots=True)
class HostMemoryFields:
    """Fields of :class:`Host` whose sum is host memory, the same for all samples of a series.

    A sum over processes counts a copy-on-write page for each fork, so the cgroup's fields come
    first. Swapped memory counts as anonymous. ``beside`` lists further segments.
    """

    anon: str
    shared: str | None
    swap: str | None = None
    orphan: bool = False
    beside: tuple[Segment, ...] = ()

    @classmethod
    def choose(cls, host: Host) -> HostMemoryFields | None:
        """Return the best fields of those that ``host`` has; None without anonymous memory."""
        anon = _find_first_known_field(host, "cgroup_anon", "rss_anon")
        if anon is None:
            return None
        group = anon == "cgroup_anon"
        shared = ("cgroup_shmem", "rss_shmem") if group else ("rss_shmem",)
        swap = ("cgroup_swap", "swap") if group else ("swap",)
        return cls(
            anon,
            _find_first_known_field(host, *shared),
            _find_first_known_field(host, *swap),
            _drop_invalid_size(host.shm_orphan) is not None
            and _drop_invalid_size(host.shm_orphan_earlier) is not None,
            tuple(
                segment
                for segment, field in FIELDS_BESIDE.items()
                if _drop_invalid_size(getattr(host, field)) is not None
            ),
        )

    def sum_anonymous_bytes(self, host: Host) -> int | None:
        """Return the anonymous memory, resident and swapped; None if a part is unknown."""
        resident = _drop_invalid_size(getattr(host, self.anon))
        return resident if self.swap is None else _sum_sizes((resident, getattr(host, self.swap)))

    def sum_shared_bytes(self, host: Host) -> int | None:
        """Return the shared memory of living processes in bytes; None if unknown."""
        if self.shared is None:
            return None
        shared = _drop_invalid_size(getattr(host, self.shared))
        if shared is None or not self.orphan or self.shared != "cgroup_shmem":
            return shared
        # The group counts orphans of this container, but none of an earlier container.
        inside = (host.shm_orphan or 0) - (host.shm_orphan_earlier or 0)
        return max(0, shared - max(0, inside))

    def read_orphan_bytes(self, host: Host) -> int | None:
        """Return the shared memory that no living process holds; None if unknown."""
        return _drop_invalid_size(host.shm_orphan) if self.orphan else None

    def sum_bytes(self, host: Host) -> int | None:
        """Return the sum of all these fields in bytes; None if a part is unknown."""
        parts = [self.sum_anonymous_bytes(host)]
        if self.shared is not None:
            parts.append(self.sum_shared_bytes(host))
        if self.orphan:
            parts.append(self.read_orphan_bytes(host))
        return _sum_sizes([*parts, *self.read_remaining_segments(host).values()])

    def read_remaining_segments(self, host: Host) -> dict[Segment, int | None]:
        """Return the bytes of each segment in ``beside``; None if its size is unknown."""
        return {
            segment: _drop_invalid_size(getattr(host, FIELDS_BESIDE[segment]))
            for segment in self.beside
        }


def _find_first_known_field(host: Host, *fields: str) -> str | None:
    return next(
        (field for field in fields if _drop_invalid_size(getattr(host, field)) is not None), None
    )


def compute_host_segments(
    sample: Sample, source: HostMemoryFields, has_allocator_history: bool = False
) -> dict[Segment, int]:
    """Return the size of each known host segment in bytes.

    Memory outside all allocators is unknown if an earlier sample reported the allocators' memory
    (``has_allocator_history``) and this one does not.
    """
    malloc, host = sample.malloc, sample.host
    sizes: dict[Segment, int | None] = {}
    if malloc is not None:
        sizes[Segment.PYTHON_OBJECTS] = malloc.python_objects
        sizes[Segment.MALLOC_IN_USE] = malloc.in_use
        sizes[Segment.MALLOC_RETAINED] = malloc.retained
    anonymous = source.sum_anonymous_bytes(host)
    if (
        anonymous is not None
        and sample.scrape_ok
        and (malloc is not None or not has_allocator_history)
    ):
        sizes[Segment.ANONYMOUS_OTHER] = anonymous - sum(_drop_unknown_sizes(sizes).values())
    sizes[Segment.SHARED] = source.sum_shared_bytes(host)
    sizes[Segment.SHARED_ORPHAN] = source.read_orphan_bytes(host)
    return _drop_unknown_sizes(sizes | source.read_remaining_segments(host))


def sum_device_bytes(sample: Sample) -> int | None:
    """Return the used memory of all devices in bytes; None if unknown for any device."""
    return _sum_sizes(device.used for device in sample.device) if sample.device else None


def sum_torch_bytes(sample: Sample, field: str) -> int | None:
    """Return the sum of a field of the engine's allocator over all devices.

    None if unknown for any device.
    """
    devices = [device.torch for device in sample.device]
    return _sum_sizes(getattr(t, field) if t else None for t in devices) if devices else None


def compute_device_segments(sample: Sample) -> dict[Segment, int]:
    """Return the size of each known device segment in bytes."""
    allocated, reserved = (sum_torch_bytes(sample, field) for field in ("allocated", "reserved"))
    used = sum_device_bytes(sample)
    return _drop_unknown_sizes({
        Segment.TORCH_ALLOCATED: allocated,
        Segment.TORCH_RESERVED_UNUSED: (
            None if allocated is None or reserved is None else reserved - allocated
        ),
        Segment.NON_TORCH: None if used is None or reserved is None else used - reserved,
    })  # fmt: skip


def _drop_unknown_sizes(sizes: Mapping[Segment, int | None]) -> dict[Segment, int]:
    return {name: size for name, size in sizes.items() if size is not None and size >= 0}


class RoleSizes:
    """Sizes of one kind of memory by process role.

    ``size`` returns the bytes of a process; None if unknown. ``known`` is True once one was known.
    """

    def __init__(self, size: Callable[[RoleRss], int | None]) -> None:
        self._size = size
        self._bases: dict[str, int] = {}
        self._newest: dict[str, int] = {}
        self.known = False

    def update(self, processes: Iterable[RoleRss], warm: bool) -> None:
        """Add a sample. Until the epoch is ``warm``, the sizes become the bases."""
        sums: dict[str, int] = {}
        living: set[str] = set()
        for process in processes:
            living.add(process.role)
            size = self._size(process)
            if size is not None:
                sums[process.role] = sums.get(process.role, 0) + size
        for role, size in sums.items():
            if not warm or role not in self._bases:
                self._bases[role] = size
        if living:
            self._newest = {role: size for role, size in self._newest.items() if role in living}
        if len(self._bases) > MAX_ROLES:
            self._bases = {role: size for role, size in self._bases.items() if role in living}
        self._newest |= sums
        self.known |= bool(sums)

    @property
    def bases(self) -> dict[str, int]:
        """Sizes at the end of the warm-up in bytes, by role."""
        return dict(self._bases)

    def restore_bases(self, bases: Mapping[str, int]) -> None:
        """Restore the :attr:`bases` of an earlier detector in this epoch."""
        self._bases |= bases

    def compute_growth(self, role: str | None) -> int | None:
        """Return the growth of a role since its base in bytes; None if unknown."""
        if role is None or role not in self._newest:
            return None
        return self._newest[role] - self._bases[role] if role in self._bases else None

    def find_largest(self) -> str | None:
        """Return the role that grew most; None if no role grew."""
        grown = self._compute_positive_growth()
        return max(grown, key=lambda role: grown[role], default=None)

    def find_majority(self) -> str | None:
        """Return the role with more than half of the growth of all; None if there is none.

        Pages that two processes share count for both, so neither has more than half.
        """
        role, grown = self.find_largest(), self._compute_positive_growth()
        return role if role is not None and 2 * grown[role] > sum(grown.values()) else None

    def _compute_positive_growth(self) -> dict[str, int]:
        growth = {role: size - self._bases.get(role, size) for role, size in self._newest.items()}
        return {role: size for role, size in growth.items() if size > 0}


MAX_LOAD_AGE_S = 30.0
"""Time for which the load stays valid after the last successful scrape."""
LOAD_WINDOW_S = 30.0
"""Window whose maximum is the load, because that of one page changes within milliseconds."""


class LastScrape:
    """Engine state at the last successful scrape.

    ``load`` is the number of requests in flight, ``requests`` that of completed ones in this epoch;
    None if unknown.
    """

    def __init__(self) -> None:
        self.ledger: list[LedgerLine] = []
        self.load: int | None = None
        self.ready: bool | None = None
        self.requests: int | None = None
        self.demand_is_new = False
        self._demand = DemandWatch()
        self._scraped_at = -math.inf
        self._loads: deque[tuple[float, int]] = deque()

    def update(self, sample: Sample) -> None:
        """Add a sample. The load becomes unknown if the last successful scrape is too old."""
        if sample.scrape_ok:
            self._scraped_at, self.ready = sample.t, sample.ready
            self.load, self.requests = self._find_load(sample), sample.load.requests_total
            if sample.ledger is not None:
                self.ledger = sample.ledger
        elif sample.t - self._scraped_at > MAX_LOAD_AGE_S:
            self.load = None
        page = sample.load if sample.scrape_ok else None
        self.demand_is_new = self._demand.update(sample.t, page)

    def _find_load(self, sample: Sample) -> int | None:
        load, requests = count_inflight(sample.load), sample.load.requests_total
        if load is None:
            return None
        if requests is not None and self.requests is not None and requests > self.requests:
            load = max(1, load)  # between two requests, the gauge is 0
        if sample.load_age_s is None:
            return load
        self._loads.append((sample.t, load))
        while sample.t - self._loads[0][0] > LOAD_WINDOW_S:
            self._loads.popleft()
        return max(load for _, load in self._loads)
