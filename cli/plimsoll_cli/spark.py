"""Small pictures for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-=*#%@"


def sparkline(
    values: Sequence[float | None],
    width: int = 24,
    plain: bool = False,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Draw the newest ``width`` values as one line of text; unknown is a space.

    It reaches from their minimum to their maximum, or to ``low`` and ``high`` if these reach
    further.
    """
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    marks = PLAIN if plain else BLOCKS
    low = min(known) if low is None else min(low, *known)
    span = (max(known) if high is None else max(high, *known)) - low
    return "".join(
        " "
        if value is None
        else marks[round((value - low) / span * (len(marks) - 1)) if span else 0]
        for value in shown
    )


def bar(share: float | None, width: int, plain: bool = False) -> str:
    """Draw a bar that is full at 1; empty if the share is unknown."""
    full, empty = ("#", ".") if plain else ("█", "░")
    filled = round(min(max(share or 0.0, 0.0), 1.0) * width)
    return full * filled + empty * (width - filled)


def plot(points: Sequence[tuple[float, float]], width: int, height: int, plain: bool) -> list[str]:
    """Points (x growing, y) as filled columns, ``height`` lines from top to bottom.

    Between two points the line is straight; the bottom is a little below the least y, so that the
    least is seen too. Fewer than two different x make an empty picture.
    """
    begin, end = points[0][0], points[-1][0]
    if len(points) < 2 or end <= begin:
        return []
    marks = PLAIN if plain else BLOCKS
    low, high = min(y for _, y in points), max(y for _, y in points)
    low -= (high - low or 1.0) / (height * len(marks))
    levels = [
        (_between(points, begin + (end - begin) * column / (width - 1)) - low) / (high - low)
        for column in range(width)
    ]
    full = [max(1, round(level * height * len(marks))) for level in levels]
    lines = []
    for row in range(height - 1, -1, -1):
        filled = [min(max(eighths - row * len(marks), 0), len(marks)) for eighths in full]
        lines.append("".join(marks[count - 1] if count else " " for count in filled).rstrip())
    return lines


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate the points at ``x``; of two points at one x the later holds."""
    for (x0, y0), (x1, y1) in zip(reversed(points[:-1]), reversed(points[1:]), strict=True):
        if x >= x0:
            return y1 if x1 <= x0 else y0 + (y1 - y0) * min((x - x0) / (x1 - x0), 1.0)
    return points[0][1]
