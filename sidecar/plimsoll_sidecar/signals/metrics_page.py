"""Read selected metrics from the Prometheus text page of another program.

Lines are selected by name before they are parsed: an engine's page has a thousand lines, of which
only a dozen matter. :class:`Series` describes how to combine the lines of one metric.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

# Smaller integers are exact, and as MiB they fit into 64 bits of bytes.
MAX_METRIC_VALUE = 2.0**53
# Limits the memory for matching labels. Known engines and exporters write less than 1 KiB.
MAX_LINE_BYTES = 16 << 10
# An engine with 64 ranks has fewer than 1,000.
MAX_METRIC_LINES = 4096
# Quoted values may contain any character.
_LABELS_PATTERN = rb'((?:[^"}\n]|"(?:[^"\\\n]|\\.)*+")*+)'
_NAME_PATTERN = re.compile(
    rb'^(?:\{"([a-zA-Z_:][a-zA-Z0-9_:]{0,255}+)"|([a-zA-Z_:][a-zA-Z0-9_:]{0,255}+)(?=[{ \t]))', re.M
)
_AFTER_NAME_PATTERN = re.compile(rb"(?:\{" + _LABELS_PATTERN + rb"\})?[ \t]+(\S+)")
_AFTER_QUOTED_PATTERN = re.compile(rb",?" + _LABELS_PATTERN + rb"\}[ \t]+(\S+)")
_LABEL_PATTERN = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\.)*+)"')
# Ranks that work on the same requests; each rank reports all requests.
_RANK_LABEL_PATTERN = re.compile(
    r"(?:(?:attn|moe)_)?(?:tp|pp|cp|ep|sp|dcp|pcp)_rank"
    r"|(?:tensor|pipeline|context|expert|sequence)_parallel_rank"
)
# Parts of the engine with their own requests and their own KV cache.
_REPLICA_LABEL_PATTERN = re.compile(
    r"engine|(?:(?:attn|moe)_)?dp_rank|data_parallel_rank|engine_type|ReplicaId|WorkerId|pid"
)

SampleReader = Callable[[bytes], Iterator[tuple[str, bytes | None, float]]]


def make_sample_reader(names: Iterable[str]) -> SampleReader:
    """Return a function that yields name, labels and value of each sample of ``names``.

    A value that is not a number is NaN. A malformed or too long line has the labels None.
    """
    names_by_bytes = {name.encode(): name for name in names}

    def read(page: bytes) -> Iterator[tuple[str, bytes | None, float]]:
        for begin in _NAME_PATTERN.finditer(page):
            name = names_by_bytes.get(begin[1] or begin[2])
            if name is None:
                continue
            match = None
            end = page.find(b"\n", begin.end(), begin.start() + MAX_LINE_BYTES + 1)
            if end < 0:
                end = min(len(page), begin.start() + MAX_LINE_BYTES + 1)
            if end - begin.start() <= MAX_LINE_BYTES:
                rest = _AFTER_NAME_PATTERN if begin[2] is not None else _AFTER_QUOTED_PATTERN
                match = rest.match(page, begin.end(), end)
            if match is None:
                yield name, None, math.nan
            else:
                yield name, match[1] or b"", _parse_number(match[2])

    return read


class MetricKind(StrEnum):
    """Kind of a metric, which determines how its lines are combined."""

    # The values of parts with their own requests add up.
    GAUGE = "gauge"
    # Adds up like a gauge. A part that is absent from the page keeps its last values.
    COUNTER = "counter"
    # A share of a pool, from 0 to 1. The shares of several pools are averaged by pool size.
    RATIO = "ratio"


@dataclass(frozen=True)
class Series:
    """One metric of a page.

    Attributes:
        name: The complete sample name in the newest version of the program, such as ``…_total`` or
            a histogram's ``…_count``.
        older_names: The sample names in earlier versions.
        only_label: A label and its value. Only lines with this label count; None accepts all lines.
        total: A label. The line in which it is empty is the sum of the other lines.
        pool: For a ratio, the name of the gauge with the size of its pool.
        pool_label: The label of the gauge ``pool`` that holds the size; empty if the value of the
            gauge is the size.

    """

    name: str
    kind: MetricKind = MetricKind.GAUGE
    older_names: tuple[str, ...] = ()
    only_label: tuple[str, str] | None = None
    total: str = ""
    pool: str = ""
    pool_label: str = ""

    def iterate_names(self) -> Iterator[str]:
        """Yield the possible names of the metric on a page, the most likely first."""
        for name in (self.name, *self.older_names):
            yield from iterate_name_spellings(name)


def iterate_name_spellings(name: str) -> Iterator[str]:
    """Yield the spellings of ``name`` in different programs.

    Ray and routers replace the colon by an underscore, and Ray adds a prefix. Programs without
    OpenMetrics omit ``_total``.
    """
    for ended in dict.fromkeys((name, name.removesuffix("_total"))):
        for prefix in ("", "ray_"):
            for written in dict.fromkeys((ended, ended.replace(":", "_"))):
                yield prefix + written


def make_created_name(name: str) -> str:
    """Return the name of the sample with the start time of the counter ``name``."""
    return name.removesuffix("_total") + "_created"


class PoolRatio(float):
    """The mean ratio of all pools, or the largest if the sizes of the pools are unknown.

    ``least`` is then the smallest ratio.
    """

    least: float

    def __new__(cls, value: float, least: float | None = None) -> PoolRatio:
        """Return a ratio, which is exact without ``least``."""
        ratio = super().__new__(cls, value)
        ratio.least = value if least is None else least
        return ratio


Labels = frozenset[tuple[str, str]]
Lines = dict[Labels, float]
"""Values by labels; NaN if a value is unknown."""
# Such a line may be any line of its metric.
MALFORMED_LABELS: Labels = frozenset({("", "")})
PROCESS_START_METRIC = "process_start_time_seconds"


class MetricsPage:
    """The lines of selected metrics in one scrape, by metric name."""

    def __init__(self, lines: dict[str, Lines]) -> None:
        self.lines = lines

    def compute_value(self, series: Series) -> float | None:
        """Return the value of the metric; None if it is absent or impossible."""
        lines = self._find_lines(series)
        if series.only_label is not None:
            line_count = len(lines)
            lines = {
                labels: value
                for labels, value in lines.items()
                if series.only_label in labels or labels == MALFORMED_LABELS
            }
            if series.kind is MetricKind.COUNTER and len(lines) == line_count:
                # With Ray, vLLM 0.11 counts every request under its last known outcome.
                return None
        if not lines or len(lines) > MAX_METRIC_LINES:
            return None
        max_value = 1.0 if series.kind is MetricKind.RATIO else MAX_METRIC_VALUE
        if not all(0.0 <= value <= max_value for value in lines.values()):
            return None
        parts = _merge_ranks(lines, series.total)
        if series.kind is not MetricKind.RATIO:
            return math.fsum(parts.values())
        return self._compute_weighted_ratio(parts, series)

    def has_series(self, series: Series) -> bool:
        """Report whether the page has a line of this metric, with any value."""
        return bool(self._find_lines(series))

    def read_counters(self, series_list: Iterable[Series]) -> dict[tuple[str, Labels], float]:
        """Return each line of the counters, by name and labels; NaN if impossible."""
        return {
            (name, labels): value if 0.0 <= value < MAX_METRIC_VALUE else math.nan
            for series in series_list
            if series.kind is MetricKind.COUNTER and (name := self._find_name(series)) is not None
            for labels, value in self.lines[name].items()
        }

    def read_start_times(self, series_list: Iterable[Series]) -> dict[tuple[str, Labels], float]:
        """Return the start times of the process and of the counters, by name and labels."""
        names = [
            PROCESS_START_METRIC,
            *(make_created_name(name) for series in series_list for name in series.iterate_names()),
        ]
        return {
            (name, labels): value
            for name in names
            for labels, value in self.lines.get(name, {}).items()
            if 0.0 <= value < MAX_METRIC_VALUE
        }

    def set_counters(self, counters: Mapping[tuple[str, Labels], float]) -> None:
        """Set the lines of ``counters``, and add those that the page lacks."""
        for (name, labels), value in counters.items():
            lines = self.lines.get(name)
            if lines is not None and (labels in lines or len(lines) < MAX_METRIC_LINES):
                lines[labels] = value

    def _find_name(self, series: Series) -> str | None:
        return next((name for name in series.iterate_names() if name in self.lines), None)

    def _find_lines(self, series: Series) -> Lines:
        name = self._find_name(series)
        return self.lines[name] if name is not None else {}

    def _compute_weighted_ratio(self, parts: Lines, series: Series) -> PoolRatio:
        smallest, largest = min(parts.values()), max(parts.values())
        if smallest == largest:
            return PoolRatio(largest)
        sizes = self._read_pool_sizes(series)
        places = [_select_replica_labels(labels) for labels in parts]
        if len(set(places)) < len(places) or not all(sizes.get(place) for place in places):
            return PoolRatio(largest, smallest)
        weights = [sizes[place] for place in places]
        used = math.fsum(w * share for w, share in zip(weights, parts.values(), strict=True))
        return PoolRatio(used / math.fsum(weights))

    def _read_pool_sizes(self, series: Series) -> Mapping[Labels, float]:
        # Pools that have several sizes are left out.
        if not series.pool:
            return {}
        lines = self._find_lines(Series(series.pool))
        if series.pool_label:
            lines = {labels: _parse_label_number(labels, series.pool_label) for labels in lines}
        sizes: dict[Labels, float] = {}
        for labels, size in _merge_ranks(lines, "").items():
            place = _select_replica_labels(labels)
            sizes[place] = math.nan if place in sizes else size
        return {place: size for place, size in sizes.items() if 0.0 < size < MAX_METRIC_VALUE}


def make_page_reader(series_list: Iterable[Series]) -> Callable[[bytes], MetricsPage]:
    """Return a function that reads the lines of all metrics in ``series_list`` from a page."""
    selected_series = tuple(series_list)
    names = {name for series in selected_series for name in series.iterate_names()}
    names |= {
        name
        for series in selected_series
        if series.pool
        for name in iterate_name_spellings(series.pool)
    }
    names |= {PROCESS_START_METRIC, *(make_created_name(name) for name in names)}
    read_samples = make_sample_reader(names)

    def read(page: bytes) -> MetricsPage:
        lines: dict[str, Lines] = {}
        for name, written, value in read_samples(page):
            metric_lines = lines.setdefault(name, {})
            if len(metric_lines) > MAX_METRIC_LINES:
                continue
            labels = _parse_labels(written) if written is not None else MALFORMED_LABELS
            # If a line occurs twice, it is unknown which one is right.
            metric_lines[labels] = math.nan if labels in metric_lines else value
        return MetricsPage(lines)

    return read


def _merge_ranks(lines: Lines, total_label: str) -> Lines:
    # All ranks of a part report the same requests, at slightly different times, so the largest
    # value counts.
    if total_label:
        sums = {labels - {(total_label, "")} for labels in lines if (total_label, "") in labels}
        lines = {
            labels: value
            for labels, value in lines.items()
            if (total_label, "") in labels or _remove_labels(labels, {total_label}) not in sums
        }
    parts: Lines = {}
    for labels, value in lines.items():
        part = frozenset(label for label in labels if not _RANK_LABEL_PATTERN.fullmatch(label[0]))
        parts[part] = max(value, parts.get(part, value))
    return parts


def _select_replica_labels(labels: Labels) -> Labels:
    return frozenset(label for label in labels if _REPLICA_LABEL_PATTERN.fullmatch(label[0]))


def _remove_labels(labels: Labels, names: set[str]) -> Labels:
    return frozenset(label for label in labels if label[0] not in names)


def _parse_label_number(labels: Labels, name: str) -> float:
    return next(
        (_parse_number(value.encode()) for label, value in labels if label == name), math.nan
    )


def _parse_labels(text: bytes) -> Labels:
    return frozenset(
        (name.decode(), value.decode(errors="replace"))
        for name, value in _LABEL_PATTERN.findall(text)
    )


def _parse_number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
