"""Compute the memory segments of a sample, and the load and demand of the last scrape.

A value that a sample lacks is absent, never zero. A negative difference is absent, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from plimsoll_api.assessment import Segment
from plimsoll_api.trace import Host, LedgerLine, RoleRss, Sample, SampleLoad
from plimsoll_sidecar.detect.stall import count_inflight

MAX_ROLES = 256
"""Maximum number of roles. An engine has at most a dozen; a longer list is not credible."""


def _check_size(value: int | None) -> int | None:
    """Return ``value``, or None if it cannot be a size."""
    return value if value is not None and value >= 0 else None


def _sum_sizes(values: Iterable[int | None]) -> int | None:
    """Return the sum of the values; None if any of them is unknown."""
    result = 0
    for value in values:
        if _check_size(value) is None:
            return None
        result += value or 0
    return result


@dataclass(frozen=True, slots=True)
class HostMemoryFields:
    """The fields of :class:`Host` whose sum is host memory, the same for all samples of a series.

    The anonymous memory of the cgroup is preferred, because sums over processes count copy-on-write
    pages once for each fork. Swapped memory counts as anonymous: swapping is neither growth nor
    recovery.
    """

    anon: str
    shared: str | None
    swap: str | None = None
    orphan: bool = False
    beside: tuple[Segment, ...] = ()

    @classmethod
    def choose(cls, host: Host) -> HostMemoryFields | None:
        """Return the best fields that ``host`` has; None without anonymous memory."""
        anon = _first_valid(host, "cgroup_anon", "rss_anon")
        if anon is None:
            return None
        group = anon == "cgroup_anon"
        shared = ("cgroup_shmem", "rss_shmem") if group else ("rss_shmem",)
        swap = ("cgroup_swap", "swap") if group else ("swap",)
        return cls(
            anon,
            _first_valid(host, *shared),
            _first_valid(host, *swap),
            _check_size(host.shm_orphan) is not None
            and _check_size(host.shm_orphan_earlier) is not None,
            tuple(
                segment
                for segment, size in _read_other_segments(host).items()
                if size is not None and (group or segment is Segment.HUGETLB)
            ),
        )

    def anonymous(self, host: Host) -> int | None:
        """Return resident and swapped anonymous memory in bytes; None if a part is missing."""
        resident = _check_size(getattr(host, self.anon))
        return resident if self.swap is None else _sum_sizes((resident, getattr(host, self.swap)))

    def sum_shared_bytes(self, host: Host) -> int | None:
        """Return the memory that living processes share, in bytes."""
        if self.shared is None:
            return None
        shared = _check_size(getattr(host, self.shared))
        if shared is None or not self.orphan or self.shared != "cgroup_shmem":
            return shared
        # The group counts orphans of this container, but none of an earlier container.
        inside = (host.shm_orphan or 0) - (host.shm_orphan_earlier or 0)
        return max(0, shared - max(0, inside))

    def read_orphan_bytes(self, host: Host) -> int | None:
        """Return the shared memory that no living process holds, in bytes."""
        return _check_size(host.shm_orphan) if self.orphan else None

    def total(self, host: Host) -> int | None:
        """Return all memory of these fields in bytes; None if a part is missing."""
        parts = [self.anonymous(host)]
        if self.shared is not None:
            parts.append(self.sum_shared_bytes(host))
        if self.orphan:
            parts.append(self.read_orphan_bytes(host))
        return _sum_sizes([*parts, *self.other_segments(host).values()])

    def other_segments(self, host: Host) -> dict[Segment, int | None]:
        """Return the segments that are neither anonymous nor shared memory, in bytes."""
        sizes = _read_other_segments(host)
        return {segment: sizes[segment] for segment in self.beside}


def _read_other_segments(host: Host) -> dict[Segment, int | None]:
    other = _check_size(host.cgroup_other)
    if host.cgroup_other is None and host.cgroup_reclaimable is None:
        # A recording of an earlier release has the group's size and its main parts only.
        charged = _check_size(host.cgroup_current)
        parts = _sum_sizes((host.cgroup_anon, host.cgroup_shmem, host.cgroup_file))
        other = None if charged is None or parts is None else max(0, charged - parts)
    return {
        Segment.HUGETLB: _check_size(host.hugetlb),
        Segment.KERNEL: _check_size(host.cgroup_kernel),
        Segment.SOCKETS: _check_size(host.cgroup_sock),
        Segment.CHARGED_OTHER: other,
    }


def _first_valid(host: Host, *fields: str) -> str | None:
    return next((field for field in fields if _check_size(getattr(host, field)) is not None), None)


def compute_host_segments(
    sample: Sample, source: HostMemoryFields, had_account: bool = False
) -> dict[Segment, int]:
    """Return the size of each known host segment, in bytes.

    ``anonymous_other`` is anonymous memory that is in no allocator. ``had_account`` states that
    earlier samples reported the allocators' memory. If this sample lacks it, ``anonymous_other`` is
    unknown.
    """
    malloc, host = sample.malloc, sample.host
    sizes: dict[Segment, int | None] = {}
    if malloc is not None:
        sizes[Segment.PYTHON_OBJECTS] = malloc.python_objects
        sizes[Segment.MALLOC_IN_USE] = malloc.in_use
        sizes[Segment.MALLOC_RETAINED] = malloc.retained
    anonymous = source.anonymous(host)
    if anonymous is not None and sample.scrape_ok and (malloc is not None or not had_account):
        sizes[Segment.ANONYMOUS_OTHER] = anonymous - sum(_drop_unknown_sizes(sizes).values())
    sizes[Segment.SHARED] = source.sum_shared_bytes(host)
    sizes[Segment.SHARED_ORPHAN] = source.read_orphan_bytes(host)
    return _drop_unknown_sizes(sizes | source.other_segments(host))


def sum_device_bytes(sample: Sample) -> int | None:
    """Return the used memory of all devices in bytes; None if any is unknown."""
    return _sum_sizes(device.used for device in sample.device) if sample.device else None


def sum_allocated_device_bytes(sample: Sample) -> int | None:
    """Return the memory that the engine's own allocator holds on all devices, in bytes."""
    return _sum_torch_bytes(sample, "reserved")


