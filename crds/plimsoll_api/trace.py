"""Samples of an engine, and traces of them.

The sampler makes a :class:`Sample` each interval, the detector consumes it, ``plimsoll record``
writes it and ``plimsoll replay`` reads it. A replay differs from a live run only in the clock and
the source. The format is JSON Lines, UTF-8, optionally gzip: one :class:`Header`, then one sample
per line.

A key that is absent or null is unknown, never zero. Unknown keys are ignored. Sizes are bytes,
times are seconds.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

from plimsoll_api.admin import Load, Parts
from plimsoll_api.decoding import Malformed, decode

SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_TRACE_LINE_BYTES = 4 << 20
"""Maximum length of a line: that of an engine's longest accepted answer. A file may be a gzip
bomb."""
_UNREADABLE = (OSError, EOFError, zlib.error)


class TraceError(ValueError):
    """A trace that cannot be read. The message names the file and the line."""


class EngineInfo(msgspec.Struct, omit_defaults=True):
    """The recorded engine; empty if unknown."""

    type: str
    version: str = ""
    model: str = ""


class Limits(msgspec.Struct):
    """Memory limits of the replica, in bytes; null if there is none."""

    host: int | None = None
    device: int | None = None


class TraceBudget(msgspec.Struct):
    """A leak budget: ``growth`` in bytes within ``window_s``."""

    growth: int
    window_s: float


class Budgets(msgspec.Struct, omit_defaults=True):
    """The leak budgets in force; null if there was none."""

    host: TraceBudget | None = None
    device: TraceBudget | None = None


class Header(msgspec.Struct, kw_only=True):
    """The first line. It does not say what is wrong with the run.

    With a ``shared_device``, others used the engine's devices too, and ``used`` includes their
    memory.
    """

    trace: int
    name: str
    engine: EngineInfo
    started_at: str
    interval_s: float
    limits: Limits = msgspec.field(default_factory=Limits)
    budget: Budgets = msgspec.field(default_factory=Budgets)
    warmup_s: float = 0.0
    shared_device: bool = False


class RoleRss(msgspec.Struct, omit_defaults=True):
    """Memory of one process. ``role`` is an external engine's name for it, or its role.

    ``in_use`` is what malloc and Python's objects hold, ``retained`` what malloc keeps unused; null
    if the process does not report them.
    """

    role: str
    rss_anon: int | None = None
    rss_shmem: int | None = None
    swap: int | None = None
    in_use: int | None = None
    retained: int | None = None

    @property
    def anonymous(self) -> int | None:
        """Anonymous memory, resident or swapped out; null if the resident part is unknown."""
        return None if self.rss_anon is None else self.rss_anon + (self.swap or 0)


class OpenFiles(msgspec.Struct):
    """Open file descriptors of the process closest to its limit.

    ``process`` is as in :class:`RoleRss`; ``limit`` is its soft limit, at least 1.
    """

    process: str
    open: int
    limit: int

    @property
    def ratio(self) -> float:
        """Share of the limit in use."""
        return self.open / self.limit


class Host(msgspec.Struct, omit_defaults=True):
    """Host memory of the engine's processes, in bytes.

    ``rss_*`` are sums over ``processes`` processes; zero if all known ones have ended.
    ``oom_kills`` counts the kernel's kills in their cgroup. ``frontend_lives`` is false if the
    process that the others end with has ended. ``cpu_s`` is the processor time of the others, in
    seconds since an arbitrary start.

    ``shm_orphan`` is shared memory that no living process holds, and ``shm_orphan_earlier`` the
    part of it from an earlier container of the engine. ``swap`` is the processes' memory in swap,
    and ``cgroup_swap`` that of their cgroup; no other figure includes them.

    ``hugetlb`` are huge pages of the node's pool. ``cgroup_kernel`` excludes reclaimable memory.
    ``cgroup_other`` is charged to the group but in no figure of the kernel's.
    ``cgroup_reclaimable`` is what the kernel reclaims before it kills. ``cgroup_throttled`` counts
    how often the cgroup exceeded ``memory.high``, which makes its processes wait.
    """

    rss_anon: int | None = None
    rss_file: int | None = None
    rss_shmem: int | None = None
    processes: int | None = None
    cgroup_current: int | None = None
    cgroup_anon: int | None = None
    cgroup_shmem: int | None = None
    cgroup_file: int | None = None
    cgroup_kernel: int | None = None
    cgroup_sock: int | None = None
    cgroup_other: int | None = None
    cgroup_reclaimable: int | None = None
    cgroup_limit: int | None = None
    cgroup_throttled: int | None = None
    hugetlb: int | None = None
    swap: int | None = None
    cgroup_swap: int | None = None
    shm_orphan: int | None = None
    shm_orphan_earlier: int | None = None
    oom_kills: int | None = None
    by_process: list[RoleRss] | None = None
    frontend_lives: bool | None = None
    cpu_s: float | None = None
    open_files: OpenFiles | None = None


class Malloc(msgspec.Struct, omit_defaults=True):
    """The worker's allocators, in bytes.

    ``in_use`` and ``retained`` come from ``mallinfo2``; ``py_blocks`` is a count.
    ``full_collections`` counts garbage collections of the oldest generation, in the process with
    the fewest.
    """

    in_use: int | None = None
    retained: int | None = None
    python_objects: int | None = None
    py_blocks: int | None = None
    full_collections: int | None = None


class Torch(msgspec.Struct, omit_defaults=True):
    """torch's allocator on one device, in bytes."""

    allocated: int | None = None
    reserved: int | None = None


