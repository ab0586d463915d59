"""Memory over time: a limited number of points, and their charts as SVG.

One chart shows the segments as stacked areas, with baseline and budget. A leak of megabytes is not
visible next to a baseline of gigabytes. So a second chart shows only the growth, against the whole
budget.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from plimsoll_api.assessment import Assessment, BudgetState, Segment
from plimsoll_api.times import clock_time
from plimsoll_api.units import format_bytes

MAX_POINTS = 240
"""Maximum number of points."""
SEGMENTS = tuple(Segment)
UNKNOWN = -1
_HOST, _DEVICE, _HOST_GROWTH, _DEVICE_GROWTH = range(len(SEGMENTS), len(SEGMENTS) + 4)
ROW_VALUES = len(SEGMENTS) + 4
"""Number of values per point."""


@dataclass(frozen=True)
class HistoryPoint:
    """Memory at one time; unknown segments are absent, other unknown values are None."""

    at: float
    segments: dict[Segment, int]
    host_baseline: int | None
    device_baseline: int | None
    host_growth: int | None
    device_growth: int | None


class History:
    """Points over the whole run, written by one thread and read by others.

    When it is full, every second point is dropped and the interval doubles. All memory is allocated
    at the start, because arrays that grow and shrink fragment the heap.
    """

    def __init__(self, points: int = MAX_POINTS) -> None:
        self._points = points
        self._every, self._skipped = 1, 0
        self._count = 0
        self._times = array("d", [0.0]) * points
        self._values = array("q", [UNKNOWN]) * (points * ROW_VALUES)
        self._lock = threading.Lock()

    def add(self, at: float, seen: Assessment) -> None:
        """Add a sample; later in a run, most samples are skipped."""
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        row = [seen.segments.get(segment, UNKNOWN) for segment in SEGMENTS]
        row += [_baseline(seen.host), _baseline(seen.reserved or seen.device)]
        row += [_growth(seen.host), _growth(seen.device)]
        with self._lock:
            self._times[self._count] = at
            self._values[self._count * ROW_VALUES : (self._count + 1) * ROW_VALUES] = array(
                "q", row
            )
            self._count += 1
            if self._count == self._points:
                self._halve()

    def points(self) -> list[HistoryPoint]:
        """Return all points, oldest first."""
        with self._lock:
            times, values = self._times[: self._count], self._values[: self._count * ROW_VALUES]
        rows = (
            values[start : start + ROW_VALUES].tolist()
            for start in range(0, len(values), ROW_VALUES)
        )
        return [_point(at, row) for at, row in zip(times, rows, strict=True)]

    def _halve(self) -> None:
        self._count = (self._count + 1) // 2  # keeps the first point
        for to in range(self._count):
            self._times[to] = self._times[2 * to]
            self._values[to * ROW_VALUES : (to + 1) * ROW_VALUES] = self._values[
                2 * to * ROW_VALUES : (2 * to + 1) * ROW_VALUES
            ]
        self._every *= 2


def _baseline(state: BudgetState | None) -> int:
    return UNKNOWN if state is None or state.baseline is None else state.baseline


def _growth(state: BudgetState | None) -> int:
    return UNKNOWN if state is None or state.unexplained is None else max(state.unexplained, 0)


def _value(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _point(at: float, row: list[int]) -> HistoryPoint:
    return HistoryPoint(
        at=at,
        segments={s: v for s, v in zip(SEGMENTS, row, strict=False) if v != UNKNOWN},
        host_baseline=_value(row[_HOST]),
        device_baseline=_value(row[_DEVICE]),
        host_growth=_value(row[_HOST_GROWTH]),
        device_growth=_value(row[_DEVICE_GROWTH]),
    )


WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 76, 12, 12, 28
LINES = 4
HEADROOM = 1.05
"""Factor by which a chart is higher than its values, so that the budget is not at its edge."""


@dataclass(frozen=True)
class Band:
    """One kind of memory: its segments from bottom to top, and its budget in bytes."""

    name: str
    segments: tuple[Segment, ...]
    baselines: tuple[int | None, ...]
    budget: int | None


def segment_chart(band: Band, points: Sequence[HistoryPoint]) -> str:
    """Return the chart of the segments; empty if there are fewer than two points."""
    known = [i for i, p in enumerate(points) if any(s in p.segments for s in band.segments)]
    if len(known) < 2:
        return ""
    times = [points[i].at for i in known]
    sums = [[points[i].segments.get(s, 0) for s in band.segments] for i in known]
    baseline = next((b for b in reversed(band.baselines) if b is not None), None)
    line = None if baseline is None or band.budget is None else baseline + band.budget
    top = _ceiling(max([*(sum(row) for row in sums), baseline or 0, line or 0]))
    box = _Box(times[0], max(times[-1], times[0] + 1.0), top)
    parts = [*_grid(box), *_areas(box, band, times, sums)]
    parts += _named_line(box, baseline, "baseline", 12) + _named_line(box, line, "budget", -4)
    newest = format_bytes(sum(sums[-1]))
    level = f", the budget's line is at {format_bytes(line)}" if line is not None else ""
    return _svg(
        band.name,
        f"{band.name} memory by segment over time",
        f"Now {newest}{level}. The table below has the numbers.",
        parts,
    )


def growth_chart(name: str, grown: Sequence[tuple[float, int | None]], budget: int) -> str:
    """Return the chart of unexplained growth (Unix seconds, bytes or None) against ``budget``.

    Empty if there are fewer than two known points. Unknown points leave a gap.
    """
    known = [(at, size) for at, size in grown if size is not None]
    if len(known) < 2:
        return ""
    top = _ceiling(max(budget, *(size for _, size in known)) * HEADROOM)
    box = _Box(grown[0][0], max(grown[-1][0], grown[0][0] + 1.0), top)
    parts = [*_grid(box), *_growth_areas(box, grown), *_named_line(box, budget, "budget", -4)]
    now = grown[-1][1]
    said = "Now unknown" if now is None else f"Now {format_bytes(now)}"
    return _svg(
        f"{name}-growth",
        f"unexplained {name} memory over time",
        f"{said}, the budget is {format_bytes(budget)}.",
        parts,
    )


def _growth_areas(box: _Box, grown: Sequence[tuple[float, int | None]]) -> list[str]:
    """Return an area for each run of known points."""
    stretches: list[list[tuple[float, int]]] = [[]]
    for at, size in grown:
        if size is None:
            stretches.append([])
        else:
            stretches[-1].append((at, size))
    made = []
    for stretch in (one for one in stretches if len(one) > 1):
        line = " ".join(f"{box.x(at)},{box.y(size)}" for at, size in stretch)
        floor = f"{box.x(stretch[-1][0])},{box.y(0)} {box.x(stretch[0][0])},{box.y(0)}"
        made += [f'<polygon class="grown" points="{line} {floor}"/>']
        made += [f'<polyline class="grown" points="{line}"/>']
    return made


def _svg(name: str, title: str, text: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(text)}</desc>'
        f"{''.join(parts)}</svg>"
    )


@dataclass(frozen=True)
class _Box:
    """Converter from Unix seconds and bytes to coordinates."""

    begin: float
    end: float
    top: float

    def x(self, at: float) -> float:
        share = (at - self.begin) / (self.end - self.begin)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, size: float) -> float:
        return round(HEIGHT - BOTTOM - size / self.top * (HEIGHT - TOP - BOTTOM), 1)


def _areas(
    box: _Box, band: Band, times: Sequence[float], rows: Sequence[Sequence[int]]
) -> list[str]:
    floor = [0.0] * len(times)
    made = []
    for index, segment in enumerate(band.segments):
        roof = [below + row[index] for below, row in zip(floor, rows, strict=True)]
        if any(row[index] for row in rows):
            up = [f"{box.x(t)},{box.y(v)}" for t, v in zip(times, roof, strict=True)]
            down = [f"{box.x(t)},{box.y(v)}" for t, v in zip(times, floor, strict=True)]
            shape = " ".join([*up, *reversed(down)])
            title = f"<title>{segment.value}</title>"
            made.append(f'<polygon class="s s-{segment.value}" points="{shape}">{title}</polygon>')
        floor = roof
    return made


def _named_line(box: _Box, size: int | None, name: str, offset: int) -> list[str]:
    """Return a horizontal line with its name, ``offset`` below it.

    Different offsets keep the names of close lines apart.
    """
    if size is None:
        return []
    y, right = box.y(size), WIDTH - RIGHT
    return [
        f'<line class="{name}" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>',
        f'<text class="{name}" x="{right - 4}" y="{y + offset}" text-anchor="end">{name}</text>',
    ]


def _grid(box: _Box) -> list[str]:
    made = []
    for index in range(LINES + 1):
        size = box.top * index / LINES
        y = box.y(size)
        made.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        label = f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{format_bytes(size)}</text>'
        made.append(label)
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at = box.begin + share * (box.end - box.begin)
        clock = clock_time(at)
        made.append(f'<text x="{box.x(at)}" y="{HEIGHT - 8}" text-anchor="{anchor}">{clock}</text>')
    return made


def _ceiling(size: float) -> float:
    """Return a round number of binary units, at least ``size``."""
    if size <= 0:
        return 1.0
    unit = 2.0 ** (10 * math.floor(math.log2(size) / 10))
    steps = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    return unit * next((step for step in steps if step * unit >= size), 1024)
