"""Sums of a few named metrics out of a Prometheus text page.

Lines are chosen by name before anything is parsed: an engine's page has a thousand lines, of which
a dozen matter, and to parse all of them costs more than all else of a sample.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

LARGEST = 2.0**53
"""Whole numbers are exact below it, and a byte count in MiB still fits 64 bits after that."""
LABELS = rb'(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*)\})?'
"""Up to the brace that is outside of every quoted value: values may hold any character."""


def reader(names: Iterable[str]) -> Callable[[bytes], dict[str, float]]:
    """Return a function from a page to the sums of ``names`` over their label sets.

    A name is a whole sample name: a histogram's count is named ``…_count``. What the page lacks is
    absent; a value that is no finite number, or none that a count or a size can have, makes its
    name absent, for a part of a sum is no sum.
    A label may be asked for as ``name{label="value"}``: only lines that hold exactly that text
    within their labels count.
    """
    wanted = {name: _split(name) for name in names}
    plain = {metric.encode() for metric, _ in wanted.values()}
    lines = re.compile(
        rb"^(" + b"|".join(sorted(map(re.escape, plain))) + rb")" + LABELS + rb"[ \t]+(\S+)", re.M
    )

    def read(page: bytes) -> dict[str, float]:
        sums: dict[str, float] = {}
        for metric, labels, text in lines.findall(page):
            for name, (base, label) in wanted.items():
                if base.encode() != metric or label.encode() not in labels:
                    continue
                sums[name] = sums.get(name, 0.0) + _number(text)
        return {name: value for name, value in sums.items() if abs(value) < LARGEST}

    return read


def _split(name: str) -> tuple[str, str]:
    metric, _, rest = name.partition("{")
    return metric, rest.removesuffix("}")


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
