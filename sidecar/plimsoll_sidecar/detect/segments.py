"""From a sample to what is judged: the size of each segment, and the load of the last scrape.

What a sample does not say is absent here, never zero, and nothing is made up from a difference that
comes out negative.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from plimsoll_api.assessment import Segment
from plimsoll_api.trace import Host, LedgerLine, RoleRss, Sample, SampleLoad
from plimsoll_sidecar.detect.stall import work

MAX_ROLES = 256
"""An engine has a dozen at most; a longer list must be made up."""


def known(value: int | None) -> int | None:
    """Return the value, or None where it cannot be a size."""
    return value if value is not None and value >= 0 else None


def total(values: Iterable[int | None]) -> int | None:
    """Return the sum, unknown if any part of it is."""
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
    each forked process. What was swapped out is anonymous memory all the same: memory that is only
    moved is neither growth nor recovery.
    """

    anon: str
    shared: str | None
    swap: str | None = None
    orphan: bool = False
    beside: tuple[Segment, ...] = ()

    @classmethod
    def best(cls, host: Host) -> HostSource | None:
        """Return the best source that ``host`` offers; None where anonymous memory is unknown."""
        anon = _first_known(host, "cgroup_anon", "rss_anon")
        if anon is None:
            return None
        group = anon == "cgroup_anon"
        shared = ("cgroup_shmem", "rss_shmem") if group else ("rss_shmem",)
        swap = ("cgroup_swap", "swap") if group else ("swap",)
        return cls(
            anon,
            _first_known(host, *shared),
            _first_known(host, *swap),
            known(host.shm_orphan) is not None and known(host.shm_orphan_earlier) is not None,
            tuple(
                segment
                for segment, size in _beside(host).items()
                if size is not None and (group or segment is Segment.HUGETLB)
            ),
        )

    def anonymous(self, host: Host) -> int | None:
        """Resident and swapped out; unknown where a part that this source has is missing."""
        resident = known(getattr(host, self.anon))
        return resident if self.swap is None else total((resident, getattr(host, self.swap)))

    def shared_bytes(self, host: Host) -> int | None:
        """Return what living processes share."""
        if self.shared is None:
            return None
        shared = known(getattr(host, self.shared))
        if shared is None or not self.orphan or self.shared != "cgroup_shmem":
            return shared
        # The group counts what a dead process of the same container left, no earlier container's.
        inside = (host.shm_orphan or 0) - (host.shm_orphan_earlier or 0)
        return max(0, shared - max(0, inside))

    def orphan_bytes(self, host: Host) -> int | None:
        """Shared memory that no living process holds."""
        return known(host.shm_orphan) if self.orphan else None

    def total(self, host: Host) -> int | None:
        """Anonymous and shared memory; unknown where a part that this source has is missing."""
        parts = [self.anonymous(host)]
        if self.shared is not None:
            parts.append(self.shared_bytes(host))
        if self.orphan:
            parts.append(self.orphan_bytes(host))
        return total([*parts, *self.beside_bytes(host).values()])

    def beside_bytes(self, host: Host) -> dict[Segment, int | None]:
        """Return what is in no anonymous and no shared memory, by segment."""
        found = _beside(host)
        return {segment: found[segment] for segment in self.beside}


def _beside(host: Host) -> dict[Segment, int | None]:
    return {
        Segment.HUGETLB: known(host.hugetlb),
        Segment.KERNEL: known(host.cgroup_kernel),
        Segment.SOCKETS: known(host.cgroup_sock),
        Segment.CHARGED_OTHER: _charged_other(host),
    }


def _charged_other(host: Host) -> int | None:
    """Return what is charged to the group and in no other figure.

    A recording of an earlier release has the group's size and its main parts.
    """
    if host.cgroup_other is not None or host.cgroup_reclaimable is not None:
        return known(host.cgroup_other)
    whole = known(host.cgroup_current)
    parts = total((host.cgroup_anon, host.cgroup_shmem, host.cgroup_file))
    return None if whole is None or parts is None else max(0, whole - parts)


def _first_known(host: Host, *fields: str) -> str | None:
    return next((field for field in fields if known(getattr(host, field)) is not None), None)


