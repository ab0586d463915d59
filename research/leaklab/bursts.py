"""Load patterns that no other family has, with and without a leak.

A queue fills for minutes and drains, prompts get longer by bursts with idle gaps between them, and
memory takes a step while the engine starts. What requests need is given back or kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from leaklab.budgets import WINDOWS_S, limit_of
from leaklab.cases import Case
from leaklab.demand import between_steps
from leaklab.series import MIB, Curve, Series, base_of, seed_of, steady
from leaklab.splits import Split
from leaklab.views import habits

LENGTH_S = 2400.0
STEP_S = 5.0
BUDGET = 256 * MIB
LEAKS_AT_S = 100.0
SPENT_S = (400.0, 1500.0)
"""The time in which a leak spends its budget, at most the window's."""
RUNNING = 8
SEEDS = 2


def _bursts(rng: random.Random) -> list[float]:
    """The height of each step of the run: three bursts that rise and fall, each up to its own."""
    heights = [0.0] * int(LENGTH_S / STEP_S)
    at = rng.uniform(120, 400)
    for _ in range(3):
        rises, most = rng.uniform(60, 300), rng.uniform(0.3, 1.0)
        for number in range(len(heights)):
            share = 1 - abs(number * STEP_S - at - rises) / rises
            heights[number] = max(heights[number], most * max(0.0, share))
        at += 2 * rises + rng.uniform(30, 200)
    return heights


def _queue(rng: random.Random, kept: bool) -> dict[str, Any]:
    heights = _bursts(rng)
    most, each = rng.uniform(40, 300), rng.uniform(0.05, 1.0) * MIB
    waiting = between_steps([most * height for height in heights], STEP_S)
    held = list(accumulate(heights, max)) if kept else heights
    return {
        "load": lambda t: RUNNING + waiting(t),
        "other": between_steps([most * each * height for height in held], STEP_S),
        "counters": {
            "running": lambda t: RUNNING,
            "waiting": lambda t: round(waiting(t)),
            "inflight": lambda t: RUNNING + round(waiting(t)),
        },
    }


def _prompts(rng: random.Random, kept: bool) -> dict[str, Any]:
    heights = _bursts(rng)
    longest, most = rng.uniform(2000, 8000), rng.uniform(50, 300) * MIB
    mean = [200 + longest * height for height in heights]
    asked = list(accumulate(tokens * 5 * STEP_S for tokens in mean))
    held = list(accumulate(heights, max)) if kept else heights
    gap_s = rng.uniform(200, 600)
    return {
        "load": lambda t: 0.0 if t % gap_s > gap_s - 40 else float(RUNNING),
        "other": between_steps([most * height for height in held], STEP_S),
        "counters": {"prompt_tokens_total": between_steps(asked, STEP_S)},
    }


def _step(rng: random.Random) -> dict[str, Any]:
    at, size = rng.uniform(2, 50), rng.uniform(20, 150) * MIB
    step: Curve = lambda t: size if t >= at else 0.0  # noqa: E731
    return {"other": step}


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "queue that is given back": lambda rng: _queue(rng, kept=False),
    "queue that is kept": lambda rng: _queue(rng, kept=True),
    "prompts that are given back": lambda rng: _prompts(rng, kept=False),
    "prompts that are kept": lambda rng: _prompts(rng, kept=True),
    "step at the start": _step,
}


def bursts(split: Split) -> list[Case]:
    """Each kind with each window, with a leak and without."""
    return [
        _case(split, kind, window_s, leaks, seed)
        for kind in KINDS
        for window_s in WINDOWS_S
        for leaks in (False, True)
        for seed in range(SEEDS)
    ]


def _case(split: Split, kind: str, window_s: float, leaks: bool, seed: int) -> Case:
    drawn = seed_of(split, "bursts", kind, window_s, seed)
    rng = random.Random(drawn)
    changes = habits(drawn) | KINDS[kind](rng)
    series = Series(LENGTH_S, base=base_of(drawn), seed=drawn, **changes)
    least, most = SPENT_S
    rate = BUDGET / min(window_s, rng.uniform(least, most)) if leaks else 0.0
    if leaks:
        series.leak = steady(rate, LEAKS_AT_S)
    limit = limit_of(series, BUDGET, rate * (LENGTH_S - LEAKS_AT_S), seed)
    name = f"{'leak beside ' if leaks else ''}{kind}"
    found = (f"{name}-{window_s:.0f}-{seed}", name, split, series)
    if not leaks:
        return Case(*found, budget=BUDGET, window_s=window_s, limit=limit)
    return Case(
        *found, "HostGrowth", LEAKS_AT_S, series.segment,
        budget=BUDGET, window_s=window_s, limit=limit,
    )  # fmt: skip
