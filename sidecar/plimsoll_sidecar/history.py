"""Store a limited number of points of memory over time, and draw charts of them as SVG.

A leak of megabytes is not visible beside a baseline of gigabytes, so a second chart shows only the
growth and the budget.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from plimsoll_api.assessment import Assessment, BudgetState, Segment
from plimsoll_api.times import format_clock_time
from plimsoll_api.units import format_bytes

MAX_POINTS = 240
SEGMENTS = tuple(Segment)
UNKNOWN_VALUE = -1
_HOST_COLUMN, _DEVICE_COLUMN, _HOST_GROWTH_COLUMN, _DEVICE_GROWTH_COLUMN = range(
    len(SEGMENTS), len(SEGMENTS) + 4
)
VALUES_PER_POINT = len(SEGMENTS) + 4


@dataclass(frozen=True)
class HistoryPoint:
    """Memory in bytes at a time in Unix seconds. Unknown segments are absent."""

    at: float
    segments: dict[Segment, int]
    host_baseline: int | None
    device_baseline: int | None
    host_growth: int | None
    device_growth: int | None


class History:
    """Points over the whole run, for one writing thread and any number of reading threads.

    At ``max_points``, every second point is removed and the interval between points doubles.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._interval, self._skipped = 1, 0
        self._count = 0
        self._times = array("d", [0.0]) * max_points
        self._values = array("q", [UNKNOWN_VALUE]) * (max_points * VALUES_PER_POINT)
        self._lock = threading.Lock()

    def add(self, timestamp: float, assessment: Assessment) -> None:
        """Add a point at ``timestamp`` (Unix seconds), unless samples are being skipped."""
        self._skipped += 1
        if self._skipped < self._interval:
            return
        self._skipped = 0
        row = [assessment.segments.get(segment, UNKNOWN_VALUE) for segment in SEGMENTS]
        row += [
            _get_baseline(assessment.host),
            _get_baseline(assessment.reserved or assessment.device),
        ]
        row += [_get_growth(assessment.host), _get_growth(assessment.device)]
        with self._lock:
            self._times[self._count] = timestamp
            self._values[self._count * VALUES_PER_POINT : (self._count + 1) * VALUES_PER_POINT] = (
                array("q", row)
            )
            self._count += 1
            if self._count == self._max_points:
                self._remove_every_second_point()

    def read_points(self) -> list[HistoryPoint]:
        """Return all points, oldest first."""
        with self._lock:
            times, values = (
                self._times[: self._count],
                self._values[: self._count * VALUES_PER_POINT],
            )
        rows = (
            values[start : start + VALUES_PER_POINT].tolist()
            for start in range(0, len(values), VALUES_PER_POINT)
        )
        return [_make_point(at, row) for at, row in zip(times, rows, strict=True)]

    def _remove_every_second_point(self) -> None:
        self._count = (self._count + 1) // 2  # keeps the first point
        for to in range(self._count):
            self._times[to] = self._times[2 * to]
            self._values[to * VALUES_PER_POINT : (to + 1) * VALUES_PER_POINT] = self._values[
                2 * to * VALUES_PER_POINT : (2 * to + 1) * VALUES_PER_POINT
            ]
        self._interval *= 2


def _get_baseline(state: BudgetState | None) -> int:
    return UNKNOWN_VALUE if state is None or state.baseline is None else state.baseline


def _get_growth(state: BudgetState | None) -> int:
    return (
        UNKNOWN_VALUE if state is None or state.unexplained is None else max(state.unexplained, 0)
    )


def _decode_value(value: int) -> int | None:
    return None if value == UNKNOWN_VALUE else value


def _make_point(timestamp: float, row: list[int]) -> HistoryPoint:
    return HistoryPoint(
        at=timestamp,
        segments={s: v for s, v in zip(SEGMENTS, row, strict=False) if v != UNKNOWN_VALUE},
        host_baseline=_decode_value(row[_HOST_COLUMN]),
        device_baseline=_decode_value(row[_DEVICE_COLUMN]),
        host_growth=_decode_value(row[_HOST_GROWTH_COLUMN]),
        device_growth=_decode_value(row[_DEVICE_GROWTH_COLUMN]),
    )


