"""Compute how long a busy engine may pause before the pause counts as a stall.

If its processor time is unknown, only the timeout decides. Otherwise, a pause that is longer than
all earlier ones is a stall before the timeout if such a pause is not chance at the rate of steps so
far. An engine that uses the CPU gets more time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONG_PAUSE_S = 3.0
"""Minimum length of a long pause: a step of milliseconds grew to a compilation or a hang."""
MIN_LONG_PAUSES = 2
"""Number of long pauses from which the next one may be much longer: pauses differ."""


class PauseHistory:
    """Longest pause, number of long pauses, and rate of steps so far.

    If the engine computed during a pause, for example to compile, it counts only for the rate.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.num_long = 0
        self.steps = 0
        self.served_s = 0.0

    def add(
        self, silent_s: float, steps: int = 1, computed: bool = False, interval_s: float = 0.0
    ) -> None:
        """Add a pause that ended with progress, the longest among ``steps`` steps.

        It lasted at least ``silent_s``, and at most ``interval_s`` longer.
        """
        self.add_service(silent_s + interval_s, max(1, steps))
        if not computed:
            self.longest_s = max(self.longest_s, silent_s + interval_s)
            self.num_long += silent_s >= LONG_PAUSE_S

    def add_service(self, seconds: float, steps: int) -> None:
        """Add ``steps`` that were completed within ``seconds`` without a known pause."""
        self.steps += max(0, steps)
        self.served_s += seconds

    def compute_pause_probability(self, seconds: float) -> float:
        """Return the probability of a pause of ``seconds`` or more (Lomax distribution's tail).

        The rate of steps is taken over at least :data:`SHORT_SERVICE_S`.
        """
        return math.exp(-self.steps * math.log1p(seconds / max(self.served_s, SHORT_SERVICE_S)))


PAUSE_MARGIN_S = 4.0
"""Margin above the longest pause. A stall is then confirmed within 10 s, including sampling."""
LONG_SERVICE_S, LONG_SERVICE_LIMIT_S = 240.0, 8.0
"""After this time of service, a pause of the second time is unusual: with the scrape interval of
the page, a stall is confirmed within 20 s."""
SHORT_SERVICE_S, SHORT_SERVICE_LIMIT_S = 60.0, 21.0
"""The same for an engine after its first minute, or with an idle processor: a stall is confirmed
within 30 s."""
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
        return timeout_s, ""
    limit_s, reason = _find_unusual_length(pause, history)
    if pause.is_computing and limit_s < timeout_s:
        limit_s += COMPUTING_EXTRA_S
        reason += (
            f"; the engine used the CPU throughout, so the limit was {COMPUTING_EXTRA_S:.0f} s "
            "longer"
        )
    return (limit_s, reason) if limit_s < timeout_s else (timeout_s, "")


def _find_unusual_length(pause: Pause, history: PauseHistory) -> tuple[float, str]:
    longest_s = history.longest_s + PAUSE_MARGIN_S
    if history.num_long >= MIN_LONG_PAUSES:
        longest_s = max(longest_s, SHORT_SERVICE_LIMIT_S)
    served_s = max(LONG_SERVICE_LIMIT_S, longest_s)
    served = history.served_s >= LONG_SERVICE_S
    if served and history.compute_pause_probability(served_s) <= MAX_CHANCE_PROBABILITY:
        seconds = "less than 1 s" if history.longest_s < 1 else f"{history.longest_s:.0f} s"
        return served_s, f"; the longest pause so far was {seconds}"
    begun_s = max(SHORT_SERVICE_LIMIT_S, longest_s)
    begun = history.served_s >= SHORT_SERVICE_S or pause.is_idle
    if begun and history.compute_pause_probability(begun_s) <= MAX_CHANCE_PROBABILITY:
        return begun_s, "; at the rate of steps so far, such a pause is not chance"
    return math.inf, ""
