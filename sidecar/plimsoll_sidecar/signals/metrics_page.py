"""Read selected metrics from the Prometheus text page of another program.

Lines are selected by name before they are parsed. An engine's page has a thousand lines and only a
dozen matter; parsing all of them would cost more than the rest of a sample.

A page has a line for each engine, rank, mode and outcome, and which of them add up differs between
metrics. :class:`Series` describes how the lines of one metric combine, and :func:`make_page_reader`
applies it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

MAX_VALUE = 2.0**53
"""Largest accepted value.

Integers are exact below it, and as MiB they still fit into 64 bits of bytes.
"""
MAX_LINE_BYTES = 16 << 10
"""Maximum number of bytes of one sample.

Known engines and exporters write less than 1 KiB. The memory for matching grows with the labels.
"""
MAX_LINES = 4096
"""Maximum number of lines of one metric. An engine with 64 ranks has fewer than 1,000."""
_LABELS = rb'((?:[^"}\n]|"(?:[^"\\\n]|\\.)*+")*+)'
"""Pattern for labels up to the closing brace. Quoted values may contain any character."""
_NAME_PATTERN = re.compile(
    rb'^(?:\{"([a-zA-Z_:][a-zA-Z0-9_:]{0,255}+)"|([a-zA-Z_:][a-zA-Z0-9_:]{0,255}+)(?=[{ \t]))', re.M
)
_AFTER_NAME_PATTERN = re.compile(rb"(?:\{" + _LABELS + rb"\})?[ \t]+(\S+)")
_AFTER_QUOTED_PATTERN = re.compile(rb",?" + _LABELS + rb"\}[ \t]+(\S+)")
_LABEL_PATTERN = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\.)*+)"')
_RANK_LABEL_PATTERN = re.compile(
    r"(?:(?:attn|moe)_)?(?:tp|pp|cp|ep|sp|dcp|pcp)_rank"
    r"|(?:tensor|pipeline|context|expert|sequence)_parallel_rank"
)
"""Labels of ranks that work on the same requests, so that each rank reports all requests."""
_REPLICA_LABEL_PATTERN = re.compile(
    r"engine|(?:(?:attn|moe)_)?dp_rank|data_parallel_rank|engine_type|ReplicaId|WorkerId|pid"
)
"""Labels of parts of an engine that have their own requests and their own KV cache."""

Samples = Callable[[bytes], Iterator[tuple[str, bytes | None, float]]]


def make_sample_reader(names: Iterable[str]) -> Samples:
    """Return a function that yields name, labels as written and value of each sample on a page.

    It yields only samples of ``names``. The name may precede the braces, or be their first, quoted
    element. A value that is not a number is NaN. A malformed line, or one that is too long, has the
    labels None and the value NaN.
    """
    wanted = {name.encode(): name for name in names}

    def read(page: bytes) -> Iterator[tuple[str, bytes | None, float]]:
        for begin in _NAME_PATTERN.finditer(page):
            name = wanted.get(begin[1] or begin[2])
            if name is None:
                continue
            found = None
            end = page.find(b"\n", begin.end(), begin.start() + MAX_LINE_BYTES + 1)
            if end < 0:
                end = min(len(page), begin.start() + MAX_LINE_BYTES + 1)
            if end - begin.start() <= MAX_LINE_BYTES:
                rest = _AFTER_NAME_PATTERN if begin[2] is not None else _AFTER_QUOTED_PATTERN
                found = rest.match(page, begin.end(), end)
            if found is None:
                yield name, None, math.nan
            else:
                yield name, found[1] or b"", _parse_number(found[2])

    return read


class Kind(StrEnum):
    """Kind of a metric, which determines how several lines are combined."""

    GAUGE = "gauge"
    """A current value. Values of parts with their own requests add up."""
    COUNTER = "counter"
    """A count since a start.

    Values add up as for a gauge. The last values of parts that are absent from the page are kept.
    """
    RATIO = "ratio"
    """A share of a pool, from 0 to 1. The result is the mean, weighted by pool size."""


@dataclass(frozen=True)
class Series:
    """One metric of a page.

    Attributes:
        name: The complete sample name in the newest version of the program, such as ``…_total`` or
            a histogram's ``…_count``.
        older_names: The sample names in earlier versions.
        only_label: A label and its value. Only lines with this label count; None accepts all lines.
        total: A label whose empty value marks the line that sums up the others.
        pool: The gauge with the size of a ratio's pool.
        pool_label: The label of that gauge that contains the size; empty if the size is its value.

    """

    name: str
    kind: Kind = Kind.GAUGE
    older_names: tuple[str, ...] = ()
    only_label: tuple[str, str] | None = None
    total: str = ""
    pool: str = ""
    pool_label: str = ""

    def names(self) -> Iterator[str]:
        """Yield the names that the metric may have on a page, the most likely one first."""
        for name in (self.name, *self.older_names):
            yield from iterate_spellings(name)


def iterate_spellings(name: str) -> Iterator[str]:
    """Yield ``name`` in the spellings of different programs.

    Ray and routers replace the colon with an underscore, and Ray adds a prefix. Older exporters
    keep the colon. Programs without OpenMetrics omit ``_total``.
    """
    for ended in dict.fromkeys((name, name.removesuffix("_total"))):
        for prefix in ("", "ray_"):
            for written in dict.fromkeys((ended, ended.replace(":", "_"))):
                yield prefix + written


def make_created_name(name: str) -> str:
    """Return the name of the sample with the start time of the counter ``name``."""
    return name.removesuffix("_total") + "_created"


class PoolRatio(float):
    """A ratio over all pools.

    If the pools have unknown sizes and different ratios, the value is the largest ratio and
    ``least`` the smallest one. The mean is somewhere between them.
    """

    least: float

    def __new__(cls, value: float, least: float | None = None) -> PoolRatio:
        """Create a ratio. Without ``least``, the value is exact."""
        found = super().__new__(cls, value)
        found.least = value if least is None else least
        return found


Labels = frozenset[tuple[str, str]]
Lines = dict[Labels, float]
"""Values by labels; NaN if a value is unknown."""
MALFORMED_LABELS: Labels = frozenset({("", "")})
"""Placeholder for labels that cannot be parsed. Such a line may be any line of the metric."""
PROCESS_START_METRIC = "process_start_time_seconds"
"""Metric with the start time of a process, in Unix seconds."""


class Page:
    """Selected lines of one page, by metric name."""

    def __init__(self, lines: dict[str, Lines]) -> None:
        self.lines = lines

    def value(self, series: Series) -> float | None:
        """Return the metric's value; None if the page does not have the metric.

        Also return None if one of the metric's lines has an impossible value for a count, ratio or
        size, because the sum of the other lines would be wrong.
        """
        found = self._find_lines(series)
        if series.only_label is not None:
            line_count = len(found)
            found = {
                labels: value
                for labels, value in found.items()
                if series.only_label in labels or labels == MALFORMED_LABELS
            }
            if series.kind is Kind.COUNTER and len(found) == line_count:
                # With Ray, vLLM 0.11 counts every request under its last known outcome.
                return None
        if not found or len(found) > MAX_LINES:
            return None
        most = 1.0 if series.kind is Kind.RATIO else MAX_VALUE
        if not all(0.0 <= value <= most for value in found.values()):
            return None
        parts = _merge_ranks(found, series.total)
        if series.kind is not Kind.RATIO:
            return math.fsum(parts.values())
        return self._compute_weighted_ratio(parts, series)

    def has_series(self, series: Series) -> bool:
        """Report whether the page has a line with this name, with any value."""
        return bool(self._find_lines(series))

    def counters(self, series_list: Iterable[Series]) -> dict[tuple[str, Labels], float]:
        """Return each line of the counters in ``series_list``.

        A value that no counter can have is NaN.
        """
        return {
            (name, labels): value if 0.0 <= value < MAX_VALUE else math.nan
            for series in series_list
            if series.kind is Kind.COUNTER and (name := self._name(series)) is not None
            for labels, value in self.lines[name].items()
        }

    def read_start_times(self, series_list: Iterable[Series]) -> dict[tuple[str, Labels], float]:
        """Return the start times of the process and of each counter, in Unix seconds."""
        names = [
            PROCESS_START_METRIC,
            *(make_created_name(name) for one in series_list for name in one.names()),
        ]
        return {
            (name, labels): value
            for name in names
            for labels, value in self.lines.get(name, {}).items()
            if 0.0 <= value < MAX_VALUE
        }

    def add_absent_counters(self, counters: Mapping[tuple[str, Labels], float]) -> None:
        """Add the last values of counters that are absent from the page."""
        for (name, labels), value in counters.items():
            if name in self.lines and len(self.lines[name]) < MAX_LINES:
                self.lines[name].setdefault(labels, value)

    def _name(self, series: Series) -> str | None:
        return next((name for name in series.names() if name in self.lines), None)

    def _find_lines(self, series: Series) -> Lines:
        name = self._name(series)
        return self.lines[name] if name is not None else {}

    def _compute_weighted_ratio(self, parts: Lines, series: Series) -> PoolRatio:
        least, most = min(parts.values()), max(parts.values())
        if least == most:
            return PoolRatio(most)
        sizes = self._read_pool_sizes(series)
        places = [_select_replica_labels(labels) for labels in parts]
        if len(set(places)) < len(places) or not all(sizes.get(place) for place in places):
            return PoolRatio(most, least)
        weights = [sizes[place] for place in places]
        held = math.fsum(w * share for w, share in zip(weights, parts.values(), strict=True))
        return PoolRatio(held / math.fsum(weights))

    def _read_pool_sizes(self, series: Series) -> Mapping[Labels, float]:
        """Return the size of each pool. Pools with more than one size are omitted."""
        if not series.pool:
            return {}
        lines = self._find_lines(Series(series.pool))
        if series.pool_label:
            lines = {labels: _parse_label_number(labels, series.pool_label) for labels in lines}
        sizes: dict[Labels, float] = {}
        for labels, size in _merge_ranks(lines, "").items():
            place = _select_replica_labels(labels)
            sizes[place] = math.nan if place in sizes else size
        return {place: size for place, size in sizes.items() if 0.0 < size < MAX_VALUE}


def make_page_reader(series_list: Iterable[Series]) -> Callable[[bytes], Page]:
    """Return a function that reads the lines of the metrics ``series_list`` from a page."""
    wanted = tuple(series_list)
    names = {name for series in wanted for name in series.names()}
    names |= {name for series in wanted if series.pool for name in iterate_spellings(series.pool)}
    names |= {PROCESS_START_METRIC, *(make_created_name(name) for name in names)}
    read_samples = make_sample_reader(names)

    def read(page: bytes) -> Page:
        lines: dict[str, Lines] = {}
        for name, written, value in read_samples(page):
            known = lines.setdefault(name, {})
            if len(known) > MAX_LINES:
                continue
            labels = _parse_labels(written) if written is not None else MALFORMED_LABELS
            # If a line occurs twice, it is unknown which one is right.
            known[labels] = math.nan if labels in known else value
        return Page(lines)

    return read


def _merge_ranks(lines: Lines, total: str) -> Lines:
    """Return one value for each part that has its own requests.

    The ranks of a part report the same requests, at slightly different times. The largest value is
    used.
    """
    if total:
        sums = {labels - {(total, "")} for labels in lines if (total, "") in labels}
        lines = {
            labels: value
            for labels, value in lines.items()
            if (total, "") in labels or _remove_labels(labels, {total}) not in sums
        }
    parts: Lines = {}
    for labels, value in lines.items():
        part = frozenset(one for one in labels if not _RANK_LABEL_PATTERN.fullmatch(one[0]))
        parts[part] = max(value, parts.get(part, value))
    return parts


def _select_replica_labels(labels: Labels) -> Labels:
    return frozenset(one for one in labels if _REPLICA_LABEL_PATTERN.fullmatch(one[0]))


def _remove_labels(labels: Labels, names: set[str]) -> Labels:
    return frozenset(one for one in labels if one[0] not in names)


def _parse_label_number(labels: Labels, name: str) -> float:
    return next(
        (_parse_number(value.encode()) for label, value in labels if label == name), math.nan
    )


def _parse_labels(written: bytes) -> Labels:
    return frozenset(
        (name.decode(), value.decode(errors="replace"))
        for name, value in _LABEL_PATTERN.findall(written)
    )


def _parse_number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
