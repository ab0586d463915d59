"""Parse and format Kubernetes quantities and durations, in bytes and seconds."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

DAY_S = 86_400.0
_SUFFIX_FACTORS = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12),
    "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40),
    "Pi": Fraction(2**50), "Ei": Fraction(2**60),
}  # fmt: skip
_QUANTITY_PATTERN = re.compile(
    r"^([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d{1,2})|([numkMGTPE]|[KMGTPE]i)?)$", re.ASCII
)
MAX_QUANTITY_CHARS = 64
"""Maximum length of a quantity. With the limit of two digits for exponents, it bounds the parsing
time."""
MAX_WHOLE_NUMBER_DIGITS = 18
"""Maximum number of digits of a whole number, so that it fits into 63 bits."""
_DURATION_PART_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_DURATION_PATTERN = re.compile(r"^(?:\d+(?:\.\d+)?(?:ms|h|m|s))+$")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_whole_number(text: str) -> int | None:
    """Parse a number of at most 18 ASCII digits; return None for any other text."""
    return (
        int(text)
        if len(text) <= MAX_WHOLE_NUMBER_DIGITS and text.isascii() and text.isdigit()
        else None
    )


def parse_quantity(value: str | int | float) -> Fraction:
    """Parse a Kubernetes quantity exactly, for example ``512Mi``, ``1.5G`` or ``100m``.

    Raises ValueError for an invalid quantity. Source: ``k8s.io/apimachinery/pkg/api/resource``.
    """
    written = str(value)
    match = _QUANTITY_PATTERN.match(written) if len(written) <= MAX_QUANTITY_CHARS else None
    if match is None:
        raise ValueError(
            f"{written[:MAX_QUANTITY_CHARS]!r} is not a valid quantity: use a value such as 512Mi"
            " or 2Gi"
        )
    number, exponent, suffix = match.groups()
    if exponent:
        return Fraction(Decimal(number + exponent))
    return Fraction(number) * _SUFFIX_FACTORS[suffix or ""]


def parse_bytes(text: str | int) -> int:
    """Parse a memory quantity to bytes, rounded up. Raises ValueError for an invalid quantity."""
    value = parse_quantity(text)
    return -((-value.numerator) // value.denominator)


def parse_duration(text: str) -> float:
    """Parse a duration such as ``90s``, ``1h30m`` or ``250ms`` to seconds. Raises ValueError."""
    if not _DURATION_PATTERN.match(text):
        raise ValueError(f"{text!r} is not a valid duration: use a value such as 90s, 10m or 1h30m")
    return sum(float(n) * _UNIT_S[unit] for n, unit in _DURATION_PART_PATTERN.findall(text))


def format_duration(seconds: float) -> str:
    """Format seconds as a whole number in the largest possible unit: ``24h``, ``90s``."""
    for unit in ("h", "m", "s"):
        if seconds % _UNIT_S[unit] == 0 and seconds:
            return f"{seconds / _UNIT_S[unit]:.0f}{unit}"
    return f"{round(seconds * 1000)}ms" if seconds else "0s"


def format_remaining_time(seconds: float) -> str:
    """Format a remaining time for people: ``12 days``, or ``31 hours`` below two days."""
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:.0f} days"
    return f"{seconds / 3600:.0f} hours"


def format_span(seconds: float) -> str:
    """Format seconds for people: ``45 s``, ``12 min``, ``3 h``, ``4 d``."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 2 * DAY_S)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / DAY_S:.0f} d"


def format_bytes(value: float) -> str:
    """Format a size in bytes for people, in binary units: ``1.5 GiB``, ``-312 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return (
                f"{value:.0f} {unit}" if abs(value) >= 100 or unit == "B" else f"{value:.1f} {unit}"
            )
        value /= 1024
    return f"{value:.1f} TiB"


def format_change(value: float) -> str:
    """Format a change in bytes for people: ``1.5 GiB more``, ``312 KiB less``."""
    return f"{format_bytes(abs(value))} {'less' if value < 0 else 'more'}"
