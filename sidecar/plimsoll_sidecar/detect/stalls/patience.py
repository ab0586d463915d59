"""How long a silence under load may last before it is a stall.

Never longer than the configured timeout. Below it a silence is a stall when nothing else explains
it. A pause like those that the service made before is explained by them, up to the length that none
of them would exceed. A pause of a new kind needs a witness: an engine known to use hardly any
processor time works on nothing, and its many steps without such a pause speak against chance. One
that computes may compile. Of one whose processor time is unknown, only the timeout may judge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plimsoll_sidecar.detect.stalls.step_gaps import Demand, StepGaps

MARGIN_S = 4.0
"""Beyond the longest pause so far: with sampling and a round to confirm, within 10 s."""
SERVED_S, SERVED_PATIENCE_S = 240.0, 8.0
"""After five minutes of service, moments without work among them, a silence of this length, or of
the longest pause and its margin, is none that a service makes: with the page's period and a round
of doubt within 20 s."""
BEGUN_S, BEGUN_PATIENCE_S = 60.0, 28.0
"""After the first minute, and where more is asked for at once than ever before: within 45 s. In the
first minute too while the engine rests: what is new to it then, and takes long, it computes."""
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
