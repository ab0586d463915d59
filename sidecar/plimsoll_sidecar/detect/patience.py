"""How long a silence under load may last before it is a stall.

Never longer than the configured timeout. Below it a silence is a stall when nothing else explains
it. A pause like those that the service made before is explained by them, up to the length that none
of them would exceed. A pause of a new kind needs a witness: an engine known to use hardly any
processor time works on nothing, and its many steps without such a pause speak against chance. One
that computes may compile. Of one whose processor time is unknown, only the timeout may judge.

The history (:class:`StepGaps`) is that of the pauses between two signs of progress while work was
under way. It speaks only for what it has seen: with more requests under way, or more prompt tokens
taken in since the last step than ever before, a longer pause may be a long prefill or a
compilation.

How long a pause may last that is like the earlier ones (:class:`UsualPauses`) follows from their
lengths, which vary by a factor rather than by seconds: their logarithms are taken for normal, with
a mean and a variance that only this service's own pauses tell. Then the next one has Student's t
distribution (the prediction interval of Hahn and Meeker, *Statistical Intervals*). Pauses that are
all alike allow little more than the longest; a few that differ allow many times as much.

Each pause is compared with the bound of those before it. Its chance of exceeding it is ``MISTAKEN /
(n (n + 1))`` after ``n`` of them, and the sum of that over all ``n`` is ``MISTAKEN``: the error
holds for the whole life of an engine, however many pauses it makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


LONG_PAUSE_S = 3.0
"""Steps take milliseconds, or a second with a large prompt: one that takes longer compiles, moves
much at once, waits for another process, or hangs."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What was asked of the engine during a pause; zero where the engine does not tell."""

    under_way: int = 0
    prompt_tokens: int = 0


class StepGaps:
    """The longest pause, the long ones together, and how fast steps came."""

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
        """Take in a pause that ended in progress.

        It was in the last of ``steps``, none of which took longer. No progress showed for
        ``silent_s``, and the pause ended within the ``interval_s`` after that.

        One in which the engine ``computed`` is a compilation or the like: it says nothing of how
        long the engine is silent without it.
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
        """Count time in which ``steps`` were made, by pages that do not show how long each took."""
        self.steps += max(0, steps)
        self.served_s += seconds

    @property
    def longest(self) -> float:
        """The longest pause ever, in seconds."""
        return self._longest

    def chance(self, seconds: float, least_s: float = 0.0) -> float:
        """Return how likely a pause of this length is by the rate of the steps so far.

        It is the predictive distribution of an exponential model whose rate was learnt from them
        alone (Lomax). Steps of less than ``least_s`` count as if they had taken that long.
        """
        if self.served_s <= 0.0:
            return 1.0
        return math.exp(-self.steps * math.log1p(seconds / max(self.served_s, least_s)))

    def covers(self, demand: Demand) -> bool:
        """Whether as much was asked for at once before."""
        return (
            demand.under_way <= self._most.under_way
            and demand.prompt_tokens <= self._most.prompt_tokens
        )


MARGIN_S = 4.0
"""Beyond the longest pause so far: with sampling and a round to confirm, within 10 s."""
SERVED_S, SERVED_PATIENCE_S = 240.0, 8.0
"""After five minutes of service, moments without work among them, a silence of this length, or of
the longest pause and its margin, is none that a service makes: with the page's period and a round
of doubt within 20 s."""
BEGUN_S, BEGUN_PATIENCE_S = 60.0, 21.0
"""After the first minute, and where more is asked for at once than ever before: with the page's
period and a round within 30 s. In the first minute too while the engine rests: what is new to it
then, and takes long, it computes."""
MAX_CHANCE = 1e-6
"""A page does not show single pauses. There a silence counts that is as unlikely as this by the
rate of the steps so far: 36 steps in the first minute are enough for the patience of then, in
however few seconds of it they were made, 421 in four minutes for the later one."""
WORKING_S, WORKING_SHARE = 50.0, 0.25
"""A process that computes may compile for a request of a new kind, or spin for ever: processor
time of this share of one core buys this much once. Measured on vLLM 0.32 on a slow CPU: the first
request with logprobs takes 30 s, and 45 s beside other work."""

RESTING_SHARE = 0.1
"""Of one core: the polling of an engine that waits, and what it did until it hung, two seconds
after its last page."""


@dataclass(frozen=True, slots=True)
class Silence:
    """A pause that goes on.

    ``cpu_s`` is the processor time that the engine spent in it; None where that is unknown.
    """

    seconds: float
    demand: Demand
    cpu_s: float | None = None

    @property
    def computes(self) -> bool:
        """Whether so much processor time was spent that something was worked on."""
        return self.cpu_s is not None and self._share >= WORKING_SHARE

    @property
    def rests(self) -> bool:
        """Whether it is known that hardly any processor time was spent."""
        return self.cpu_s is not None and self._share < RESTING_SHARE

    @property
    def _share(self) -> float:
        if self.cpu_s is None or self.seconds <= 0:
            return 0.0
        return self.cpu_s / self.seconds


def patience(silence: Silence, gaps: StepGaps, timeout_s: float) -> tuple[float, str]:
    """Seconds, and the reason where it is not the timeout alone."""
    if silence.cpu_s is None:
        limit_s, reason = _by_pauses(silence, gaps)
    else:
        limit_s, reason = _by_witness(silence, gaps)
        if silence.computes and limit_s < timeout_s:
            limit_s += WORKING_S
            reason += f"; it used the CPU throughout, so the limit was {WORKING_S:.0f} s longer"
    return (limit_s, reason) if limit_s < timeout_s else (timeout_s, "")


def _by_pauses(silence: Silence, gaps: StepGaps) -> tuple[float, str]:
    """Return what the earlier pauses alone say: nothing of a pause of another kind."""
    if not gaps.covers(silence.demand):
        return math.inf, ""
    return max(gaps.usual.bound_s, gaps.longest + MARGIN_S), _longest(gaps)


def _by_witness(silence: Silence, gaps: StepGaps) -> tuple[float, str]:
    longest = gaps.longest + MARGIN_S
    if gaps.usual.known:
        # What a service does itself it may do longer, but not much longer than what is new to it.
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