def host_segments(
    sample: Sample, source: HostSource, accounted: bool = False
) -> dict[Segment, int]:
    """``anonymous_other`` is what the allocators' own account leaves over.

    An engine without such an account has all its anonymous memory there; with ``accounted``, the
    engine had one earlier, and what a sample without it leaves over is unknown.
    """
    sizes: dict[Segment, int] = {}
    malloc = sample.malloc
    if malloc is not None:
        _put(sizes, Segment.PYTHON_OBJECTS, malloc.python_objects)
        _put(sizes, Segment.MALLOC_IN_USE, malloc.in_use)
        _put(sizes, Segment.MALLOC_RETAINED, malloc.retained)
    anon = source.anonymous(sample.host)
    if anon is not None and sample.scrape_ok and (malloc is not None or not accounted):
        _put(sizes, Segment.ANONYMOUS_OTHER, anon - sum(sizes.values()))
    _put(sizes, Segment.SHARED, source.shared_bytes(sample.host))
    _put(sizes, Segment.SHARED_ORPHAN, source.orphan_bytes(sample.host))
    for segment, size in source.beside_bytes(sample.host).items():
        _put(sizes, segment, size)
    return sizes


def device_total(sample: Sample) -> int | None:
    """Return the used memory of all devices; unknown where one is, or where there is none."""
    return total(device.used for device in sample.device) if sample.device else None


def device_own(sample: Sample) -> int | None:
    """Return what the engine's own allocator holds on all devices, whoever else uses them."""
    return _torch(sample, "reserved")


def device_unused(sample: Sample) -> int | None:
    """Return what the engine's own allocator keeps for later use.

    Unknown where it does not say so for every device.
    """
    allocated, reserved = _torch(sample, "allocated"), _torch(sample, "reserved")
    return None if allocated is None or reserved is None else known(reserved - allocated)


def _torch(sample: Sample, field: str) -> int | None:
    devices = [device.torch for device in sample.device]
    return total(getattr(t, field) if t else None for t in devices) if devices else None


def device_segments(sample: Sample) -> dict[Segment, int]:
    """Bytes of each device segment that is known; the rest of the device is ``NON_TORCH``."""
    reserved, used = device_own(sample), device_total(sample)
    sizes: dict[Segment, int] = {}
    _put(sizes, Segment.TORCH_ALLOCATED, _torch(sample, "allocated"))
    _put(sizes, Segment.TORCH_RESERVED_UNUSED, device_unused(sample))
    if used is not None and reserved is not None:
        _put(sizes, Segment.NON_TORCH, used - reserved)
    return sizes


def _put(sizes: dict[Segment, int], segment: Segment, value: int | None) -> None:
    if value is not None and value >= 0:
        sizes[segment] = value