CHART_WIDTH_PX, CHART_HEIGHT_PX = 760, 260
LEFT_MARGIN_PX, RIGHT_MARGIN_PX, TOP_MARGIN_PX, BOTTOM_MARGIN_PX = 76, 12, 12, 28
GRID_INTERVALS = 4
# The chart is this much higher than its largest value, so that no line is at the edge.
CHART_HEADROOM_FACTOR = 1.05


@dataclass(frozen=True)
class MemoryBand:
    """One kind of memory in a chart, in bytes.

    ``segments`` are listed from bottom to top. ``baselines`` has one baseline for each point.
    """

    name: str
    segments: tuple[Segment, ...]
    baselines: tuple[int | None, ...]
    budget: int | None


def draw_segment_chart(band: MemoryBand, points: Sequence[HistoryPoint]) -> str:
    """Return the SVG chart of the segments; empty with fewer than two points."""
    known_indices = [i for i, p in enumerate(points) if any(s in p.segments for s in band.segments)]
    if len(known_indices) < 2:
        return ""
    times = [points[i].at for i in known_indices]
    sums = [[points[i].segments.get(s, 0) for s in band.segments] for i in known_indices]
    baseline = next((b for b in reversed(band.baselines) if b is not None), None)
    line = None if baseline is None or band.budget is None else baseline + band.budget
    top = _round_up(max([*(sum(row) for row in sums), baseline or 0, line or 0]))
    scale = _ChartScale(times[0], max(times[-1], times[0] + 1.0), top)
    parts = [*_draw_grid(scale), *_draw_areas(scale, band, times, sums)]
    parts += _draw_named_line(scale, baseline, "baseline", 12) + _draw_named_line(
        scale, line, "budget", -4
    )
    newest = format_bytes(sum(sums[-1]))
    level = f", the budget ends at {format_bytes(line)}" if line is not None else ""
    return _make_svg(
        band.name,
        f"{band.name} memory by segment over time",
        f"Now {newest}{level}. The table below shows the values.",
        parts,
    )


def draw_growth_chart(name: str, growth: Sequence[tuple[float, int | None]], budget: int) -> str:
    """Return the SVG chart of unexplained growth, with a line at ``budget``.

    ``growth`` holds times in Unix seconds and sizes in bytes. An unknown size leaves a gap. The
    result is empty with fewer than two known sizes.
    """
    known_points = [(at, size) for at, size in growth if size is not None]
    if len(known_points) < 2:
        return ""
    top = _round_up(max(budget, *(size for _, size in known_points)) * CHART_HEADROOM_FACTOR)
    scale = _ChartScale(growth[0][0], max(growth[-1][0], growth[0][0] + 1.0), top)
    parts = [
        *_draw_grid(scale),
        *_draw_growth_areas(scale, growth),
        *_draw_named_line(scale, budget, "budget", -4),
    ]
    now = growth[-1][1]
    description = "Now unknown" if now is None else f"Now {format_bytes(now)}"
    return _make_svg(
        f"{name}-growth",
        f"unexplained {name} memory over time",
        f"{description}, the budget is {format_bytes(budget)}.",
        parts,
    )


def _draw_growth_areas(scale: _ChartScale, growth: Sequence[tuple[float, int | None]]) -> list[str]:
    # One area for each run of points without a gap.
    stretches: list[list[tuple[float, int]]] = [[]]
    for at, size in growth:
        if size is None:
            stretches.append([])
        else:
            stretches[-1].append((at, size))
    elements = []
    for stretch in (stretch for stretch in stretches if len(stretch) > 1):
        line = " ".join(f"{scale.to_x(at)},{scale.to_y(size)}" for at, size in stretch)
        first_x, last_x = scale.to_x(stretch[0][0]), scale.to_x(stretch[-1][0])
        floor = f"{last_x},{scale.to_y(0)} {first_x},{scale.to_y(0)}"
        elements += [f'<polygon class="grown" points="{line} {floor}"/>']
        elements += [f'<polyline class="grown" points="{line}"/>']
    return elements


