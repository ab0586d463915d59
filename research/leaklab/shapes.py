"""How leaks grow: the share of its budget that one has spent, by the share of its time.

Each is nought at nought and one at one, and goes on beyond. A shape takes a seed, which most of
them do not need.
"""

from __future__ import annotations

import math
import operator
import random
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, pairwise

from leaklab import rhythms
from leaklab.series import Curve


def _quickening(seed: int) -> Curve:
    return lambda x: x**1.6


LOG_5 = math.log(5)


def _slowing(seed: int) -> Curve:
    return lambda x: math.log1p(4 * x) / LOG_5


def _in_waves(seed: int) -> Curve:
    """Three waves until one is reached, of a rate between nearly nothing and twice the mean."""
    wave = 6 * math.pi
    return lambda x: x - 0.9 * math.sin(wave * x) / wave


LUMPS = 14


def _in_lumps(seed: int) -> Curve:
    """Rare events that each leak at once, at uneven times and of uneven sizes, the same again
    after one is reached."""
    rng = random.Random(seed)
    times = [(number + rng.random()) / LUMPS for number in range(LUMPS)]
    totals = [0.0, *accumulate(rng.uniform(0.3, 1.7) for _ in times)]

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        return whole + totals[bisect_right(times, part)] / totals[-1]

    return curve


def _by_ratchet(seed: int) -> Curve:
    """A clean-up comes 11 times until one is reached, and finds two fifths of what came since."""

    def curve(x: float) -> float:
        whole, part = divmod(11.5 * x, 1.0)
        return (whole + part / 0.6) / (11 + 0.5 / 0.6)

    return curve


TABLE, FIRST = 0.4, 1 / 64
"""A table's share of what is spent when it is full, and the smallest table, in shares of that."""


def _by_doubling(seed: int) -> Curve:
    """Entries of a table that is never emptied: they come evenly, and the table is made twice as
    large whenever it is full."""

    def curve(x: float) -> float:
        slots = FIRST * 2 ** math.ceil(math.log2(max(1.0, x / FIRST))) if x else 0.0
        return (1 - TABLE) * x + TABLE * slots

    return curve


SPELLS = 5


def _in_spells(seed: int) -> Curve:
    """Only while one feature is in use: in spells of uneven lengths, each at a rate of its own,
    the same again after one is reached. A spell is a third to two thirds of its turn."""
    rng = random.Random(seed)
    begins = list(accumulate((rng.uniform(0.5, 1.5) for _ in range(SPELLS)), initial=0.0))
    lasts = [rng.uniform(0.33, 0.67) * (b - a) for a, b in pairwise(begins)]
    grown = [0.0, *accumulate(rng.uniform(0.5, 1.5) for _ in lasts)]

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        at = part * begins[-1]
        number = bisect_right(begins, at) - 1
        done = min(1.0, (at - begins[number]) / lasts[number])
        return whole + (grown[number] + done * (grown[number + 1] - grown[number])) / grown[-1]

    return curve


STAIRS = 18


def _in_stairs(seed: int) -> Curve:
    """What comes at even intervals, such as an update of the weights, leaks a block of one size
    each time."""
    return lambda x: math.floor(STAIRS * x) / STAIRS


RENEWALS = 4
EXHAUSTED = 3.0
"""How often a rate falls to 1/e of itself until it is renewed."""


def _renewed(seed: int) -> Curve:
    """What has not been met yet gets rarer, until a release brings new things to meet: the rate
    falls, and is renewed at uneven times, the same again after one is reached."""
    rng = random.Random(seed)
    begins = list(accumulate((rng.uniform(0.6, 1.4) for _ in range(RENEWALS)), initial=0.0))
    grown = [0.0, *accumulate(rng.uniform(0.6, 1.4) for _ in range(RENEWALS))]

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        at = part * begins[-1]
        number = bisect_right(begins, at) - 1
        age = (at - begins[number]) / (begins[number + 1] - begins[number])
        met = math.expm1(-EXHAUSTED * age) / math.expm1(-EXHAUSTED)
        return whole + (grown[number] + met * (grown[number + 1] - grown[number])) / grown[-1]

    return curve


SWELLS = ((1, 0.4), (2, 0.3), (5, 0.25))
"""How often each comes until one is reached, and its share of the mean rate."""


