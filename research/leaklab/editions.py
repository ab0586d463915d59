"""The editions of the leak lab: cases that were written at one time, and how they are made.

An edition is the test split until it has been run, and is counted as seen from then on. Its name is
in the seeds of its cases, so that they stay sample for sample what they were when it moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leaklab import (
    hangs_causes,
    hangs_seen,
    hangs_unseen,
    leaks_busy,
    leaks_known,
    leaks_seen,
    leaks_unseen,
    leaks_varied,
    unseen_shapes,
)
from leaklab.leaks_known import Mechanism
from leaklab.series import MIB

HOUR = 3600.0


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
    mechanisms=leaks_known.DEVELOPMENT,
    spent_s=_SPENT_S,
    hangs=_HANGS,
    shapes=_SHAPES,
    bursts=(8, 0.3),
    swells=(2, 14, 6),
    alike=False,
)
EARLIER = Edition(
    "seen",
    mechanisms=(*leaks_known.SEEN, *leaks_seen.MECHANISMS),
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
    mechanisms=leaks_busy.MECHANISMS,
    spent_s={
        "fast": 100.0,
        "brisk": 560.0,
        "minutes": 2900.0,
        "hours": 4.7 * HOUR,
        "slow": 14 * HOUR,
    },
    hangs={"known": 2230.0, "frontend": 1340.0} | hangs_seen.TIMES,
    shapes=(*_SHAPES, "tokens", "prompts", "errors", "jittered", "crowds", "escalating"),
    bursts=(9, 0.45),
    swells=(3, 15, 7),
)
TENTH = Edition(
    "tenth",
    mechanisms=leaks_varied.MECHANISMS,
    spent_s={
        "fast": 92.0,
        "brisk": 700.0,
        "minutes": 2300.0,
        "hours": 3.6 * HOUR,
        "slow": 14.8 * HOUR,
    },
    hangs=hangs_causes.TIMES,
    shapes=(*_SHAPES, "telegraph", "settling", "humps", "jobs", "compounding", "prefixes"),
    bursts=(6, 0.2),
    swells=(3, 16, 5),
)
ELEVENTH = Edition(
    "eleventh",
    mechanisms=leaks_unseen.MECHANISMS,
    spent_s={
        "fast": 94.0,
        "brisk": 480.0,
        "minutes": 3400.0,
        "hours": 5.6 * HOUR,
        "slow": 15 * HOUR,
    },
    hangs=hangs_unseen.TIMES,
    shapes=(*_SHAPES, *unseen_shapes.SHARES),
    bursts=(7, 0.3),
    swells=(2, 18, 6),
    observed=True,
)
