"""The slow leak that is promised, on top of what real processes were seen to use.

``bench/leaklab_hours.py`` recorded them: healthy processes under real load, a row each 5 s.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from leaklab.cases import Case
from leaklab.series import HOUR, MIB, Curve, Series, steady
from leaklab.splits import Split

RECORDINGS = Path(__file__).with_name("noise.json")
ROW_S = 5.0
STARTS, LENGTH = 300.0, 4 * HOUR
FAMILY = "leak named recorded"


def slow(split: Split) -> list[Case]:
    """48 MiB an hour in each recorded process."""
    return [
        Case(
            f"recorded-{name}",
            FAMILY,
            split,
            Series(
                duration=STARTS + LENGTH,
                leak=steady(48 * MIB / HOUR, STARTS),
                other=used(name),
                noise=0.0,
                per_request=0.0,
            ),
            "HostGrowth",
            STARTS,
            "malloc_in_use",
        )
        for name in _series()
    ]


@cache
def _series() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDINGS.read_bytes())["series"]
    return found


def used(name: str) -> Curve:
    """Memory of a recorded process above its least, in bytes: all of it, then its later half again
    and again, for what is filled once is not filled twice."""
    rows = [row[1:] for row in _series()[name]["rows"] if None not in row]
    sizes = [1024 * sum(row) for row in rows]
    least, half = min(sizes), len(sizes) // 2

    def curve(t: float) -> float:
        place = int(t / ROW_S)
        if place >= len(sizes):
            place = half + (place - len(sizes)) % (len(sizes) - half)
        return float(sizes[place] - least)

    return curve
