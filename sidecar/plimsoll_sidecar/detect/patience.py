"""The longest pause of a busy engine that is not yet a stall.

It never exceeds the configured timeout. A shorter pause is a stall if nothing else explains it. A
pause that resembles earlier pauses is explained up to a length that they would not exceed. A
pause of a new kind needs evidence: an engine that uses hardly any processor time works on nothing,
and its many steps without such a pause rule out chance. An engine that computes may compile. If its
processor time is unknown, only the timeout decides.

The history (:class:`StepGaps`) contains the pauses between two signs of progress while requests
were running. It covers only the demand that it contains. With more requests or more new prompt
tokens than ever before, a longer pause may be a long prefill or a compilation.

:class:`UsualPauses` bounds the next pause by the lengths of all earlier pauses. Lengths vary by a
factor rather than by seconds, so their logarithms are taken as normal, with unknown mean and
variance. The next logarithm then has Student's t distribution (the prediction interval of Hahn and
Meeker, *Statistical Intervals*). Pauses that are all alike allow little more than the longest. A
few that differ allow many times as much.

Each pause is compared with the bound from the earlier pauses. After ``n`` pauses it exceeds the
bound by chance with probability ``MISTAKEN / (n (n + 1))``. These probabilities add up to
``MISTAKEN`` over the whole life of an engine, however many pauses it makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MISTAKEN = 0.05
"""Probability that any usual pause in an engine's life exceeds its bound."""
MIN_PAUSES = 2
"""A single pause does not show how much pauses differ."""
MAX_FREEDOM = 100
"""Maximum degrees of freedom. More would change the quantile by less than a hundredth."""
_SAMPLED = 1 / math.sqrt(6)
"""Standard deviation of a length that starts and ends between two samples, in intervals."""


class UsualPauses:
    """Running mean and variance of the logarithms of the pauses (Welford)."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = self._resolution_s = 0.0
        self.bound_s = math.inf
        """Length in seconds that no usual pause exceeds; infinite with too few pauses."""

    @property
    def known(self) -> bool:
        """Whether there are enough pauses for a bound."""
        return self._count >= MIN_PAUSES

    def add(self, seconds: float, resolution_s: float) -> None:
        """Add a pause whose start and end were each measured within ``resolution_s``."""
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
        # Sampling adds variance: a few measured lengths may agree by chance.
        measured = _SAMPLED * self._resolution_s / math.exp(self._mean)
        deviation = max(measured, math.sqrt(self._squares / freedom))
        return math.exp(min(self._mean + quantile * deviation * math.sqrt(1 + 1 / count), 700.0))


def student_t_tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t exceeds ``t``, for whole degrees of freedom.

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
    """Return the value that Student's t exceeds with the probability ``chance``, at most 1/2."""
    low, high = 0.0, 1.0
    while student_t_tail(high, freedom) > chance:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_tail(middle, freedom) > chance else (low, middle)
    return high


LONG_PAUSE_S = 3.0
"""Steps take milliseconds, or a second with a large prompt. A longer step compiles, moves much
memory, waits for another process, or hangs."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand on the engine during a pause; 0 if the engine does not report it."""

    under_way: int = 0
    prompt_tokens: int = 0


class StepGaps:
    """The history of pauses: the longest, the distribution of long ones, and the rate of steps."""

    def __init__(self) -> None:
        self._longest = 0.0
        self._most = Demand()
        self.usual = UsualPauses()
        self.steps = 0
        self.served_s = 0.0

    def add(
        self,
        silent_s: float,
        demand: Demand,
        steps: int = 1,
        computed: bool = False,
        interval_s: float = 0.0,
    ) -> None:
        """Add a pause that ended in progress.

        It was in the last of ``steps``, none of which took longer. It lasted ``silent_s``, and
        ended within ``interval_s`` after that. A pause in which the engine ``computed`` counts only
        for the rate and the demand: it was a compilation, for example.
        """
        seconds = silent_s + interval_s
        self.steps += max(1, steps)
        self.served_s += seconds
        if not computed:
            self._longest = max(self._longest, seconds)
            if silent_s >= LONG_PAUSE_S:
                self.usual.add(seconds, interval_s)
        self._most = Demand(
            max(self._most.under_way, demand.under_way),
            max(self._most.prompt_tokens, demand.prompt_tokens),
        )

    def serve(self, seconds: float, steps: int) -> None:
        """Add ``steps`` over a time, from pages that do not show single pauses."""
        self.steps += max(0, steps)
        self.served_s += seconds

    @property
    def longest(self) -> float:
        """The longest pause in seconds."""
        return self._longest

    def chance(self, seconds: float, least_s: float = 0.0) -> float:
        """Return the probability of a pause of this length, by the rate of the steps.

        It is the predictive distribution of an exponential model with the observed rate (Lomax).
        Less service than ``least_s`` counts as if it had taken that long.
        """
        if self.served_s <= 0.0:
            return 1.0
        return math.exp(-self.steps * math.log1p(seconds / max(self.served_s, least_s)))

    def covers(self, demand: Demand) -> bool:
        """Return whether the history contains this demand."""
        return (
            demand.under_way <= self._most.under_way
            and demand.prompt_tokens <= self._most.prompt_tokens
        )


