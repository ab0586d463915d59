"""How long may a pause last that is like the earlier pauses of this service?

Lengths of pauses vary by a factor rather than by seconds: their logarithms are taken for normal,
with a mean and a variance that only this service's own pauses tell. Then the next one has Student's
t distribution (the prediction interval of Hahn and Meeker, *Statistical Intervals*). Pauses that
are all alike allow little more than the longest; a few that differ allow many times as much.

Each pause is compared with the bound of those before it. Its chance of exceeding it is
``MISTAKEN / (n (n + 1))`` after ``n`` of them, and the sum of that over all ``n`` is ``MISTAKEN``:
the error holds for the whole life of an engine, however many pauses it makes.
"""

from __future__ import annotations

import math

MISTAKEN = 0.05
"""The chance that any pause in an engine's life, drawn like those before it, exceeds its bound."""
MIN_PAUSES = 2
"""One pause says nothing of how much the pauses of a service differ."""
MAX_FREEDOM = 100
"""More degrees of freedom change the quantile by less than a hundredth."""
_SAMPLED = 1 / math.sqrt(6)
"""Deviation of a length that begins and ends between two samples, in intervals."""


class UsualPauses:
    """Mean and variance of the logarithms of the pauses so far (Welford)."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = self._resolution_s = 0.0
        self.bound_s = math.inf
        """Seconds that no pause like these exceeds; infinite while they say nothing."""

    @property
    def known(self) -> bool:
        """Whether there are enough pauses to say how long one of them may last."""
        return self._count >= MIN_PAUSES

    def add(self, seconds: float, resolution_s: float) -> None:
        """Take in a pause whose begin and end were each seen within ``resolution_s``."""
        self._count += 1
        off = math.log(seconds) - self._mean
        self._mean += off / self._count
        self._squares += off * (math.log(seconds) - self._mean)
        self._resolution_s = max(self._resolution_s, resolution_s)
        if self.known:
            self.bound_s = self._bound()

    def _bound(self) -> float:
        count, freedom = self._count, self._count - 1
        quantile = student_t_quantile(MISTAKEN / (count * (count + 1)), min(freedom, MAX_FREEDOM))
        # What was measured varies by the sampling as well. A few lengths may agree by chance.
        measured = _SAMPLED * self._resolution_s / math.exp(self._mean)
        deviation = max(measured, math.sqrt(self._squares / freedom))
        return math.exp(min(self._mean + quantile * deviation * math.sqrt(1 + 1 / count), 700.0))


def student_t_tail(t: float, freedom: int) -> float:
    """Return the chance that Student's t exceeds ``t``, for whole degrees of freedom.

    It is a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return (1 - inside) / 2


def student_t_quantile(chance: float, freedom: int) -> float:
    """Return what Student's t exceeds with a ``chance`` of at most one half."""
    low, high = 0.0, 1.0
    while student_t_tail(high, freedom) > chance:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_tail(middle, freedom) > chance else (low, middle)
    return high
