"""Compute how long a busy engine may pause before the pause counts as a stall.

A pause that resembles earlier ones is allowed up to a length that they would not exceed. One of a
new kind is a stall before the timeout only if the engine uses hardly any processor time and such a
pause is not chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_ERROR_CHANCE = 0.05
"""Maximum probability that any usual pause in the life of an engine exceeds the bound."""
MIN_PAUSES = 2
"""Minimum number of pauses for a bound: a single pause does not show how much pauses differ."""
MAX_DEGREES_OF_FREEDOM = 100
"""Maximum degrees of freedom. More change the quantile by less than a hundredth."""
_SAMPLING_DEVIATION = 1 / math.sqrt(6)
"""Standard deviation of a length that is measured between two samples, in sample intervals."""


class UsualPauses:
    """Prediction bound (Student's t) for the next pause, from the logarithms of earlier pauses.

    After ``n`` pauses, a usual one exceeds it with probability ``MAX_ERROR_CHANCE / (n (n + 1))``,
    in total :data:`MAX_ERROR_CHANCE` (Hahn and Meeker, *Statistical Intervals*).
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = self._resolution_s = 0.0
        self.bound_s = math.inf
        """Length in seconds that no usual pause exceeds; infinite if there are too few pauses."""

    @property
    def is_known(self) -> bool:
        """Whether enough pauses are known for a bound."""
        return self._count >= MIN_PAUSES

    def add(self, pause_s: float, resolution_s: float) -> None:
        """Add a pause of ``pause_s`` seconds, measured to within ``resolution_s`` seconds."""
        self._count += 1
        off = math.log(pause_s) - self._mean
        self._mean += off / self._count
        self._squares += off * (math.log(pause_s) - self._mean)
        self._resolution_s = max(self._resolution_s, resolution_s)
        if not self.is_known:
            return
        count, degrees_of_freedom = self._count, self._count - 1
        quantile = compute_student_t_quantile(
            MAX_ERROR_CHANCE / (count * (count + 1)),
            min(degrees_of_freedom, MAX_DEGREES_OF_FREEDOM),
        )
        # Sampling adds variance: a few measured lengths may agree by chance.
        measured = _SAMPLING_DEVIATION * self._resolution_s / math.exp(self._mean)
        deviation = max(measured, math.sqrt(self._squares / degrees_of_freedom))
        highest = self._mean + quantile * deviation * math.sqrt(1 + 1 / count)
        self.bound_s = math.exp(min(highest, 700.0))


def compute_student_t_tail(t: float, degrees_of_freedom: int) -> float:
    """Return the chance that Student's t exceeds ``t`` (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees_of_freedom))
    cosine, odd = math.cos(angle), degrees_of_freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, degrees_of_freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return (1 - inside) / 2


def compute_student_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Return the value that Student's t exceeds with ``probability``, which is at most 1/2."""
    low, high = 0.0, 1.0
    while compute_student_t_tail(high, degrees_of_freedom) > probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if compute_student_t_tail(middle, degrees_of_freedom) > probability
            else (low, middle)
        )
    return high


LONG_PAUSE_S = 3.0
"""Minimum length of a long pause: a step of milliseconds grew to a compilation or a hang."""


@dataclass(frozen=True, slots=True)
class PauseDemand:
    """Demand on the engine during a pause; 0 for a value that the engine does not report."""

    inflight: int = 0
    prompt_tokens: int = 0


