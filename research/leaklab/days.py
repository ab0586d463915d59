"""Days of a service: how many requests are in flight, minute by minute.

No two days are alike. A run and the day that was observed before it are days of the same service,
drawn apart: each begins at an hour of its own, some days are calm, rushes come at any time, and
until the run the traffic may have grown, and may go on growing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from itertools import accumulate

from leaklab.series import DAY, HOUR

MINUTE = 60.0
Rhythm = Callable[[float], float]
"""The share of a day's traffic, from 0 to about 1, by the hour of the day."""


def _peak(hour: float, at: float, width: float) -> float:
    """A peak at that hour, also where the night before or after is nearer."""
    return math.exp(-((((hour - at + 12) % 24 - 12) / width) ** 2))


def _office(hour: float) -> float:
    return min(1.0, _peak(hour, 10, 2.2) + 0.85 * _peak(hour, 15, 2.6))


def _commuters(hour: float) -> float:
    return _peak(hour, 8, 1.3) + 0.5 * _peak(hour, 13, 1.5) + 0.9 * _peak(hour, 18.5, 1.8)


def _evening(hour: float) -> float:
    return min(1.0, _peak(hour, 21, 2.8) + 0.35 * _peak(hour, 14, 4))


def _continents(hour: float) -> float:
    return 0.4 * _office(hour) + 0.35 * _office((hour + 8) % 24) + 0.5 * _office((hour + 16) % 24)


def _nightly_batch(hour: float) -> float:
    return 0.2 + 0.8 * (hour >= 22 or hour < 3.5)


def _full_hours(hour: float) -> float:
    """Jobs that someone's timetable starts at each full hour."""
    return 0.25 + 0.75 * math.exp(-(hour % 1) / 0.35)


def _level(hour: float) -> float:
    return 0.6


RHYTHMS: tuple[Rhythm, ...] = (
    _office,
    _commuters,
    _evening,
    _continents,
    _nightly_batch,
    _full_hours,
    _level,
)
MINUTES_A_DAY = 24 * 60


@cache
def _by_minute(rhythm: Rhythm) -> list[float]:
    """At each minute of the day."""
    return [rhythm(minute / 60) for minute in range(MINUTES_A_DAY)]


CALM, CALM_SHARE = (0.25, 0.6), 1 / 6
"""How much of its usual traffic a calm day has, and how many days are calm."""
RUSHES_A_DAY = 1.5
MOST_ASKED = 40.0
"""Of one engine; who comes beyond that is sent to another one."""


class Days:
    """The days from a run's start ``until`` its end, drawn from ``seed``; ``later`` ones have the
    traffic to which it has grown, or fallen, since the observed day. ``rng`` is for what happens in
    them."""

    def __init__(self, seed: str, until: float, later: bool = False) -> None:
        self.rng = random.Random(f"days/{seed}")
        self.until = until
        self.minutes = [MINUTE * number for number in range(int(until / MINUTE) + 1)]
        rng = self.rng
        self._began = rng.uniform(0, DAY)
        self._busy = [
            rng.uniform(*CALM) if rng.random() < CALM_SHARE else rng.lognormvariate(0, 0.2)
            for _ in range(int(until / DAY) + 2)
        ]
        self._grown = math.exp(rng.uniform(-0.25, 0.45)) if later else 1.0
        self._grows = rng.uniform(-0.05, 0.12) if later else 0.0

    def hour(self, t: float) -> float:
        """The hour of the day, from 0 to 24."""
        return (self._began + t) / HOUR % 24

    def times(self, apart: float) -> list[float]:
        """When something happens that comes that often on average, at any time."""
        at, times = self.rng.expovariate(1 / apart), list[float]()
        while at < self.until:
            times.append(at)
            at += self.rng.expovariate(1 / apart)
        return times

    def traffic(self, rhythm: Rhythm, low: float, high: float) -> list[float]:
        """Requests in flight at each of the minutes: ``low`` with nobody there, and about ``high``
        at the peak of a usual day. A day begins at four in the morning."""
        rng, wanders, points = self.rng, 0.0, list[float]()
        usual, first = _by_minute(rhythm), int(self._began / MINUTE)
        for number, crowd in enumerate(self._rushes()):
            wanders = 0.95 * wanders + rng.gauss(0, 0.045)
            day = (first + number - 4 * 60) // MINUTES_A_DAY
            grows = math.exp(wanders + self._grows * number / MINUTES_A_DAY)
            share = usual[(first + number) % MINUTES_A_DAY] * self._busy[day] * self._grown
            points.append(min(MOST_ASKED, low + (high - low) * share * crowd * grows))
        return points

    def usual_traffic(self, engine: random.Random) -> list[float]:
        """In a rhythm and of a size that ``engine`` draws."""
        return self.traffic(engine.choice(RHYTHMS), engine.uniform(0.8, 3.5), engine.uniform(8, 20))

    def _rushes(self) -> list[float]:
        """By how much the traffic of each minute is more than usual."""
        crowds = [1.0] * len(self.minutes)
        for at in self.times(DAY / RUSHES_A_DAY):
            more, lasts = self.rng.uniform(1.3, 2.0), self.rng.uniform(600, 5400)
            for number in range(int(at / MINUTE), min(len(crowds), int((at + lasts) / MINUTE))):
                crowds[number] = more
        return crowds


def worked_off(asked: list[float]) -> list[float]:
    """What was asked until each of the minutes, in requests in flight times minutes."""
    return list(accumulate(asked, initial=0.0))[:-1]