class Device(msgspec.Struct, omit_defaults=True):
    """A device; ``used`` and ``total`` cover the whole device.

    ``shared`` gives the evidence that others use it; null if there is none.
    """

    index: int
    used: int | None = None
    total: int | None = None
    torch: Torch | None = None
    shared: str | None = None


SampleLoad = Load
"""Gauges, and counters since the start of the epoch, as the engine reports them."""


class LedgerLine(msgspec.Struct, omit_defaults=True):
    """An owner in the engine's ledger: bytes in use, and its maximum."""

    owner: str
    kind: str
    bytes: int
    bound: int | None = None


class Sample(msgspec.Struct, omit_defaults=True):
    """One observation, ``t`` seconds after the start. ``epoch`` grows at each engine restart.

    ``serving`` says whether the serving port answered (null if it was not asked, which is the rule
    while the status answers). ``ready`` is false while the engine reports that it starts, warms up
    or replaces its worker, and null in a state unknown to this version. ``load_age_s`` is the age
    of ``load`` if that is read at intervals. ``parts`` has an external engine's names of its
    processes.
    """

    t: float
    epoch: int
    host: Host = msgspec.field(default_factory=Host)
    malloc: Malloc | None = None
    device: list[Device] = []
    load: SampleLoad = msgspec.field(default_factory=SampleLoad)
    ledger: list[LedgerLine] | None = None
    scrape_ok: bool = True
    serving: bool | None = None
    ready: bool | None = None
    load_age_s: float | None = None
    parts: Parts | None = None


_encoder = msgspec.json.Encoder()


def open_for_writing(path: Path) -> IO[bytes]:
    """Open a trace for writing, compressed if its name ends in ``.gz``."""
    if path.name.endswith(".gz"):
        # No mtime: gzip's field ends in 2106, and a later clock would be an error.
        return cast("IO[bytes]", gzip.GzipFile(path, "wb", compresslevel=6, mtime=0))
    return path.open("wb")


def _open_for_reading(path: Path) -> IO[bytes]:
    if path.name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return path.open("rb")


def write_line(out: IO[bytes], line: Header | Sample) -> None:
    """Write one line of a trace. Raises OSError."""
    out.write(_encoder.encode(line) + b"\n")


def read(path: Path) -> tuple[Header, Iterator[Sample]]:
    """Read a trace: return its header, and an iterator over the samples.

    Raises :class:`TraceError`, which names the file and the unreadable line.
    """
    try:
        raw = _open_for_reading(path)
        first = raw.readline(MAX_TRACE_LINE_BYTES)
    except _UNREADABLE as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    try:
        header = decode(first, Header)
    except Malformed as error:
        raw.close()
        raise TraceError(f"{path}:1: not a trace header: {error}") from error
    if header.trace != 1:
        raw.close()
        raise TraceError(f"{path}:1: trace format {header.trace} is not supported, only 1 is")
    return header, _samples(path, raw)


def _samples(path: Path, raw: IO[bytes]) -> Iterator[Sample]:
    last = float("-inf")
    with raw:
        for number in itertools.count(2):
            try:
                line = raw.readline(MAX_TRACE_LINE_BYTES)
            except _UNREADABLE as error:
                raise TraceError(f"{path}: truncated: {error}") from error
            if not line:
                return
            if len(line) == MAX_TRACE_LINE_BYTES:
                raise TraceError(f"{path}:{number}: longer than {MAX_TRACE_LINE_BYTES >> 20} MiB")
            if not line.strip():
                continue
            try:
                sample = decode(line, Sample)
            except Malformed as error:
                raise TraceError(f"{path}:{number}: not a sample: {error}") from error
            if sample.t <= last:
                raise TraceError(f"{path}:{number}: t={sample.t} does not increase (was {last})")
            last = sample.t
            yield sample
