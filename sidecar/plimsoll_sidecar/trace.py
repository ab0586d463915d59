"""One sample of an engine, and the trace that is made of samples.

The sampler makes a :class:`Sample` each interval, the detector consumes it, ``plimsoll record``
writes it and ``plimsoll replay`` reads it: live and replay differ in the clock and the source only.
The format is JSON Lines, UTF-8, optionally gzip: one :class:`Header`, then one sample a line.

A key that is absent or null is unknown, never zero. Unknown keys are ignored. Sizes are bytes,
times are seconds.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

SUFFIXES = (".jsonl", ".jsonl.gz")


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file and the line."""


class EngineInfo(msgspec.Struct, omit_defaults=True):
    type: str
    version: str = ""
    model: str = ""


class Limits(msgspec.Struct):
    host: int | None = None
    device: int | None = None


class TraceBudget(msgspec.Struct):
    growth: int
    window_s: float


class Budgets(msgspec.Struct, omit_defaults=True):
    host: TraceBudget | None = None
    device: TraceBudget | None = None


class Header(msgspec.Struct, kw_only=True):
    """The first line. It says nothing about what is wrong with the run."""

    trace: int
    name: str
    engine: EngineInfo
    started_at: str
    interval_s: float
    limits: Limits = msgspec.field(default_factory=Limits)
    budget: Budgets = msgspec.field(default_factory=Budgets)
    warmup_s: float = 0.0


class RoleRss(msgspec.Struct, omit_defaults=True):
    role: str
    rss_anon: int | None = None
    rss_shmem: int | None = None


class Host(msgspec.Struct, omit_defaults=True):
    """Host memory; ``rss_*`` are sums over the engine's processes (``processes`` of them, zero
    where all that were known have ended). ``oom_kills`` counts the kernel's kills in their
    group."""

    rss_anon: int | None = None
    rss_file: int | None = None
    rss_shmem: int | None = None
    processes: int | None = None
    cgroup_current: int | None = None
    cgroup_anon: int | None = None
    cgroup_shmem: int | None = None
    cgroup_file: int | None = None
    oom_kills: int | None = None
    by_process: list[RoleRss] | None = None


class Malloc(msgspec.Struct, omit_defaults=True):
    """The worker's allocator: ``mallinfo2`` in bytes, ``py_blocks`` a count. ``full_collections``
    counts those of the oldest generation, in the process that has had the fewest."""

    in_use: int | None = None
    retained: int | None = None
    python_objects: int | None = None
    py_blocks: int | None = None
    full_collections: int | None = None


class Torch(msgspec.Struct, omit_defaults=True):
    allocated: int | None = None
    reserved: int | None = None


class Device(msgspec.Struct, omit_defaults=True):
    """One device; ``used`` and ``total`` are of the whole device."""

    index: int
    used: int | None = None
    total: int | None = None
    torch: Torch | None = None


class SampleLoad(msgspec.Struct, omit_defaults=True):
    """Gauges, and counters since the epoch began."""

    running: int | None = None
    waiting: int | None = None
    inflight: int | None = None
    requests_total: int | None = None
    aborted_total: int | None = None
    errors_total: int | None = None
    images_total: int | None = None
    audios_total: int | None = None
    distinct_prompts_total: int | None = None
    adapters_total: int | None = None
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    steps_total: int | None = None
    preemptions_total: int | None = None
    kv_usage_ratio: float | None = None
    kv_lost_ratio: float | None = None
    encoder_lost_ratio: float | None = None


class LedgerLine(msgspec.Struct, omit_defaults=True):
    owner: str
    kind: str
    bytes: int
    bound: int | None = None


class Sample(msgspec.Struct, omit_defaults=True):
    """What was seen at ``t`` seconds since the start. ``epoch`` grows at each engine restart.

    ``serving`` says whether the serving port answered anything when the status did not (null where
    it was not asked). ``ready`` is false while the engine says that it starts, warms up or replaces
    its worker.
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


_encoder = msgspec.json.Encoder()
_header = msgspec.json.Decoder(Header)
_sample = msgspec.json.Decoder(Sample)


def open_for_writing(path: Path) -> IO[bytes]:
    """Opens a trace for writing; the suffix decides on compression."""
    if path.name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path, "wb", compresslevel=6))
    return path.open("wb")


def _open_for_reading(path: Path) -> IO[bytes]:
    if path.name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return path.open("rb")


def write_line(out: IO[bytes], line: Header | Sample) -> None:
    out.write(_encoder.encode(line) + b"\n")


def read(path: Path) -> tuple[Header, Iterator[Sample]]:
    """The header and the samples of a trace, read as they are asked for.

    Raises :class:`TraceError` with the file and the line that cannot be read.
    """
    try:
        raw = _open_for_reading(path)
        first = raw.readline()
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    try:
        header = _header.decode(first)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raw.close()
        raise TraceError(f"{path}:1: not a trace header: {error}") from error
    if header.trace != 1:
        raw.close()
        raise TraceError(f"{path}:1: trace format {header.trace} is not supported, only 1 is")
    return header, _samples(path, raw)


def _samples(path: Path, raw: IO[bytes]) -> Iterator[Sample]:
    last = float("-inf")
    with raw:
        lines = enumerate(raw, start=2)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except (OSError, EOFError) as error:
                raise TraceError(f"{path}: ends in the middle: {error}") from error
            if not line.strip():
                continue
            try:
                sample = _sample.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise TraceError(f"{path}:{number}: not a sample: {error}") from error
            if sample.t <= last:
                raise TraceError(f"{path}:{number}: t={sample.t} does not increase (was {last})")
            last = sample.t
            yield sample
