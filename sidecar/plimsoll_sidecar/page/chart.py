"""Segments stacked over time, against the baseline and the budget, as one SVG element."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from plimsoll_api.units import format_bytes
from plimsoll_sidecar.detect.assessment import Segment
from plimsoll_sidecar.page.history import Point

WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 76, 12, 12, 28
LINES = 4


@dataclass(frozen=True)
class Band:
    """One kind of memory: its segments from bottom to top, and the level of its budget."""

    name: str
    segments: tuple[Segment, ...]
    baselines: tuple[int | None, ...]
    budget: int | None


def svg(band: Band, points: Sequence[Point]) -> str:
    """The chart; empty where fewer than two points are known."""
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
    parts += _level(box, baseline, "baseline", 12) + _level(box, line, "budget", -4)
    newest, text = sum(sums[-1]), f"{band.name} memory by segment over time"
    level = f", the budget's line is at {format_bytes(line)}" if line is not None else ""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{band.name}-t'
        f' {band.name}-d"><title id="{band.name}-t">{escape(text)}</title>'
        f'<desc id="{band.name}-d">Now {format_bytes(newest)}{level}. The table below has the'
        f" numbers.</desc>{''.join(parts)}</svg>"
    )


@dataclass(frozen=True)
class _Box:
    """From seconds and bytes to the picture's units."""

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


def _level(box: _Box, size: int | None, name: str, offset: int) -> list[str]:
    """A line and its name, ``offset`` below it: two lines that are near keep their names apart."""
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
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        made.append(f'<text x="{box.x(at)}" y="{HEIGHT - 8}" text-anchor="{anchor}">{clock}</text>')
    return made


def _ceiling(size: float) -> float:
    """A round number of binary units above ``size``."""
    if size <= 0:
        return 1.0
    unit = 2.0 ** (10 * math.floor(math.log2(size) / 10))
    steps = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    return unit * next((step for step in steps if step * unit >= size), 1024)
