"""The cases of the leak lab: labelled series, split by mechanism into development and test.

The detector's constants may be chosen on the development split only. No mechanism is in both: a
family such as "garbage collection" has another mechanism in either split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from series import (
    EIGHT,
    GIB,
    MIB,
    Series,
    bursty,
    diurnal,
    square_load,
    steady,
)

from plimsoll_api.supervision import Budget, MemoryPolicy

HOUR = 3600.0
DAY = 24 * HOUR
WARMUP_S = 60.0
LIMIT = 6 * GIB
MAX_SAMPLES = 4000
"""Of one leak until its budget is spent: a slow leak is sampled less often, up to 30 s apart."""


class Split(StrEnum):
    DEVELOPMENT = "development"
    TEST = "test"


@dataclass
class Case:
    """One labelled run. ``starts`` is when its leak or stall begins, None for a negative;
    ``trigger`` what a leak follows, where a run was made to ask that."""

    name: str
    family: str
    split: Split
    series: Series
    kind: str | None = None
    starts: float | None = None
    segment: str | None = None
    trigger: str | None = None
    budget: int = 512 * MIB
    window_s: float = DAY

    @property
    def policy(self) -> MemoryPolicy:
        device = Budget(self.budget, self.window_s) if self.series.device else None
        return MemoryPolicy(
            host=Budget(self.budget, self.window_s, LIMIT), device=device, warmup_s=WARMUP_S
        )


@dataclass(frozen=True)
class Mechanism:
    """How a leak comes about: where its memory is and which process holds it."""

    name: str
    segment: str
    kind: str = "HostGrowth"
    role: str = "worker"
    malloc: bool = True


LEAKS = {
    Split.DEVELOPMENT: (
        Mechanism("request_cycle", "malloc_in_use"),
        Mechanism("tokenizer_cache", "python_objects", role="frontend"),
        Mechanism("device_dict", "torch_allocated", "DeviceGrowth"),
    ),
    Split.TEST: (
        Mechanism("append_list", "python_objects"),
        Mechanism("method_cache", "malloc_in_use"),
        Mechanism("mmap_growth", "anonymous_other"),
        Mechanism("shared_growth", "shared"),
        Mechanism("device_raw", "non_torch", "DeviceGrowth"),
        Mechanism("foreign_frontend", "anonymous_other", role="frontend", malloc=False),
    ),
}
SPENT_S = {"fast": 512 * MIB / (400e6 / 60), "minutes": 900.0, "hours": 2 * HOUR, "slow": 10 * HOUR}
"""Time from a leak's begin until it has spent its budget, by name of the rate."""
SHAPES = ("steady", "load", "bursty", "late")


def leaks(split: Split, seeds: int) -> list[Case]:
    """Mechanism x rate x shape x seed."""
    return [
        _leak(split, mechanism, rate, shape, seed)
        for mechanism in LEAKS[split]
        for rate in SPENT_S
        for shape in SHAPES
        for seed in range(seeds)
        if (rate, shape) not in {("fast", "load"), ("fast", "bursty")}
    ]


def _leak(split: Split, mechanism: Mechanism, rate: str, shape: str, seed: int) -> Case:
    budget, spent = 512 * MIB, SPENT_S[rate]
    starts = 300.0 if shape != "late" else 300.0 + 2 * max(spent, 600.0)
    length = starts + 1.25 * spent
    per_s = budget / spent
    series = Series(
        duration=length,
        interval=min(30.0, max(1.0, round(length / MAX_SAMPLES))),
        segment=mechanism.segment,
        role=mechanism.role,
        malloc=mechanism.malloc,
        device=mechanism.kind == "DeviceGrowth",
        noise=(8 * MIB, 25 * MIB, 40 * MIB)[seed % 3],
        base=base_of(seed),
        load=EIGHT,
        seed=_seed(split, mechanism.name, rate, shape, seed),
    )
    match shape:
        case "load":
            series.load = square_load(2, 14, spent / 6)
            series.leak_per_request, series.leak_from = per_s / series.requests_per_s, starts
        case "bursty":
            pulses = bursty(per_s, spent / 8, 0.3)
            series.leak = lambda t: pulses(max(0.0, t - starts))
        case _:
            series.leak = steady(per_s, starts)
    name = f"{mechanism.name}-{rate}-{shape}-{seed}"
    return Case(
        name, f"leak {mechanism.name}", split, series, mechanism.kind, starts, mechanism.segment
    )


def named(split: Split) -> list[Case]:
    """The two rates that are promised: 400 MB a minute, and 48 MiB an hour in 6 GiB under noise."""
    mechanism = LEAKS[split][0]
    cases = []
    for seed in range(5):
        for name, rate, length, noise in (
            ("fast", 400e6 / 60, 200.0, 8 * MIB),
            ("slow", 48 * MIB / HOUR, 4 * HOUR, 60 * MIB),
        ):
            series = Series(
                duration=300 + length,
                leak=steady(rate, 300.0),
                noise=noise,
                segment=mechanism.segment,
                role=mechanism.role,
                seed=_seed(split, "named", name, seed),
            )
            cases.append(
                Case(
                    f"named-{name}-{seed}",
                    f"leak named {name}",
                    split,
                    series,
                    mechanism.kind,
                    300.0,
                    mechanism.segment,
                )
            )
    return cases


def stalls(split: Split) -> list[Case]:
    """A worker that hangs under load."""
    return [
        Case(
            f"hang-{seed}",
            "stall",
            split,
            Series(duration=900, frozen_at=400.0 + seed, seed=_seed(split, "hang", seed)),
            "Stall",
            400.0 + seed,
        )
        for seed in range(5)
    ]


def saturation() -> Case:
    """72 hours in which work waits all the time and is done."""
    series = Series(duration=72 * HOUR, interval=5, load=diurnal(40, 60), seed=72)
    return Case("saturation", "saturation", Split.TEST, series)


def base_of(seed: int) -> float:
    """Engines fill very different shares of their limit."""
    return (2.0, 3.2, 4.2)[seed % 3] * GIB


def _seed(*parts: Any) -> int:
    """The same in every process, unlike hash()."""
    return sum((place + 1) * 31 * ord(c) for place, c in enumerate("/".join(map(str, parts))))


Build = Callable[[int], Series]
"""A negative series from its seed."""


def negatives(split: Split, seeds: int, families: dict[Split, dict[str, Build]]) -> list[Case]:
    return [
        Case(f"{name}-{seed}", name, split, build(_seed(split, name, seed)))
        for name, build in families[split].items()
        for seed in range(seeds)
    ]