def _in_swells(seed: int) -> Curve:
    """Several rhythms at once: the rate is from nearly nothing to nearly twice the mean."""
    rng = random.Random(seed)
    waves = [(2 * math.pi * often, part, rng.uniform(0, 2 * math.pi)) for often, part in SWELLS]

    def curve(x: float) -> float:
        return x - sum(
            part / wave * (math.cos(wave * x + phase) - math.cos(phase))
            for wave, part, phase in waves
        )

    return curve


EVENTS, LARGEST = 60, 12.0
"""Until one is reached, and how often the smallest the largest may be."""


def _unevenly(seed: int) -> Curve:
    """Events at any time, most of them small and a few large (a power law), the same again after
    one is reached."""
    rng = random.Random(seed)
    times = sorted(rng.random() for _ in range(EVENTS))
    sizes = (min(LARGEST, rng.paretovariate(1.2)) for _ in times)
    totals = [0.0, *accumulate(sizes)]

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        return whole + totals[bisect_right(times, part)] / totals[-1]

    return curve


def _piecewise(begins: list[float], rates: list[float]) -> Curve:
    """One rate after another, each from its begin until the next; scaled to be one at one."""
    lasts = (after - begin for begin, after in pairwise([*begins, 1.0]))
    grown: list[float] = [0.0, *accumulate(map(operator.mul, rates, lasts))]

    def curve(x: float) -> float:
        number = bisect_right(begins, x) - 1
        done: float = grown[number] + rates[number] * (x - begins[number])
        return done / grown[-1]

    return curve


def _in_regimes(seed: int) -> Curve:
    """Each change of the service or of its clients makes another rate, level until the next change:
    three to six of them (log-normal, standard deviation .6). The last one lasts."""
    rng = random.Random(seed)
    begins = [0.0, *sorted(rng.uniform(0.08, 0.92) for _ in range(rng.randint(2, 5)))]
    rates = [rng.lognormvariate(0, 0.6) for _ in begins]
    return _piecewise(begins, rates)


def _as_adopted(seed: int) -> Curve:
    """What leaks is a feature that few use at first, then more and more, and in the end all: the
    integral of a logistic curve."""
    rng = random.Random(seed)
    half, spread = rng.uniform(0.25, 0.55), rng.uniform(0.06, 0.12)

    def used(x: float) -> float:
        return math.log1p(math.exp((x - half) / spread))

    return lambda x: (used(x) - used(0.0)) / (used(1.0) - used(0.0))


GRAINS = 150


def _jittered(seed: int) -> Curve:
    """Many small events of sizes that differ, at any time, the same again after one is reached."""
    rng = random.Random(seed)
    times = sorted(rng.random() for _ in range(GRAINS))
    totals = [0.0, *accumulate(rng.gammavariate(0.6, 1.0) for _ in times)]

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        return whole + totals[bisect_right(times, part)] / totals[-1]

    return curve


CROWDS, EVEN = (6, 11), 40
"""The least and the most of them until one is reached, and how many events come between them."""


def _in_crowds(seed: int) -> Curve:
    """Events come in crowds, each of them dense at first and thinner then; some come between them.
    The same again after one is reached."""
    rng = random.Random(seed)
    times = [rng.random() for _ in range(EVEN)]
    for _ in range(rng.randint(*CROWDS)):
        begins, tau = rng.random(), rng.uniform(0.01, 0.06)
        times += [
            (begins + min(0.5, rng.expovariate(1 / tau))) % 1.0 for _ in range(rng.randint(6, 30))
        ]
    times.sort()

    def curve(x: float) -> float:
        whole, part = divmod(x, 1.0)
        return whole + bisect_right(times, part) / len(times)

    return curve


def _escalating(seed: int) -> Curve:
    """One tenant after another is moved over: the rate climbs in three to five steps, and the last
    one lasts."""
    rng = random.Random(seed)
    begins = [0.0, *sorted(rng.uniform(0.1, 0.85) for _ in range(rng.randint(2, 4)))]
    rates = list(accumulate(rng.uniform(0.3, 1.0) for _ in begins))
    return _piecewise(begins, rates)


SHARES: dict[str, Callable[[int], Curve]] = {
    "quickening": _quickening,
    "slowing": _slowing,
    "waves": _in_waves,
    "lumps": _in_lumps,
    "ratchet": _by_ratchet,
    "doubling": _by_doubling,
    "spells": _in_spells,
    "stairs": _in_stairs,
    "renewed": _renewed,
    "swells": _in_swells,
    "uneven": _unevenly,
    "regimes": _in_regimes,
    "adopted": _as_adopted,
    "jittered": _jittered,
    "crowds": _in_crowds,
    "escalating": _escalating,
    **rhythms.SHARES,
}