def _make_svg(name: str, title: str, description: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {CHART_WIDTH_PX} {CHART_HEIGHT_PX}" role="img" '
        f'aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title>'
        f'<desc id="{name}-d">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


@dataclass(frozen=True)
class _ChartScale:
    begin: float
    end: float
    top: float

    def to_x(self, timestamp: float) -> float:
        share = (timestamp - self.begin) / (self.end - self.begin)
        return round(
            LEFT_MARGIN_PX + share * (CHART_WIDTH_PX - LEFT_MARGIN_PX - RIGHT_MARGIN_PX), 1
        )

    def to_y(self, size_bytes: float) -> float:
        return round(
            CHART_HEIGHT_PX
            - BOTTOM_MARGIN_PX
            - size_bytes / self.top * (CHART_HEIGHT_PX - TOP_MARGIN_PX - BOTTOM_MARGIN_PX),
            1,
        )


def _draw_areas(
    scale: _ChartScale, band: MemoryBand, times: Sequence[float], rows: Sequence[Sequence[int]]
) -> list[str]:
    floor = [0.0] * len(times)
    elements = []
    for index, segment in enumerate(band.segments):
        roof = [below + row[index] for below, row in zip(floor, rows, strict=True)]
        if any(row[index] for row in rows):
            up = [f"{scale.to_x(t)},{scale.to_y(v)}" for t, v in zip(times, roof, strict=True)]
            down = [f"{scale.to_x(t)},{scale.to_y(v)}" for t, v in zip(times, floor, strict=True)]
            shape = " ".join([*up, *reversed(down)])
            title = f"<title>{segment.value}</title>"
            elements.append(
                f'<polygon class="s s-{segment.value}" points="{shape}">{title}</polygon>'
            )
        floor = roof
    return elements


def _draw_named_line(
    scale: _ChartScale, size_bytes: int | None, name: str, offset: int
) -> list[str]:
    # The offset in pixels keeps the names of close lines apart.
    if size_bytes is None:
        return []
    y, right = scale.to_y(size_bytes), CHART_WIDTH_PX - RIGHT_MARGIN_PX
    return [
        f'<line class="{name}" x1="{LEFT_MARGIN_PX}" x2="{right}" y1="{y}" y2="{y}"/>',
        f'<text class="{name}" x="{right - 4}" y="{y + offset}" text-anchor="end">{name}</text>',
    ]


def _draw_grid(scale: _ChartScale) -> list[str]:
    elements = []
    for index in range(GRID_INTERVALS + 1):
        size = scale.top * index / GRID_INTERVALS
        y = scale.to_y(size)
        right = CHART_WIDTH_PX - RIGHT_MARGIN_PX
        elements += [
            f'<line class="grid" x1="{LEFT_MARGIN_PX}" x2="{right}" y1="{y}" y2="{y}"/>',
            f'<text x="{LEFT_MARGIN_PX - 6}" y="{y + 4}" text-anchor="end">'
            f"{format_bytes(size)}</text>",
        ]
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at = scale.begin + share * (scale.end - scale.begin)
        clock = format_clock_time(at)
        elements.append(
            f'<text x="{scale.to_x(at)}" y="{CHART_HEIGHT_PX - 8}" text-anchor="{anchor}">'
            f"{clock}</text>"
        )
    return elements


def _round_up(size_bytes: float) -> float:
    if size_bytes <= 0:
        return 1.0
    unit = 2.0 ** (10 * math.floor(math.log2(size_bytes) / 10))
    steps = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    return unit * next((step for step in steps if step * unit >= size_bytes), 1024)