class PauseHistory:
    """Demand, longest pause, distribution of long pauses, and rate of steps so far.

    It applies to demand up to the highest in it: more requests or prompt tokens may take longer.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._most = PauseDemand()
        self.usual = UsualPauses()
        self.steps = 0
        self.served_s = 0.0

    def add(
        self,
        silent_s: float,
        demand: PauseDemand,
        steps: int = 1,
        computed: bool = False,
        interval_s: float = 0.0,
    ) -> None:
        """Add a pause that ended with progress, the longest among ``steps`` steps.

        It lasted at least ``silent_s``, and at most ``interval_s`` longer. If the engine
        ``computed``, for example to compile, it counts only for the rate of steps and the demand.
        """
        seconds = silent_s + interval_s
        self.steps += max(1, steps)
        self.served_s += seconds
        if not computed:
            self.longest_s = max(self.longest_s, seconds)
            if silent_s >= LONG_PAUSE_S:
                self.usual.add(seconds, interval_s)
        self._most = PauseDemand(
            max(self._most.inflight, demand.inflight),
            max(self._most.prompt_tokens, demand.prompt_tokens),
        )

    def add_service(self, seconds: float, steps: int) -> None:
        """Add ``steps`` that were completed within ``seconds`` without a known pause."""
        self.steps += max(0, steps)
        self.served_s += seconds

    def compute_pause_probability(self, seconds: float, min_service_s: float = 0.0) -> float:
        """Return the probability of a pause of ``seconds`` or more (Lomax distribution's tail).

        The rate of steps is taken over at least ``min_service_s``.
        """
        return math.exp(-self.steps * math.log1p(seconds / max(self.served_s, min_service_s)))

    def has_seen(self, demand: PauseDemand) -> bool:
        """Report whether the engine has already made pauses under at least this demand."""
        return (
            demand.inflight <= self._most.inflight
            and demand.prompt_tokens <= self._most.prompt_tokens
        )


PAUSE_MARGIN_S = 4.0
"""Margin above the longest pause. A stall is then confirmed within 10 s, including sampling."""
LONG_SERVICE_S, LONG_SERVICE_LIMIT_S = 240.0, 8.0
"""After this time of service, a pause of the second time is unusual: with the scrape interval of
the page, a stall is confirmed within 20 s."""
SHORT_SERVICE_S, SHORT_SERVICE_LIMIT_S = 60.0, 21.0
"""The same for an engine after its first minute, or with an idle processor, and for new demand: a
stall is confirmed within 30 s."""
MAX_CHANCE_PROBABILITY = 1e-6
"""Maximum probability, at the observed rate of steps, of a pause that is not chance: 36 steps in
the first minute suffice, or 421 in four."""
COMPUTING_EXTRA_S, MIN_COMPUTING_CPU_SHARE = 50.0, 0.25
"""Extra time for a process that uses this share of a core, and may be compiling. The first log
probabilities of vLLM 0.32 take 30 to 45 s on a slow CPU."""

MAX_IDLE_CPU_SHARE = 0.1
"""Share of a core below which an engine is idle: it polls, and may have worked just before a
hang."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Present pause. ``cpu_s`` is the processor time since its start; None if unknown."""

    seconds: float
    demand: PauseDemand
    cpu_s: float | None = None

    @property
    def is_computing(self) -> bool:
        """Whether the engine is using the CPU; False if unknown."""
        return self._cpu_share is not None and self._cpu_share >= MIN_COMPUTING_CPU_SHARE

    @property
    def is_idle(self) -> bool:
        """Whether the engine uses hardly any processor time; False if unknown."""
        return self._cpu_share is not None and self._cpu_share < MAX_IDLE_CPU_SHARE

    @property
    def _cpu_share(self) -> float | None:
        if self.cpu_s is None:
            return None
        return self.cpu_s / self.seconds if self.seconds > 0 else 0.0


def find_pause_limit(pause: Pause, history: PauseHistory, timeout_s: float) -> tuple[float, str]:
    """Return the longest allowed pause in seconds, and the reason to append to a sentence."""
    if pause.cpu_s is None:
        limit_s, reason = _find_limit_from_history(pause, history)
    else:
        limit_s, reason = _find_limit_from_cpu_time(pause, history)
        if pause.is_computing and limit_s < timeout_s:
            limit_s += COMPUTING_EXTRA_S
            reason += (
                f"; the engine used the CPU throughout, so the limit was {COMPUTING_EXTRA_S:.0f} "
                "s longer"
            )
    return (limit_s, reason) if limit_s < timeout_s else (timeout_s, "")


def _find_limit_from_history(pause: Pause, history: PauseHistory) -> tuple[float, str]:
    if not history.has_seen(pause.demand):
        return math.inf, ""
    limit_s = max(history.usual.bound_s, history.longest_s + PAUSE_MARGIN_S)
    return limit_s, _describe_longest(history)


def _find_limit_from_cpu_time(pause: Pause, history: PauseHistory) -> tuple[float, str]:
    longest = history.longest_s + PAUSE_MARGIN_S
    if history.usual.is_known:
        # A usual pause may last longer, but not much longer than a pause of a new kind.
        longest = max(longest, min(history.usual.bound_s, SHORT_SERVICE_LIMIT_S))
    served_s = max(LONG_SERVICE_LIMIT_S, longest)
    served = history.has_seen(pause.demand) and history.served_s >= LONG_SERVICE_S
    if served and history.compute_pause_probability(served_s) <= MAX_CHANCE_PROBABILITY:
        return served_s, _describe_longest(history)
    begun_s = max(SHORT_SERVICE_LIMIT_S, longest)
    begun = history.served_s >= SHORT_SERVICE_S or pause.is_idle
    chance = history.compute_pause_probability(begun_s, SHORT_SERVICE_S)
    if begun and chance <= MAX_CHANCE_PROBABILITY:
        return begun_s, "; at the rate of steps so far, such a pause is not chance"
    return math.inf, ""


def _describe_longest(history: PauseHistory) -> str:
    seconds = "less than 1 s" if history.longest_s < 1 else f"{history.longest_s:.0f} s"
    return f"; the longest pause at comparable load was {seconds}"
