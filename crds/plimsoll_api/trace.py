"""Samples of an engine, and traces of samples.

The format is JSON Lines in UTF-8, optionally compressed with gzip: one :class:`Header`, then one
:class:`Sample` per line. A key that is absent or null is unknown, never zero. Sizes are in bytes,
times in seconds.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

from plimsoll_api.admin import Load, ProcessNames
from plimsoll_api.decoding import MalformedError, decode

TRACE_SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_TRACE_LINE_BYTES = 4 << 20
"""Maximum length of a line, which limits the memory for decompressing a gzip bomb."""
_READ_ERRORS = (OSError, EOFError, zlib.error)


class TraceError(ValueError):
    """Raised for an unreadable trace; the message names the file and the line."""


class EngineInfo(msgspec.Struct, omit_defaults=True):
    """Engine that was recorded; fields are empty if unknown."""

    type: str
    version: str = ""
    model: str = ""


class Limits(msgspec.Struct):
    """Memory limits of the replica, in bytes; null if there is none."""

    host: int | None = None
    device: int | None = None


class TraceBudget(msgspec.Struct):
    """Leak budget: ``growth`` in bytes within ``window_s`` seconds."""

    growth: int
    window_s: float


class Budgets(msgspec.Struct, omit_defaults=True):
    """Leak budgets during the recording; null if there was none."""

    host: TraceBudget | None = None
    device: TraceBudget | None = None


class Header(msgspec.Struct, kw_only=True):
    """First line of a trace: what was recorded, with which limits and budgets.

    ``shared_device`` is whether other programs also used the engine's devices; ``used`` then
    includes their memory.
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
    """Memory of one process in bytes. Unknown values are null.

    Attributes:
        role: The role of the process in Plimsoll's engine, or an external engine's name for it.
        in_use: The memory that malloc has allocated, plus the memory of Python's objects.
        retained: The free memory that malloc keeps.

    """

    role: str
    rss_anon: int | None = None
    rss_shmem: int | None = None
    swap: int | None = None
    in_use: int | None = None
    retained: int | None = None

    @property
    def anonymous(self) -> int | None:
        """Anonymous memory, including swap; None if the resident part is unknown."""
        return None if self.rss_anon is None else self.rss_anon + (self.swap or 0)


class OpenFiles(msgspec.Struct):
    """Open file descriptors of the process that is closest to its limit.

    ``process`` is its name or role. ``limit`` is the soft limit, at least 1.
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

    Attributes:
        rss_anon, rss_file, rss_shmem: Resident memory of all processes together; zero if all have
            exited.
        processes: The number of processes.
        cgroup_kernel: Kernel memory, without reclaimable memory.
        cgroup_other: Memory that is charged to the cgroup, but belongs to none of the kernel's
            categories.
        cgroup_reclaimable: Memory that the kernel reclaims before an OOM kill.
        cgroup_throttled: How often the cgroup exceeded ``memory.high``, which throttles its
            processes.
        hugetlb: Huge pages from the node's pool.
        swap, cgroup_swap: Memory in swap, of the processes and of their cgroup. No other field
            includes memory in swap.
        shm_orphan: Shared memory that no running process holds.
        shm_orphan_earlier: The part of ``shm_orphan`` that an earlier container of the engine left.
        oom_kills: The kernel's OOM kills in the cgroup.
        frontend_lives: Whether the main process is running. The other processes depend on it.
        cpu_s: The CPU time of all processes except the main process, in seconds. Only differences
            are meaningful.

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
    """State of the worker's allocators, in bytes.

    Attributes:
        in_use, retained: Allocated memory, and free memory that malloc keeps, by ``mallinfo2``.
        python_objects: The memory of Python's objects.
        py_blocks: The number of pymalloc blocks.
        full_collections: The number of garbage collections of the oldest generation. If the worker
            has several processes, this is the lowest of their numbers.

    """

    in_use: int | None = None
    retained: int | None = None
    python_objects: int | None = None
    py_blocks: int | None = None
    full_collections: int | None = None


class Torch(msgspec.Struct, omit_defaults=True):
    """Memory in PyTorch's allocator on one device, in bytes."""

    allocated: int | None = None
    reserved: int | None = None


class Device(msgspec.Struct, omit_defaults=True):
    """Memory of one device in bytes; ``used`` and ``total`` cover the whole device.

    ``shared`` is the evidence that other programs use the device; null if there is none.
    """

    index: int
    used: int | None = None
    total: int | None = None
    torch: Torch | None = None
    shared: str | None = None


SampleLoad = Load
"""Gauges, and counters since the start of the epoch, as the engine reports them."""


class LedgerLine(msgspec.Struct, omit_defaults=True):
    """Line of the engine's ledger: the bytes that an owner uses, and the most that it can use."""

    owner: str
    kind: str
    bytes: int
    bound: int | None = None


class Sample(msgspec.Struct, omit_defaults=True):
    """One observation of an engine.

    Attributes:
        t: The time in seconds since the start of the trace or of the supervisor.
        epoch: A number that increases at each engine restart.
        serving: Whether the serving port responded; null if it was not queried.
        ready: False while the engine reports that it starts, warms up or replaces its worker; null
            if the engine's state is unknown.
        load_age_s: The age of ``load``; null if ``load`` is current.
        parts: An external engine's names for its processes.

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
    parts: ProcessNames | None = None


_encoder = msgspec.json.Encoder()


def open_for_writing(path: Path) -> IO[bytes]:
    """Open a trace for writing, compressed if its name ends with ``.gz``. Raises OSError."""
    if path.name.endswith(".gz"):
        # Write no mtime: gzip's field ends in 2106, and a later clock would raise an error.
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
    """Return the header of a trace and an iterator over its samples.

    Both raise :class:`TraceError`.
    """
    try:
        raw = _open_for_reading(path)
        first = raw.readline(MAX_TRACE_LINE_BYTES)
    except _READ_ERRORS as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot read the trace: {reason}") from error
    try:
        header = decode(first, Header)
    except MalformedError as error:
        raw.close()
        raise TraceError(f"{path}:1: the first line is not a trace header: {error}") from error
    if header.trace != 1:
        raw.close()
        raise TraceError(
            f"{path}:1: trace format {header.trace} is not supported: the supported format is 1"
        )
    return header, _iterate_samples(path, raw)


def _iterate_samples(path: Path, raw: IO[bytes]) -> Iterator[Sample]:
    last = float("-inf")
    with raw:
        for number in itertools.count(2):
            try:
                line = raw.readline(MAX_TRACE_LINE_BYTES)
            except _READ_ERRORS as error:
                raise TraceError(f"{path}: the trace is incomplete: {error}") from error
            if not line:
                return
            if len(line) == MAX_TRACE_LINE_BYTES:
                raise TraceError(
                    f"{path}:{number}: the line is longer than {MAX_TRACE_LINE_BYTES >> 20} MiB"
                )
            if not line.strip():
                continue
            try:
                sample = decode(line, Sample)
            except MalformedError as error:
                raise TraceError(
                    f"{path}:{number}: the line is not a valid sample: {error}"
                ) from error
            if sample.t <= last:
                raise TraceError(
                    f"{path}:{number}: t={sample.t} must be later than t={last} in the previous"
                    " line"
                )
            last = sample.t
            yield sample