def sum_unused_device_bytes(sample: Sample) -> int | None:
    """Return the memory that the engine's allocator keeps unused, in bytes.

    None if it is unknown for any device.
    """
    allocated, reserved = (
        _sum_torch_bytes(sample, "allocated"),
        _sum_torch_bytes(sample, "reserved"),
    )
    return None if allocated is None or reserved is None else _check_size(reserved - allocated)


def _sum_torch_bytes(sample: Sample, field: str) -> int | None:
    devices = [device.torch for device in sample.device]
    return _sum_sizes(getattr(t, field) if t else None for t in devices) if devices else None


def compute_device_segments(sample: Sample) -> dict[Segment, int]:
    """Return the size of each known device segment, in bytes. ``NON_TORCH`` is the rest."""
    reserved, used = sum_allocated_device_bytes(sample), sum_device_bytes(sample)
    return _drop_unknown_sizes({
        Segment.TORCH_ALLOCATED: _sum_torch_bytes(sample, "allocated"),
        Segment.TORCH_RESERVED_UNUSED: sum_unused_device_bytes(sample),
        Segment.NON_TORCH: None if used is None or reserved is None else used - reserved,
    })  # fmt: skip


def _drop_unknown_sizes(sizes: Mapping[Segment, int | None]) -> dict[Segment, int]:
    return {name: size for name, size in sizes.items() if size is not None and size >= 0}


class RoleSizes:
    """Sizes of one kind of memory by process role.

    ``size`` returns the bytes of a process, or None if they are unknown. ``known`` states whether
    the size of any process has been known.
    """

    def __init__(self, size: Callable[[RoleRss], int | None]) -> None:
        self._size = size
        self._bases: dict[str, int] = {}
        self._newest: dict[str, int] = {}
        self.known = False

    def update(self, processes: Iterable[RoleRss], warm: bool) -> None:
        """Add a sample. Until the epoch is warm, its sizes are the bases.

        A role whose processes have ended has neither size nor growth. An empty sample could not be
        read, and changes nothing.
        """
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
        self.known = self.known or bool(sums)

    @property
    def bases(self) -> dict[str, int]:
        """The bytes of each role at the end of the warm-up."""
        return dict(self._bases)

    def resume(self, bases: Mapping[str, int]) -> None:
        """Continue from the :attr:`bases` of an earlier detector in this epoch."""
        self._bases |= bases

    def growth(self, role: str | None) -> int | None:
        """Return the growth of a role since its base, negative if it shrank; None if unknown."""
        if role is None or role not in self._newest:
            return None
        return self._newest[role] - self._bases[role] if role in self._bases else None

    def find_largest(self) -> str | None:
        """Return the role that grew most; None if no role grew."""
        grown = self._grown()
        return max(grown, key=lambda role: grown[role], default=None)

    def find_majority(self) -> str | None:
        """Return the role with more than half of all growth, or None.

        Growth in pages that two processes share counts for both, so neither of them has more than
        half.
        """
        role, grown = self.find_largest(), self._grown()
        return role if role is not None and 2 * grown[role] > sum(grown.values()) else None

    def _grown(self) -> dict[str, int]:
        growth = {role: size - self._bases.get(role, size) for role, size in self._newest.items()}
        return {role: size for role, size in growth.items() if size > 0}


