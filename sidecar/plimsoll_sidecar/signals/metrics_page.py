"""Reads a few named metrics from a Prometheus text page that another program wrote.

Lines are chosen by name before anything is parsed: an engine's page has a thousand lines, and only
a dozen matter. Parsing all of them would cost more than the rest of a sample.

:class:`Series` says what the lines of one name mean together, and :func:`reader` applies that: a
page has one line for each engine, rank, mode and outcome, and which of them add up differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

LARGEST = 2.0**53
"""Whole numbers are exact below it, and a byte count in MiB still fits 64 bits after that."""
MAX_LINE = 16 << 10
"""Bytes of one sample. Known engines and exporters write less than 1 KiB; the memory for a match
grows with the labels."""
MAX_LINES = 4096
"""Lines of one name. An engine has some for each of its ranks; 64 ranks make less than 1,000."""
_INSIDE = rb'((?:[^"}\n]|"(?:[^"\\\n]|\\.)*+")*+)'
"""Labels up to the closing brace outside of quoted values, which may contain any character."""
_NAME = re.compile(
    rb'^(?:\{"([a-zA-Z_:][a-zA-Z0-9_:]{0,255}+)"|([a-zA-Z_:][a-zA-Z0-9_:]{0,255}+)(?=[{ \t]))', re.M
)
_AFTER_NAME = re.compile(rb"(?:\{" + _INSIDE + rb"\})?[ \t]+(\S+)")
_AFTER_QUOTED = re.compile(rb",?" + _INSIDE + rb"\}[ \t]+(\S+)")
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\.)*+)"')
_RANK = re.compile(
    r"(?:(?:attn|moe)_)?(?:tp|pp|cp|ep|sp|dcp|pcp)_rank"
    r"|(?:tensor|pipeline|context|expert|sequence)_parallel_rank"
)
"""Labels of ranks that work on the same requests, so that each reports all of them."""
_REPLICA = re.compile(
    r"engine|(?:(?:attn|moe)_)?dp_rank|data_parallel_rank|engine_type|ReplicaId|WorkerId|pid"
)
"""Labels of parts that have requests, and a key-value cache, of their own."""

Samples = Callable[[bytes], Iterator[tuple[str, bytes | None, float]]]


def samples(names: Iterable[str]) -> Samples:
    """Return a function from a page to the samples of ``names``: name, labels as written, value.

    A name may stand before the braces or, quoted, as the first in them. A value that is not a
    number is NaN. A malformed or overlong line has no labels (None) and the value NaN.
    """
    wanted = {name.encode(): name for name in names}

    def read(page: bytes) -> Iterator[tuple[str, bytes | None, float]]:
        for begin in _NAME.finditer(page):
            name = wanted.get(begin[1] or begin[2])
            if name is None:
                continue
            found = None
            end = page.find(b"\n", begin.end(), begin.start() + MAX_LINE + 1)
            if end < 0:
                end = min(len(page), begin.start() + MAX_LINE + 1)
            if end - begin.start() <= MAX_LINE:
                rest = _AFTER_NAME if begin[2] is not None else _AFTER_QUOTED
                found = rest.match(page, begin.end(), end)
            if found is None:
                yield name, None, math.nan
            else:
                yield name, found[1] or b"", _number(found[2])

    return read


class Kind(StrEnum):
    """What a figure is, and so what several lines of it make together."""

    GAUGE = "gauge"
    """Of now. It adds up over the parts that have requests of their own."""
    COUNTER = "counter"
    """Since a start. It adds up as gauges do, and that of a part that left stays."""
    RATIO = "ratio"
    """A share of a pool, from 0 to 1: the mean over the pools, each weighed by its size."""


@dataclass(frozen=True)
class Series:
    """One figure of a page.

    ``name`` is a whole sample name of the newest version, as ``…_total`` or a histogram's
    ``…_count``, and ``older`` are those of earlier ones. ``only`` is the label and value of the
    lines that count, None for all. ``total`` names a label whose empty value is on the line that
    sums up those with others. ``pool`` is the size of a ratio's pool: a gauge, or with ``pool_in``
    the number in that label.
    """

    name: str
    kind: Kind = Kind.GAUGE
    older: tuple[str, ...] = ()
    only: tuple[str, str] | None = None
    total: str = ""
    pool: str = ""
    pool_in: str = ""

    def names(self) -> Iterator[str]:
        """Yield the names that it may have on a page, the likeliest first."""
        for name in (self.name, *self.older):
            yield from spellings(name)


def spellings(name: str) -> Iterator[str]:
    """Yield ``name`` as different writers spell it.

    Ray and routers have an underscore for the colon, which older exporters kept, and Ray a prefix;
    a writer that does not know OpenMetrics leaves ``_total`` out.
    """
    for ended in dict.fromkeys((name, name.removesuffix("_total"))):
        for prefix in ("", "ray_"):
            for written in dict.fromkeys((ended, ended.replace(":", "_"))):
                yield prefix + written


def created(name: str) -> str:
    """Return the name of the sample that says when the counter ``name`` began."""
    return name.removesuffix("_total") + "_created"


class Share(float):
    """A ratio over all pools.

    Where their sizes are unknown and their shares differ it is the largest, and ``least`` the
    smallest: the mean lies between.
    """

    least: float

    def __new__(cls, value: float, least: float | None = None) -> Share:
        """Make one; without ``least`` it is exact."""
        found = super().__new__(cls, value)
        found.least = value if least is None else least
        return found


Labels = frozenset[tuple[str, str]]
Lines = dict[Labels, float]
"""Value by labels. NaN is a line that says nothing."""
MALFORMED: Labels = frozenset({("", "")})
"""In place of labels that could not be read: the line may be any."""
STARTED = "process_start_time_seconds"


class Page:
    """The lines of one page that matter, by the name on the page."""

    def __init__(self, lines: dict[str, Lines]) -> None:
        self.lines = lines

    def value(self, series: Series) -> float | None:
        """Return the figure, None where the page does not say it.

        That is so if it has no line of that name, or one whose value no count, share or size can
        have: a part of a sum is no sum.
        """
        found = self._lines(series)
        if series.only is not None:
            every = len(found)
            found = {
                labels: value
                for labels, value in found.items()
                if series.only in labels or labels == MALFORMED
            }
            if series.kind is Kind.COUNTER and len(found) == every:
                # With Ray, vLLM 0.11 counts every request under the last outcome that it knows.
                return None
        if not found or len(found) > MAX_LINES:
            return None
        most = 1.0 if series.kind is Kind.RATIO else LARGEST
        if not all(0.0 <= value <= most for value in found.values()):
            return None
        parts = _parts(found, series.total)
        if series.kind is not Kind.RATIO:
            return math.fsum(parts.values())
        return self._share(parts, series)

    def has(self, series: Series) -> bool:
        """Return whether the page has any line of this name, whatever it says."""
        return bool(self._lines(series))

    def counters(self, every: Iterable[Series]) -> dict[tuple[str, Labels], float]:
        """Return each line of the counters among ``every``; NaN for what no count can be."""
        return {
            (name, labels): value if 0.0 <= value < LARGEST else math.nan
            for series in every
            if series.kind is Kind.COUNTER and (name := self._name(series)) is not None
            for labels, value in self.lines[name].items()
        }

    def begun(self, every: Iterable[Series]) -> dict[tuple[str, Labels], float]:
        """Return when the page says that its process and each counter began, in Unix seconds."""
        names = [STARTED, *(created(name) for one in every for name in one.names())]
        return {
            (name, labels): value
            for name in names
            for labels, value in self.lines.get(name, {}).items()
            if 0.0 <= value < LARGEST
        }

    def keep(self, counters: Mapping[tuple[str, Labels], float]) -> None:
        """Add the lines of counters whose part has left the page: what it did was done."""
        for (name, labels), value in counters.items():
            if name in self.lines and len(self.lines[name]) < MAX_LINES:
                self.lines[name].setdefault(labels, value)

    def _name(self, series: Series) -> str | None:
        return next((name for name in series.names() if name in self.lines), None)

    def _lines(self, series: Series) -> Lines:
        name = self._name(series)
        return self.lines[name] if name is not None else {}

    def _share(self, parts: Lines, series: Series) -> Share:
        least, most = min(parts.values()), max(parts.values())
        if least == most:
            return Share(most)
        sizes = self._pools(series)
        places = [_place(labels) for labels in parts]
        if len(set(places)) < len(places) or not all(sizes.get(place) for place in places):
            return Share(most, least)
        weights = [sizes[place] for place in places]
        held = math.fsum(w * share for w, share in zip(weights, parts.values(), strict=True))
        return Share(held / math.fsum(weights))

    def _pools(self, series: Series) -> Mapping[Labels, float]:
        """Return the pools' sizes, without any that are not known to belong to one place alone."""
        if not series.pool:
            return {}
        lines = self._lines(Series(series.pool))
        if series.pool_in:
            lines = {labels: _in_label(labels, series.pool_in) for labels in lines}
        sizes: dict[Labels, float] = {}
        for labels, size in _parts(lines, "").items():
            place = _place(labels)
            sizes[place] = math.nan if place in sizes else size
        return {place: size for place, size in sizes.items() if 0.0 < size < LARGEST}