class Roles:
    """One kind of a process's memory, which ``size`` reads; null is unknown.

    ``known`` says whether any process has been seen with this kind of memory known.
    """

    def __init__(self, size: Callable[[RoleRss], int | None]) -> None:
        self._size = size
        self._bases: dict[str, int] = {}
        self._newest: dict[str, int] = {}
        self.known = False

    def update(self, processes: Iterable[RoleRss], warm: bool) -> None:
        """Take in one sample. Until the epoch is warm its sizes are the bases.

        A role whose processes have ended has no size any more, and no growth. A sample without any
        process could not be read.
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
        """Bytes of each role when its baseline was taken."""
        return dict(self._bases)

    def resume(self, bases: Mapping[str, int]) -> None:
        """Go on from what :attr:`bases` gave in this epoch."""
        self._bases |= bases

    def largest(self) -> str | None:
        """Return the role that grew most; None where none did."""
        grown = self._grown()
        return max(grown, key=lambda role: grown[role], default=None)

    def sole(self) -> str | None:
        """Return the role that has more than half of all growth.

        Pages that two processes share count for each of them: then it is neither's.
        """
        role = self.largest()
        grown = self._grown()
        return role if role is not None and 2 * grown[role] > sum(grown.values()) else None

    def _grown(self) -> dict[str, int]:
        growth = {role: size - self._bases.get(role, size) for role, size in self._newest.items()}
        return {role: size for role, size in growth.items() if size > 0}


NEW_S = 45.0
"""Requests that came together need this long to reach their full size."""
MORE, MORE_REQUESTS, MORE_TOKENS = 1.05, 2, 1.3
"""A count of requests is new above the highest by this factor and by two, a mean of prompt tokens
above it by the other factor: arrivals and prompts vary by as much by chance."""
MEAN_S, MAX_PAGES, MIN_CAME = 15.0, 64, 10
MAX_NEW_S, NEW_WITHIN_S = 300.0, 3600.0
"""New demand explains growth for at most so many seconds in an hour: a load that rises for hours
must not hide a leak."""


class Demand:
    """Whether more is asked of an engine than ever before in its epoch, or was a moment ago.

    Nothing that was seen before says how much memory that needs, nor how much of it an allocator
    keeps afterwards. Requests and prompts are means over :data:`MEAN_S`: one sample's peak would
    depend on the moment at which it was taken.
    """

    def __init__(self) -> None:
        self._most: dict[str, float] = {}
        self._new_until = -math.inf
        self._new_s = 0.0
        self._at: float | None = None
        self._pages: deque[tuple[float, SampleLoad]] = deque(maxlen=MAX_PAGES)

    def update(self, t: float, said: SampleLoad | None) -> bool:
        """Take in what a page ``said``, None without one; return whether the demand is new."""
        if said is not None:
            self._pages.append((t, said))
            while len(self._pages) > 2 and t - self._pages[1][0] >= MEAN_S:
                self._pages.popleft()
            if t - self._pages[0][0] >= MEAN_S:
                self._rise("requests", self._mean(work), t, MORE, MORE_REQUESTS)
                self._rise("waiting", self._mean(lambda page: page.waiting), t, MORE, MORE_REQUESTS)
                self._rise("prompt", self._prompt_tokens(), t, MORE_TOKENS)
            self._rise("images", said.images_total and 1, t)
        new = t < self._new_until and self._new_s < MAX_NEW_S
        elapsed, self._at = t - (t if self._at is None else self._at), t
        earned = elapsed * MAX_NEW_S / NEW_WITHIN_S
        self._new_s = max(0.0, self._new_s - earned) + (elapsed if new else 0.0)
        return new

    def _rise(
        self, name: str, value: float | None, t: float, factor: float = 1.0, more: float = 0.0
    ) -> None:
        """Note a gauge at a new maximum. Its first value is none: nothing was known before."""
        if value is None:
            return
        most = self._most.setdefault(name, value)
        if value > max(factor * most, most + more):
            self._most[name], self._new_until = value, t + NEW_S

    def _mean(self, gauge: Callable[[SampleLoad], float | None]) -> float | None:
        values = [value for _, page in self._pages if (value := gauge(page)) is not None]
        return fmean(values) if values else None

    def _prompt_tokens(self) -> float | None:
        """Return the mean of the requests that came meanwhile."""
        first, last = self._pages[0][1], self._pages[-1][1]
        tokens = _more(first.prompt_tokens_total, last.prompt_tokens_total)
        answered = _more(first.requests_total, last.requests_total)
        if tokens is None or answered is None:
            return None
        came = answered + (work(last) or 0) - (work(first) or 0)
        return tokens / came if came >= MIN_CAME else None


def _more(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else later - earlier


LOAD_MEMORY_S = 30.0
"""A failed scrape leaves load and ledger as they were for this long; then they are unknown."""
PAGES_S = 30.0
"""A page shows one moment of a load that changes within milliseconds, between no request and all:
what the engine serves is the most that the pages of this time show."""


class LastScrape:
    """``load`` is requests in flight and ``requests`` those ever answered; None is unknown."""

    def __init__(self) -> None:
        self.ledger: list[LedgerLine] = []
        self.load: int | None = None
        self.ready: bool | None = None
        self.requests: int | None = None
        self.demand_is_new = False
        self._demand = Demand()
        self._known_at = -math.inf
        self._loads: deque[tuple[float, int]] = deque()

    def update(self, sample: Sample) -> None:
        """Take in a sample; what a failed scrape leaves is forgotten when it is too old."""
        if sample.scrape_ok:
            self._known_at, self.ready = sample.t, sample.ready
            self.load, self.requests = self._load(sample), sample.load.requests_total
            if sample.ledger is not None:
                self.ledger = sample.ledger
        elif sample.t - self._known_at > LOAD_MEMORY_S:
            self.load = None
        page = sample.load if sample.scrape_ok else None
        self.demand_is_new = self._demand.update(sample.t, page)

    def _load(self, sample: Sample) -> int | None:
        load, requests = work(sample.load), sample.load.requests_total
        if load is None:
            return None
        if requests is not None and self.requests is not None and requests > self.requests:
            load = max(1, load)  # a gauge that is read between two requests shows none
        if sample.load_age_s is None:
            return load
        while self._loads and sample.t - self._loads[0][0] > PAGES_S:
            self._loads.popleft()
        while self._loads and self._loads[-1][1] <= load:
            self._loads.pop()
        self._loads.append((sample.t, load))
        return self._loads[0][1]
