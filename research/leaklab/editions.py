"""The editions of the leak lab: cases that were written at one time, and how they are made.

An edition is the test split until it has been run, and is counted as seen from then on. Its name is
in the seeds of its cases, so that they stay sample for sample what they were when it moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leaklab.hangs import causes, requests, signs
from leaklab.leaks import basics, busy, daily, unsettled, varied
from leaklab.leaks.basics import Mechanism
from leaklab.origins import Origin, origin_of
from leaklab.series import HOUR, MIB, Build, Series, seed_of
from leaklab.views import viewed


@dataclass(frozen=True)
class Edition:
    """``spent_s`` is the time from a leak's begin until it has spent its budget, by name of the
    rate, and ``hangs`` when each hang comes, by its name. ``shapes`` are those of a mechanism that
    names none. ``bursts`` are the pulses until the budget is spent and the share of the time that
    each takes; ``swells`` the requests in flight at low and high load, and how often they
    alternate. Where runs are ``alike``, healthy and leaking ones are watched in the ways of
    ``views``, and each leak has spent 125 % of its budget to the byte at its end. Where budgets are
    ``observed``, each healthy run has one of the ``origins``."""

    name: str
    mechanisms: tuple[Mechanism, ...]
    spent_s: Mapping[str, float]
    hangs: Mapping[str, float]
    shapes: tuple[str, ...]
    bursts: tuple[int, float]
    swells: tuple[int, int, int]
    alike: bool = True
    observed: bool = False


@dataclass(frozen=True)
class Watched:
    """A family whose runs are watched in several ways in turn, from that of its ``place`` in its
    edition on."""

    build: Build
    edition: Edition
    place: int

    def __call__(self, seed: int) -> Series:
        return self.build(seed)

    def seed(self, name: str, number: int) -> int:
        return seed_of(self.edition.name, name, number)

    def run(self, name: str, number: int) -> Series:
        return viewed(self.build(self.seed(name, number)), self.place + number)

    def origin(self, name: str, number: int) -> Origin | None:
        return origin_of(self.seed(name, number)) if self.edition.observed else None


def watched(edition: Edition, families: dict[str, Build]) -> dict[str, Build]:
    """The same families, watched alike with the leaks of their edition."""
    return {
        name: Watched(build, edition, place) for place, (name, build) in enumerate(families.items())
    }


_SPENT_S = {
    "fast": 512 * MIB / (400e6 / 60),
    "minutes": 900.0,
    "hours": 2 * HOUR,
    "slow": 10 * HOUR,
}
_SHAPES = ("steady", "load", "bursty", "late")
_HANGS = {"new": 420.0, "known": 2020.0, "frontend": 1220.0}

DEVELOPMENT = Edition(
    "development",
    mechanisms=basics.DEVELOPMENT,
    spent_s=_SPENT_S,
    hangs=_HANGS,
    shapes=_SHAPES,
    bursts=(8, 0.3),
    swells=(2, 14, 6),
    alike=False,
)
EARLIER = Edition(
    "seen",
    mechanisms=(*basics.SEEN, *unsettled.MECHANISMS),
    spent_s=_SPENT_S,
    hangs=_HANGS
    | {"few": 2620.0, "woken": 1620.0}
    | {"starved": 1820.0, "piling": 920.0, "flapping": 2420.0},
    shapes=(
        *_SHAPES,
        "quickening",
        "slowing",
        "waves",
        "lumps",
        "ratchet",
        "doubling",
        "spells",
        "tokens",
        "stairs",
        "renewed",
        "swells",
    ),
    bursts=(8, 0.3),
    swells=(2, 14, 6),
    alike=False,
)
"""The first eight."""
NINTH = Edition(
    "test",
    mechanisms=busy.MECHANISMS,
    spent_s={
        "fast": 100.0,
        "brisk": 560.0,
        "minutes": 2900.0,
        "hours": 4.7 * HOUR,
        "slow": 14 * HOUR,
    },
    hangs={"known": 2230.0, "frontend": 1340.0} | requests.TIMES,
    shapes=(*_SHAPES, "tokens", "prompts", "errors", "jittered", "crowds", "escalating"),
    bursts=(9, 0.45),
    swells=(3, 15, 7),
)
TENTH = Edition(
    "tenth",
    mechanisms=varied.MECHANISMS,
    spent_s={
        "fast": 92.0,
        "brisk": 700.0,
        "minutes": 2300.0,
        "hours": 3.6 * HOUR,
        "slow": 14.8 * HOUR,
    },
    hangs=signs.TIMES,
    shapes=(*_SHAPES, "telegraph", "settling", "humps", "jobs", "compounding", "prefixes"),
    bursts=(6, 0.2),
    swells=(3, 16, 5),
)
ELEVENTH = Edition(
    "eleventh",
    mechanisms=daily.MECHANISMS,
    spent_s={
        "fast": 94.0,
        "brisk": 480.0,
        "minutes": 3400.0,
        "hours": 5.6 * HOUR,
        "slow": 15 * HOUR,
    },
    hangs=causes.TIMES,
    shapes=(*_SHAPES, "overflow", "walk", "gaps", "clock", "weekdays"),
    bursts=(7, 0.3),
    swells=(2, 18, 6),
    observed=True,
)
