"""Small pictures for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-=*#%@"


def sparkline(values: Sequence[float | None], width: int = 24, plain: bool = False) -> str:
    """The newest ``width`` values between their least and their greatest; unknown is a space."""
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    marks = PLAIN if plain else BLOCKS
    low, span = min(known), max(known) - min(known)
    return "".join(
        " "
        if value is None
        else marks[round((value - low) / span * (len(marks) - 1)) if span else 0]
        for value in shown
    )


def bar(share: float | None, width: int, plain: bool = False) -> str:
    """A bar that is full at 1; empty where the share is unknown."""
    full, empty = ("#", ".") if plain else ("█", "░")
    filled = round(min(max(share or 0.0, 0.0), 1.0) * width)
    return full * filled + empty * (width - filled)
