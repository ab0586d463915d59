"""Reads selected metrics from the Prometheus text page of another program.

Lines are selected by name before they are parsed. An engine's page has a thousand lines and only a
dozen matter; parsing all of them would cost more than the rest of a sample.

A page has a line for each engine, rank, mode and outcome, and which of them add up differs between
metrics. :class:`Series` describes how the lines of one metric combine, and :func:`page_reader`
applies it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

MAX_VALUE = 2.0**53
"""Largest accepted value: whole numbers are exact below it, and as MiB it still fits into 64 bits
of bytes."""
MAX_LINE_BYTES = 16 << 10
"""Maximum number of bytes of one sample. Known engines and exporters write less than 1 KiB; the
memory for matching grows with the labels."""
MAX_LINES = 4096
"""Maximum number of lines of one metric; an engine with 64 ranks has fewer than 1,000."""
_LABELS = rb'((?:[^"}\n]|"(?:[^"\\\n]|\\.)*+")*+)'
"""Matches labels up to the closing brace; quoted values may contain any character."""
_NAME = re.compile(
    rb'^(?:\{"([a-zA-Z_:][a-zA-Z0-9_:]{0,255}+)"|([a-zA-Z_:][a-zA-Z0-9_:]{0,255}+)(?=[{ \t]))', re.M
)
_AFTER_NAME = re.compile(rb"(?:\{" + _LABELS + rb"\})?[ \t]+(\S+)")
_AFTER_QUOTED = re.compile(rb",?" + _LABELS + rb"\}[ \t]+(\S+)")
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\.)*+)"')
_RANK = re.compile(
    r"(?:(?:attn|moe)_)?(?:tp|pp|cp|ep|sp|dcp|pcp)_rank"
    r"|(?:tensor|pipeline|context|expert|sequence)_parallel_rank"
)
"""Labels of ranks that work on the same requests, so that each of them reports all requests."""
_REPLICA = re.compile(
    r"engine|(?:(?:attn|moe)_)?dp_rank|data_parallel_rank|engine_type|ReplicaId|WorkerId|pid"
)
"""Labels of parts of an engine with their own requests and their own KV cache."""

Samples = Callable[[bytes], Iterator[tuple[str, bytes | None, float]]]


def sample_reader(names: Iterable[str]) -> Samples:
    """Return a function that yields name, labels as written and value of the samples on a page.

    It yields samples of ``names`` only. The name may precede the braces, or be their first, quoted
    element. A value that is not a number is NaN. A malformed or too long line has the labels None
    and the value NaN.
    """
    wanted = {name.encode(): name for name in names}

    def read(page: bytes) -> Iterator[tuple[str, bytes | None, float]]:
        for begin in _NAME.finditer(page):
            name = wanted.get(begin[1] or begin[2])
            if name is None:
                continue
            found = None
            end = page.find(b"\n", begin.end(), begin.start() + MAX_LINE_BYTES + 1)
            if end < 0:
                end = min(len(page), begin.start() + MAX_LINE_BYTES + 1)
            if end - begin.start() <= MAX_LINE_BYTES:
                rest = _AFTER_NAME if begin[2] is not None else _AFTER_QUOTED
                found = rest.match(page, begin.end(), end)
            if found is None:
                yield name, None, math.nan
            else:
                yield name, found[1] or b"", _parse_number(found[2])

    return read


class Kind(StrEnum):
    """The kind of a figure, which determines how several lines combine."""

    GAUGE = "gauge"
    """A current value; values of parts with their own requests add up."""
    COUNTER = "counter"
    """A count since a start; it adds up like a gauge, and the counts of parts that have left the
    page remain."""
    RATIO = "ratio"
    """A share of a pool, from 0 to 1; the result is the mean weighted by pool size."""


@dataclass(frozen=True)
class Series:
    """One figure of a page.

    ``name`` is the complete sample name in the newest version, such as ``…_total`` or a histogram's
    ``…_count``. ``older_names`` are its names in earlier versions. ``only_label`` is a label and
    its value: only lines with it count; None accepts all lines. ``total`` is a label whose empty
    value marks the line that sums up the others. ``pool`` is the size of a ratio's pool: the value
    of that gauge, or with ``pool_label`` the number in that label of it.
    """

    name: str
    kind: Kind = Kind.GAUGE
    older_names: tuple[str, ...] = ()
    only_label: tuple[str, str] | None = None
    total: str = ""
    pool: str = ""
    pool_label: str = ""

    def names(self) -> Iterator[str]:
        """Yield the names that the figure may have on a page, the most likely one first."""
        for name in (self.name, *self.older_names):
            yield from spellings(name)


def spellings(name: str) -> Iterator[str]:
    """Yield ``name`` as different programs write it.

    Ray and routers replace the colon with an underscore, and Ray adds a prefix. Older exporters
    keep the colon. Programs without OpenMetrics omit ``_total``.
    """
    for ended in dict.fromkeys((name, name.removesuffix("_total"))):
        for prefix in ("", "ray_"):
            for written in dict.fromkeys((ended, ended.replace(":", "_"))):
                yield prefix + written


def created_name(name: str) -> str:
    """Return the name of the sample with the start time of the counter ``name``."""
    return name.removesuffix("_total") + "_created"


class PoolRatio(float):
    """A ratio over all pools.

    If the pools' sizes are unknown and their ratios differ, the value is the largest ratio and
    ``least`` the smallest: the mean lies between them.
    """

    least: float

    def __new__(cls, value: float, least: float | None = None) -> PoolRatio:
        """Create a ratio; without ``least``, it is exact."""
        found = super().__new__(cls, value)
        found.least = value if least is None else least
        return found


Labels = frozenset[tuple[str, str]]
Lines = dict[Labels, float]
"""Value by labels; NaN if the value is unknown."""
MALFORMED: Labels = frozenset({("", "")})
"""Replaces labels that cannot be read: the line may be any line of the metric."""
PROCESS_START = "process_start_time_seconds"
"""Metric with the start time of a process, in Unix seconds."""


class Page:
    """The selected lines of one page, by metric name."""

    def __init__(self, lines: dict[str, Lines]) -> None:
        self.lines = lines

    def value(self, series: Series) -> float | None:
        """Return the figure; None if the page does not have it.

        It is also None if one of its lines has a value that is impossible for a count, ratio or
        size: the sum of the other lines would be wrong.
        """
        found = self._lines(series)
        if series.only_label is not None:
            every = len(found)
            found = {
                labels: value
                for labels, value in found.items()
                if series.only_label in labels or labels == MALFORMED
            }
            if series.kind is Kind.COUNTER and len(found) == every:
                # With Ray, vLLM 0.11 counts every request under its last known outcome.
                return None
        if not found or len(found) > MAX_LINES:
            return None
        most = 1.0 if series.kind is Kind.RATIO else MAX_VALUE
        if not all(0.0 <= value <= most for value in found.values()):
            return None
        parts = _values_by_part(found, series.total)
        if series.kind is not Kind.RATIO:
            return math.fsum(parts.values())
        return self._weighted_ratio(parts, series)

    def has(self, series: Series) -> bool:
        """Report whether the page has a line with this name, with any value."""
        return bool(self._lines(series))

    def counters(self, every: Iterable[Series]) -> dict[tuple[str, Labels], float]:
        """Return each line of the counters in ``every``.

        NaN for values that no counter can have.
        """
        return {
            (name, labels): value if 0.0 <= value < MAX_VALUE else math.nan
            for series in every
            if series.kind is Kind.COUNTER and (name := self._name(series)) is not None
            for labels, value in self.lines[name].items()
        }

    def start_times(self, every: Iterable[Series]) -> dict[tuple[str, Labels], float]:
        """Return the start times of the process and of each counter, in Unix seconds."""
        names = [PROCESS_START, *(created_name(name) for one in every for name in one.names())]
        return {
            (name, labels): value
            for name in names
            for labels, value in self.lines.get(name, {}).items()
            if 0.0 <= value < MAX_VALUE
        }

    def keep_departed(self, counters: Mapping[tuple[str, Labels], float]) -> None:
        """Add the last values of counters whose part has left the page: its work still counts."""
        for (name, labels), value in counters.items():
            if name in self.lines and len(self.lines[name]) < MAX_LINES:
                self.lines[name].setdefault(labels, value)

    def _name(self, series: Series) -> str | None:
        return next((name for name in series.names() if name in self.lines), None)

    def _lines(self, series: Series) -> Lines:
        name = self._name(series)
        return self.lines[name] if name is not None else {}

    def _weighted_ratio(self, parts: Lines, series: Series) -> PoolRatio:
        least, most = min(parts.values()), max(parts.values())
        if least == most:
            return PoolRatio(most)
        sizes = self._pool_sizes(series)
        places = [_replica_labels(labels) for labels in parts]
        if len(set(places)) < len(places) or not all(sizes.get(place) for place in places):
            return PoolRatio(most, least)
        weights = [sizes[place] for place in places]
        held = math.fsum(w * share for w, share in zip(weights, parts.values(), strict=True))
        return PoolRatio(held / math.fsum(weights))

    def _pool_sizes(self, series: Series) -> Mapping[Labels, float]:
        """Return the size of each pool; pools with more than one size are omitted."""
        if not series.pool:
            return {}
        lines = self._lines(Series(series.pool))
        if series.pool_label:
            lines = {labels: _label_number(labels, series.pool_label) for labels in lines}
        sizes: dict[Labels, float] = {}
        for labels, size in _values_by_part(lines, "").items():
            place = _replica_labels(labels)
            sizes[place] = math.nan if place in sizes else size
        return {place: size for place, size in sizes.items() if 0.0 < size < MAX_VALUE}


def page_reader(every: Iterable[Series]) -> Callable[[bytes], Page]:
    """Return a function that reads the lines of the series from a page."""
    wanted = tuple(every)
    names = {name for series in wanted for name in series.names()}
    names |= {name for series in wanted if series.pool for name in spellings(series.pool)}
    names |= {PROCESS_START, *(created_name(name) for name in names)}
    read_samples = sample_reader(names)

    def read(page: bytes) -> Page:
        lines: dict[str, Lines] = {}
        for name, written, value in read_samples(page):
            known = lines.setdefault(name, {})
            if len(known) > MAX_LINES:
                continue
            labels = _parse_labels(written) if written is not None else MALFORMED
            # If a line is there twice, it is unknown which one is right.
            known[labels] = math.nan if labels in known else value
        return Page(lines)

    return read


def _values_by_part(lines: Lines, total: str) -> Lines:
    """Return one value for each part that has its own requests, whose ranks report the same.

    Ranks that report at slightly different times differ; the largest value is used.
    """
    if total:
        sums = {labels - {(total, "")} for labels in lines if (total, "") in labels}
        lines = {
            labels: value
            for labels, value in lines.items()
            if (total, "") in labels or _without_labels(labels, {total}) not in sums
        }
    parts: Lines = {}
    for labels, value in lines.items():
        part = frozenset(one for one in labels if not _RANK.fullmatch(one[0]))
        parts[part] = max(value, parts.get(part, value))
    return parts


def _replica_labels(labels: Labels) -> Labels:
    return frozenset(one for one in labels if _REPLICA.fullmatch(one[0]))


def _without_labels(labels: Labels, names: set[str]) -> Labels:
    return frozenset(one for one in labels if one[0] not in names)


def _label_number(labels: Labels, name: str) -> float:
    return next(
        (_parse_number(value.encode()) for label, value in labels if label == name), math.nan
    )


def _parse_labels(written: bytes) -> Labels:
    return frozenset(
        (name.decode(), value.decode(errors="replace")) for name, value in _LABEL.findall(written)
    )


def _parse_number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