def reader(every: Iterable[Series]) -> Callable[[bytes], Page]:
    """Return a function from a page to what it says of the series."""
    wanted = tuple(every)
    names = {name for series in wanted for name in series.names()}
    names |= {name for series in wanted if series.pool for name in spellings(series.pool)}
    names |= {STARTED, *(created(name) for name in names)}
    read_samples = samples(names)

    def read(page: bytes) -> Page:
        lines: dict[str, Lines] = {}
        for name, written, value in read_samples(page):
            known = lines.setdefault(name, {})
            if len(known) > MAX_LINES:
                continue
            labels = _labels(written) if written is not None else MALFORMED
            # Of one line that is there twice, nobody can say which is right.
            known[labels] = math.nan if labels in known else value
        return Page(lines)

    return read


def _parts(lines: Lines, total: str) -> Lines:
    """Return one value for each part that has requests of its own: its ranks all say the same.

    Of ranks a moment apart the largest counts.
    """
    if total:
        sums = {labels - {(total, "")} for labels in lines if (total, "") in labels}
        lines = {
            labels: value
            for labels, value in lines.items()
            if (total, "") in labels or _without(labels, {total}) not in sums
        }
    parts: Lines = {}
    for labels, value in lines.items():
        part = frozenset(one for one in labels if not _RANK.fullmatch(one[0]))
        parts[part] = max(value, parts.get(part, value))
    return parts


def _place(labels: Labels) -> Labels:
    return frozenset(one for one in labels if _REPLICA.fullmatch(one[0]))


def _without(labels: Labels, names: set[str]) -> Labels:
    return frozenset(one for one in labels if one[0] not in names)


def _in_label(labels: Labels, name: str) -> float:
    return next((_number(value.encode()) for label, value in labels if label == name), math.nan)


def _labels(written: bytes) -> Labels:
    return frozenset(
        (name.decode(), value.decode(errors="replace")) for name, value in _LABEL.findall(written)
    )


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