MARGIN_S = 4.0
"""Margin above the longest pause: with sampling and confirmation, within 10 s."""
SERVED_S, SERVED_PATIENCE_S = 240.0, 8.0
"""After this service (five minutes with idle moments), a pause of this length is unusual. It must
also exceed the longest one and its margin: with the page's period and a round, within 20 s."""
BEGUN_S, BEGUN_PATIENCE_S = 60.0, 21.0
"""The same after the first minute, and for a new demand: within 30 s. It also holds in the first
minute while the engine uses no processor time: new work that takes long is computed."""
MAX_CHANCE = 1e-6
"""Probability, by the rate of the steps, below which a pause is not chance. Pages show no single
pauses. 36 steps suffice in the first minute, in however few seconds, and 421 in four minutes."""
WORKING_S, WORKING_SHARE = 50.0, 0.25
"""Extra time for a process that uses this share of one core: it may compile for a new kind of
request, or spin forever. Measured on vLLM 0.32 on a slow CPU: the first request with log
probabilities takes 30 s, and 45 s beside other work."""

RESTING_SHARE = 0.1
"""Share of one core below which an engine rests: it polls, and its last two seconds before it hung
may count."""


@dataclass(frozen=True, slots=True)
class Silence:
    """The current pause. ``cpu_s`` is the processor time spent in it, None if unknown."""

    seconds: float
    demand: Demand
    cpu_s: float | None = None

    @property
    def is_computing(self) -> bool:
        """Whether the processor time proves that the engine worked."""
        return self.cpu_s is not None and self._share >= WORKING_SHARE

    @property
    def rests(self) -> bool:
        """Whether hardly any processor time was used; False if it is unknown."""
        return self.cpu_s is not None and self._share < RESTING_SHARE

    @property
    def _share(self) -> float:
        if self.cpu_s is None or self.seconds <= 0:
            return 0.0
        return self.cpu_s / self.seconds


def patience(silence: Silence, gaps: StepGaps, timeout_s: float) -> tuple[float, str]:
    """Return the limit of the pause in seconds, and its reason if it is below the timeout."""
    if silence.cpu_s is None:
        limit_s, reason = _by_pauses(silence, gaps)
    else:
        limit_s, reason = _by_witness(silence, gaps)
        if silence.is_computing and limit_s < timeout_s:
            limit_s += WORKING_S
            reason += f"; it used the CPU throughout, so the limit was {WORKING_S:.0f} s longer"
    return (limit_s, reason) if limit_s < timeout_s else (timeout_s, "")


def _by_pauses(silence: Silence, gaps: StepGaps) -> tuple[float, str]:
    if not gaps.covers(silence.demand):
        return math.inf, ""
    return max(gaps.usual.bound_s, gaps.longest + MARGIN_S), _longest(gaps)


def _by_witness(silence: Silence, gaps: StepGaps) -> tuple[float, str]:
    longest = gaps.longest + MARGIN_S
    if gaps.usual.known:
        # A usual pause may last longer, but not much longer than a pause of a new kind.
        longest = max(longest, min(gaps.usual.bound_s, BEGUN_PATIENCE_S))
    served_s = max(SERVED_PATIENCE_S, longest)
    served = gaps.covers(silence.demand) and gaps.served_s >= SERVED_S
    if served and gaps.chance(served_s) <= MAX_CHANCE:
        return served_s, _longest(gaps)
    begun_s = max(BEGUN_PATIENCE_S, longest)
    begun = gaps.served_s >= BEGUN_S or silence.rests
    if begun and gaps.chance(begun_s, BEGUN_S) <= MAX_CHANCE:
        return begun_s, "; at its rate of steps so far, such a pause is not chance"
    return math.inf, ""


def _longest(gaps: StepGaps) -> str:
    seconds = "less than 1 s" if gaps.longest < 1 else f"{gaps.longest:.0f} s"
    return f"; the longest pause at comparable load was {seconds}"
