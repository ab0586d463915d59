"""What all hangs of the leak lab share: totals that stand still, and requests that wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from leaklab.series import Curve, Series

Way = Callable[[Series, float, random.Random], Series]
"""Makes the engine hang at a time in seconds."""


def hangs(
    ways: Mapping[str, Way],
    series: Series,
    name: str,
    at: float,
    seed: int,
    *,
    every: tuple[float, float],
    lasts: tuple[float, float],
) -> Series:
    """The engine that hangs at ``at``: its totals stand still from then on.

    Its usual pauses come ``every`` so many seconds and last for ``lasts``. Its processor time is
    known where it was known before.
    """
    rng = random.Random(f"{name}/{seed}")
    apart, pause = rng.uniform(*every), rng.uniform(*lasts)
    usual = replace(series, paused=lambda t: t % apart < pause, counters={})
    hung = ways[name](usual, at, rng)
    return hung if series.cpu_s else replace(hung, cpu_s=None)


def until(total: Curve, at: float) -> Curve:
    """The total that stands still from ``at`` on."""
    return lambda t: total(min(t, at))


def queued(series: Series, load: float, running: Curve, waiting: Curve) -> Series:
    """The engine with so many requests that run and wait."""
    return replace(
        series,
        load=lambda t: load,
        counters={
            "running": running,
            "waiting": waiting,
            "inflight": lambda t: running(t) + waiting(t),
        },
    )
