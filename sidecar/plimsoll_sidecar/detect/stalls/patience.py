"""How long a silence under load may last before it is a stall.

Never longer than the configured timeout. A service's own history shortens it: a step counter that
moves hundreds of times a second says in minutes what a service does not do.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_sidecar.detect.stalls.step_gaps import MIN_GAPS, Demand, StepGaps

MARGIN_S = 4.0
"""Beyond the longest gap of a long history: with sampling and a round to confirm, within 10 s."""
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

    ``computes`` says that the engine did so all the while, ``rests`` that it is known to have used
    hardly any processor time; ``read`` that its steps are read from a page at intervals, so that
    short pauses do not show.
    """

    seconds: float
    demand: Demand
    read: bool = False
    computes: bool = False
    rests: bool = False


def patience(silence: Silence, gaps: StepGaps, timeout_s: float) -> tuple[float, str]:
    """Seconds, and the reason where it is not the timeout alone."""
    limit_s, reason = _by_history(silence, gaps, timeout_s)
    if silence.read and silence.computes and limit_s < timeout_s:
        limit_s += WORKING_S
        reason += f"; it used the CPU throughout, so the limit was {WORKING_S:.0f} s longer"
    return min(limit_s, timeout_s), reason


def computes(cpu_s: float | None, seconds: float) -> bool:
    """Whether so much processor time was spent in ``seconds`` that something was worked on."""
    return cpu_s is not None and seconds > 0 and cpu_s >= WORKING_SHARE * seconds


def rests(cpu_s: float | None, seconds: float) -> bool:
    """Whether it is known that hardly any processor time was spent in ``seconds``."""
    return cpu_s is not None and cpu_s < RESTING_SHARE * seconds


def _seconds(pause: float) -> str:
    return "less than 1 s" if pause < 1 else f"{pause:.0f} s"


def _by_history(silence: Silence, gaps: StepGaps, timeout_s: float) -> tuple[float, str]:
    longest = gaps.longest + MARGIN_S
    covered = gaps.covers(silence.demand)
    usual = f"; the longest pause at comparable load was {_seconds(gaps.longest)}"
    if covered and gaps.enough:
        least = SERVED_PATIENCE_S if silence.read else 0.0
        return max(least, longest), usual
    known = not silence.read and gaps.steps >= MIN_GAPS
    served_s = max(SERVED_PATIENCE_S, longest)
    if covered and gaps.served_s >= SERVED_S and (known or gaps.chance(served_s) <= MAX_CHANCE):
        return served_s, usual
    begun_s = max(BEGUN_PATIENCE_S, longest)
    begun = gaps.served_s >= BEGUN_S or silence.rests
    if silence.read and begun and gaps.chance(begun_s, BEGUN_S) <= MAX_CHANCE:
        return begun_s, "; at its rate of steps so far, such a pause is not chance"
    return timeout_s, ""