NEW_DEMAND_S = 45.0
"""Requests that arrived together need this time to reach their full size."""
DEMAND_FACTOR, DEMAND_MORE_REQUESTS, DEMAND_TOKEN_FACTOR = 1.05, 2, 1.3
"""A count of requests is new if it exceeds the highest by this factor and by two, a mean of prompt
tokens by the other factor. Arrivals and prompts vary by as much by chance."""
DEMAND_MEAN_S, MAX_PAGES, MIN_ARRIVED = 15.0, 64, 10
MAX_NEW_DEMAND_S, NEW_DEMAND_WINDOW_S = 300.0, 3600.0
"""New demand explains growth for at most this many seconds in an hour: a load that rises for hours
must not hide a leak."""


class DemandWatch:
    """Highest demand on an engine in its epoch, and whether it was recently exceeded.

    It is unknown how much memory a new demand needs, and how much of that an allocator keeps.
    Requests and prompts are means over :data:`DEMAND_MEAN_S`, because a single sample may show a
    peak.
    """

    def __init__(self) -> None:
        self._most: dict[str, float] = {}
        self._new_until = -math.inf
        self._new_s = 0.0
        self._updated_at: float | None = None
        self._pages: deque[tuple[float, SampleLoad]] = deque(maxlen=MAX_PAGES)

    def update(self, t: float, page: SampleLoad | None) -> bool:
        """Add a metrics page, None if it is missing, and return whether the demand is new."""
        if page is not None:
            self._pages.append((t, page))
            while len(self._pages) > 2 and t - self._pages[1][0] >= DEMAND_MEAN_S:
                self._pages.popleft()
            if t - self._pages[0][0] >= DEMAND_MEAN_S:
                self._raise_maximum(
                    "requests",
                    self._compute_mean(count_inflight),
                    t,
                    DEMAND_FACTOR,
                    DEMAND_MORE_REQUESTS,
                )
                self._raise_maximum(
                    "waiting",
                    self._compute_mean(lambda page: page.waiting),
                    t,
                    DEMAND_FACTOR,
                    DEMAND_MORE_REQUESTS,
                )
                self._raise_maximum("prompt", self._compute_prompt_tokens(), t, DEMAND_TOKEN_FACTOR)
            self._raise_maximum("images", page.images_total and 1, t)
        new = t < self._new_until and self._new_s < MAX_NEW_DEMAND_S
        elapsed = t - (t if self._updated_at is None else self._updated_at)
        self._updated_at = t
        earned = elapsed * MAX_NEW_DEMAND_S / NEW_DEMAND_WINDOW_S
        self._new_s = max(0.0, self._new_s - earned) + (elapsed if new else 0.0)
        return new

    def _raise_maximum(
        self, name: str, value: float | None, t: float, factor: float = 1.0, more: float = 0.0
    ) -> None:
        """Raise a gauge's maximum. The first value sets it without counting as new."""
        if value is None:
            return
        most = self._most.setdefault(name, value)
        if value > max(factor * most, most + more):
            self._most[name], self._new_until = value, t + NEW_DEMAND_S

    def _compute_mean(self, gauge: Callable[[SampleLoad], float | None]) -> float | None:
        values = [value for _, page in self._pages if (value := gauge(page)) is not None]
        return fmean(values) if values else None

    def _compute_prompt_tokens(self) -> float | None:
        """Return the mean prompt tokens of the requests that arrived since the oldest page."""
        first, last = self._pages[0][1], self._pages[-1][1]
        tokens = _subtract(first.prompt_tokens_total, last.prompt_tokens_total)
        completed = _subtract(first.requests_total, last.requests_total)
        if tokens is None or completed is None:
            return None
        arrived = completed + (count_inflight(last) or 0) - (count_inflight(first) or 0)
        return tokens / arrived if arrived >= MIN_ARRIVED else None


def _subtract(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else later - earlier


LOAD_MEMORY_S = 30.0
"""Seconds for which load and ledger stay valid after the last successful scrape."""
PAGES_S = 30.0
"""The load is the maximum of the pages in this time: a single page shows one moment of a load that
changes within milliseconds."""


class LastScrape:
    """Engine state as of the last successful scrape.

    ``load`` is the number of requests in flight, ``requests`` the number completed in this epoch;
    both are None if unknown.
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
        """Add a sample. Forget the load once the last successful scrape is too old."""
        if sample.scrape_ok:
            self._scraped_at, self.ready = sample.t, sample.ready
            self.load, self.requests = self._find_load(sample), sample.load.requests_total
            if sample.ledger is not None:
                self.ledger = sample.ledger
        elif sample.t - self._scraped_at > LOAD_MEMORY_S:
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
        while self._loads and sample.t - self._loads[0][0] > PAGES_S:
            self._loads.popleft()
        while self._loads and self._loads[-1][1] <= load:
            self._loads.pop()
        self._loads.append((sample.t, load))
        return self._loads[0][1]
