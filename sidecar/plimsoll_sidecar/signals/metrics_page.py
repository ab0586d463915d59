"""Reads a few named metrics from a Prometheus text page that another program wrote.

Lines are chosen by name before anything is parsed: an engine's page has a thousand lines, and only
a dozen matter. Parsing all of them would cost more than the rest of a sample.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

LARGEST = 2.0**53
"""Whole numbers are exact below it, and a byte count in MiB still fits 64 bits after that."""
MAX_LINE = 16 << 10
"""Bytes of one sample. Known engines and exporters write less than 1 KiB; the memory for a match
grows with the labels."""
_LABELS = rb'(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*+")*+)\})?'
"""Labels up to the closing brace outside of quoted values, which may contain any character."""
_AFTER_NAME = re.compile(_LABELS + rb"[ \t]+(\S+)")

Samples = Callable[[bytes], Iterator[tuple[str, bytes | None, float]]]


def samples(names: Iterable[str]) -> Samples:
    """Return a function from a page to the samples of ``names``: name, labels as written, value.

    A value that is not a number is NaN. A malformed or overlong line has no labels (None) and
    the value NaN.
    """
    plain = b"|".join(sorted(re.escape(name.encode()) for name in names))
    begin = re.compile(rb"^(" + plain + rb")(?=[{ \t])", re.M)

    def read(page: bytes) -> Iterator[tuple[str, bytes | None, float]]:
        for name in begin.finditer(page):
            end = page.find(b"\n", name.end(), name.start() + MAX_LINE + 1)
            if end < 0:
                end = min(len(page), name.start() + MAX_LINE + 1)
            fits = end - name.start() <= MAX_LINE
            found = _AFTER_NAME.match(page, name.end(), end) if fits else None
            if found is None:
                yield name[1].decode(), None, math.nan
            else:
                yield name[1].decode(), found[1] or b"", _number(found[2])

    return read


def summed(names: Iterable[str]) -> Callable[[bytes], dict[str, float]]:
    """Return a function from a page to the sums of ``names`` over their label sets.

    A name is a whole sample name: a histogram's count is named ``…_count``. Names that the page
    lacks are absent, and so is a name with a value that is not finite, or that no count or size can
    have, since a part of a sum is not a sum. A label may be asked for as ``name{label="value"}``:
    only lines whose labels contain exactly that text count.
    """
    wanted: dict[str, list[tuple[str, bytes]]] = {}
    for name in names:
        metric, _, label = name.partition("{")
        wanted.setdefault(metric, []).append((name, label.removesuffix("}").encode()))
    read_samples = samples(wanted)

    def read(page: bytes) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric, labels, value in read_samples(page):
            for name, label in wanted[metric]:
                if labels is None or label in labels:
                    found[name] = found.get(name, 0.0) + value
        return {name: value for name, value in found.items() if abs(value) < LARGEST}

    return read


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
