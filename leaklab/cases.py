"""The cases of the leak lab: labelled series, split by mechanism into development and test.

The detector's constants may be chosen on the development split, and on what was seen: the earlier
test splits, which are no test any more since they were looked at, and are kept for their figures.
No mechanism is in two splits: a family such as "garbage collection" has another one in each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from leaklab.series import (
    EIGHT,
    GIB,
    MIB,
    Curve,
    Series,
    bursty,
    diurnal,
    flat,
    saturating,
    square_load,
    steady,
)
from leaklab.shapes import SHARES
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy

HOUR = 3600.0
DAY = 24 * HOUR
WARMUP_S = 60.0
LIMIT = 6 * GIB
MAX_SAMPLES = 4000
"""Of one leak until its budget is spent: a slow leak is sampled less often, up to 30 s apart."""


class Split(StrEnum):
    DEVELOPMENT = "development"
    SEEN = "seen"
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
        device = MemoryBudget(self.budget, self.window_s) if self.series.device else None
        return MemoryPolicy(
            host=MemoryBudget(self.budget, self.window_s, LIMIT), device=device, warmup_s=WARMUP_S
        )


@dataclass(frozen=True)
class Mechanism:
    """How a leak comes about: where its memory is and which process holds it. ``noises`` are how
    unsteady the memory of its engine is, by seed. ``shapes`` are the ways in which it can grow, all
    of its split's where it says none. ``accounted`` is a cache that its engine accounts for to the
    byte, and fills meanwhile; ``load`` are the requests in flight, where they drive no leak."""

    name: str
    segment: str
    kind: str = "HostGrowth"
    role: str = "worker"
    malloc: bool = True
    noises: tuple[float, ...] = (8 * MIB, 25 * MIB, 40 * MIB)
    shapes: tuple[str, ...] = ()
    accounted: float = 0.0
    load: Curve = EIGHT


LEAKS = {
    Split.DEVELOPMENT: (
        Mechanism("request_cycle", "malloc_in_use"),
        Mechanism("tokenizer_cache", "python_objects", role="frontend"),
        Mechanism("device_dict", "torch_allocated", "DeviceGrowth"),
    ),
    Split.SEEN: (
        Mechanism("append_list", "python_objects"),
        Mechanism("method_cache", "malloc_in_use"),
        Mechanism("mmap_growth", "anonymous_other"),
        Mechanism("shared_growth", "shared"),
        Mechanism("device_raw", "non_torch", "DeviceGrowth"),
        Mechanism("foreign_frontend", "anonymous_other", role="frontend", malloc=False),
        Mechanism("exception_chain", "malloc_in_use"),
        Mechanism("detokenizer_state", "python_objects", role="frontend"),
        Mechanism("arena_mapping", "anonymous_other"),
        Mechanism("ring_segments", "shared"),
        Mechanism("collective_buffers", "non_torch", "DeviceGrowth"),
        Mechanism("graph_pools", "torch_reserved_unused", "DeviceGrowth"),
        Mechanism("foreign_worker", "anonymous_other", malloc=False),
        Mechanism("grammar_states", "malloc_in_use"),
        Mechanism("stream_queues", "python_objects", role="frontend"),
        Mechanism("thread_stacks", "anonymous_other"),
        Mechanism("media_handover", "shared"),
        Mechanism("kernel_modules", "non_torch", "DeviceGrowth"),
        Mechanism("fragmentation", "torch_reserved_unused", "DeviceGrowth"),
        Mechanism("logit_masks", "torch_allocated", "DeviceGrowth"),
        Mechanism("foreign_runtime", "anonymous_other", malloc=False),
        Mechanism("aborted_slots", "malloc_in_use", noises=(18 * MIB,)),
        Mechanism("trace_spans", "python_objects", role="frontend", noises=(10 * MIB,)),
        Mechanism("pinned_transfers", "anonymous_other", noises=(28 * MIB,)),
        Mechanism("dead_peers", "shared", noises=(50 * MIB,)),
        Mechanism("ipc_handles", "non_torch", "DeviceGrowth", noises=(14 * MIB,)),
        Mechanism("stream_pools", "torch_reserved_unused", "DeviceGrowth", noises=(38 * MIB,)),
        Mechanism("draft_states", "torch_allocated", "DeviceGrowth", noises=(22 * MIB,)),
        Mechanism("foreign_connector", "anonymous_other", malloc=False, noises=(32 * MIB,)),
        Mechanism("tokenizer_clones", "malloc_in_use", noises=(20 * MIB,)),
        Mechanism("response_store", "python_objects", role="frontend", noises=(12 * MIB,)),
        Mechanism("compile_workers", "anonymous_other", noises=(30 * MIB,)),
        Mechanism("plasma_objects", "shared", noises=(44 * MIB,)),
        Mechanism("virtual_mappings", "non_torch", "DeviceGrowth", noises=(36 * MIB,)),
        Mechanism("odd_sizes", "torch_reserved_unused", "DeviceGrowth", noises=(26 * MIB,)),
        Mechanism("prompt_logprobs", "torch_allocated", "DeviceGrowth", noises=(9 * MIB,)),
        Mechanism(
            "foreign_router", "anonymous_other", role="frontend", malloc=False, noises=(17 * MIB,)
        ),
        Mechanism("beam_histories", "malloc_in_use", noises=(24 * MIB,)),
        Mechanism("request_callbacks", "python_objects", role="frontend", noises=(11 * MIB,)),
        Mechanism("registered_regions", "anonymous_other", noises=(34 * MIB,)),
        Mechanism("orphaned_frames", "shared", noises=(47 * MIB,)),
        Mechanism("event_pools", "non_torch", "DeviceGrowth", noises=(16 * MIB,)),
        Mechanism("split_blocks", "torch_reserved_unused", "DeviceGrowth", noises=(29 * MIB,)),
        Mechanism("encoder_outputs", "torch_allocated", "DeviceGrowth", noises=(8 * MIB,)),
        Mechanism("foreign_batcher", "anonymous_other", malloc=False, noises=(40 * MIB,)),
    ),
    Split.TEST: (
        # A stream of many answers keeps its context in the RPC server, if its client left early.
        Mechanism(
            "stream_contexts",
            "malloc_in_use",
            noises=(21 * MIB,),
            shapes=("steady", "load", "tokens", "late", "swells"),
        ),
        # The frontend mirrors what the worker's cache of pictures holds, and misses its evictions.
        Mechanism(
            "mirrored_entries",
            "python_objects",
            role="frontend",
            noises=(13 * MIB,),
            shapes=("load", "bursty", "late", "renewed"),
            accounted=700 * MIB,
        ),
        # A read from the disk tier that failed does not give back its aligned buffer.
        Mechanism(
            "bounce_buffers",
            "anonymous_other",
            noises=(33 * MIB,),
            shapes=("steady", "bursty", "stairs", "swells"),
            accounted=900 * MIB,
        ),
        # Code that was compiled while serving is never unloaded: each release of a client brings
        # new shapes, and fewer of them from hour to hour.
        Mechanism(
            "code_pages",
            "anonymous_other",
            noises=(19 * MIB,),
            shapes=("steady", "late", "stairs", "renewed"),
        ),
        # Each update of the weights leaves the segment by which one rank received its part.
        Mechanism(
            "weight_segments",
            "shared",
            noises=(45 * MIB,),
            shapes=("late", "stairs", "bursty"),
            load=diurnal(5, 13, 2.3 * HOUR),
        ),
        # A graph that is made anew for a changed batch leaves its executable in the driver.
        Mechanism(
            "graph_executables",
            "non_torch",
            "DeviceGrowth",
            noises=(15 * MIB,),
            shapes=("steady", "late", "stairs", "renewed"),
        ),
        # Each sleep begins a new private pool, and the one from before is never emptied.
        Mechanism(
            "wake_pools",
            "torch_reserved_unused",
            "DeviceGrowth",
            noises=(27 * MIB,),
            shapes=("late", "stairs", "bursty", "swells"),
        ),
        # An adapter that was replaced under its name is still referred to by a batch's mapping.
        Mechanism(
            "replaced_adapters",
            "torch_allocated",
            "DeviceGrowth",
            noises=(37 * MIB,),
            shapes=("late", "stairs", "bursty", "renewed"),
            load=diurnal(6, 16, 1.7 * HOUR),
        ),
        # Hidden states that a trainer has asked for are kept for each token that is made.
        Mechanism(
            "hidden_states",
            "torch_allocated",
            "DeviceGrowth",
            noises=(10 * MIB,),
            shapes=("steady", "load", "tokens", "swells"),
            load=diurnal(4, 14, 2 * HOUR),
        ),
        # A separate server of encoders, without a probe, keeps a tensor for each of its requests.
        Mechanism(
            "foreign_encoder",
            "anonymous_other",
            malloc=False,
            noises=(30 * MIB,),
            shapes=("steady", "load", "late", "swells"),
        ),
        # The scheduler's record of a request's tokens stays if the request ended in the same step
        # in which it was preempted.
        Mechanism(
            "token_histories",
            "python_objects",
            noises=(23 * MIB,),
            shapes=("steady", "tokens", "late", "renewed"),
            load=diurnal(5, 12, 3.1 * HOUR),
        ),
    ),
}
_SPENT_S = {
    "fast": 512 * MIB / (400e6 / 60),
    "minutes": 900.0,
    "hours": 2 * HOUR,
    "slow": 10 * HOUR,
}
SPENT_S = {
    Split.DEVELOPMENT: _SPENT_S,
    Split.SEEN: _SPENT_S,
    Split.TEST: {
        "fast": 120.0,
        "brisk": 640.0,
        "minutes": 3300.0,
        "hours": 5.2 * HOUR,
        "slow": 15 * HOUR,
    },
}
"""Time from a leak's begin until it has spent its budget, by name of the rate."""
BURSTS = {Split.DEVELOPMENT: (8, 0.3), Split.SEEN: (8, 0.3), Split.TEST: (10, 0.4)}
"""Pulses until the budget is spent, and the share of the time that each takes."""
SWELLS = {Split.DEVELOPMENT: (2, 14, 6), Split.SEEN: (2, 14, 6), Split.TEST: (3, 19, 9)}
"""Requests in flight at low and high load, and how often they alternate."""
FILLS_S = 1500.0
"""The time constant in which an accounted cache fills."""
_SHAPES = ("steady", "load", "bursty", "late")
SHAPES = {
    Split.DEVELOPMENT: _SHAPES,
    Split.SEEN: (
        *_SHAPES,
        "quickening",
        "slowing",
        "waves",
        "lumps",
        "ratchet",
        "doubling",
        "spells",
    ),
    Split.TEST: (*_SHAPES, "tokens", "stairs", "renewed", "swells"),
}
TOKENS_PER_S = 900.0
"""The mean of what is generated, where leaks follow tokens."""


def leaks(split: Split, seeds: int) -> list[Case]:
    """Mechanism x rate x shape x seed."""
    return [
        _leak(split, mechanism, rate, shape, seed)
        for mechanism in LEAKS[split]
        for rate in SPENT_S[split]
        for shape in mechanism.shapes or SHAPES[split]
        for seed in range(seeds)
        if (rate, shape) not in {("fast", "load"), ("fast", "bursty"), ("fast", "tokens")}
    ]


def _leak(split: Split, mechanism: Mechanism, rate: str, shape: str, seed: int) -> Case:
    budget, spent = 512 * MIB, SPENT_S[split][rate]
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
        noise=mechanism.noises[seed % len(mechanism.noises)],
        base=base_of(seed),
        load=mechanism.load,
        seed=_seed(split, mechanism.name, rate, shape, seed),
    )
    if mechanism.accounted:
        series.other = series.ledger = saturating(mechanism.accounted, FILLS_S, WARMUP_S)
        series.ledger_bound = int(mechanism.accounted)
    match shape:
        case "load":
            low, high, turns = SWELLS[split]
            series.load = square_load(low, high, spent / turns)
            series.leak_per_request, series.leak_from = per_s / series.requests_per_s, starts
        case "bursty":
            count, share = BURSTS[split]
            pulses = bursty(per_s, spent / count, share)
            series.leak = lambda t: pulses(max(0.0, t - starts))
        case "steady" | "late":
            series.leak = steady(per_s, starts)
        case "tokens":
            swells = SHARES["swells"](series.seed)
            tokens: Curve = lambda t: TOKENS_PER_S * spent * swells(t / spent)  # noqa: E731
            each = budget / (tokens(starts + spent) - tokens(starts))
            series.leak = lambda t: each * max(0.0, tokens(t) - tokens(starts))
            series.counters = {"generation_tokens_total": tokens}
        case _:
            grown = SHARES[shape](series.seed)
            series.leak = lambda t: budget * grown(max(0.0, t - starts) / spent)
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


USUAL_PAUSE_S = 6.0
"""One step in a hundred or so takes this long in the services that hang."""


_HANGS = {"new": 420.0, "known": 2020.0, "frontend": 1220.0}
HANGS = {
    Split.DEVELOPMENT: _HANGS,
    Split.SEEN: _HANGS,
    Split.TEST: _HANGS | {"few": 2620.0, "woken": 1620.0},
}
"""When each comes, by name."""
WOKEN_S = 45.0
"""From the end of its sleep until a woken engine hangs."""


def stalls(split: Split) -> list[Case]:
    """A worker that hangs under load, soon after its start or with a history of its steps, and a
    frontend that hangs: it answers nobody, and what the worker does is not known. Few requests are
    in flight where a link to a peer is lost by night; an engine that was woken hangs in its first
    collective, for one rank sleeps on."""
    return [
        _stall(split, name, at + 7 * seed, seed)
        for name, at in HANGS[split].items()
        for seed in range(5)
    ]


def _stall(split: Split, name: str, at: float, seed: int) -> Case:
    series = Series(
        duration=at + 500,
        paused=lambda t: t % 100 < USUAL_PAUSE_S,
        seed=_seed(split, "hang", name, seed),
    )
    if name == "few":
        series.load = flat(4.0)
    if name == "woken":
        series.load = lambda t: 0.0 if 600 <= t < at - WOKEN_S else 11.0
    if name == "frontend":
        series.unresponsive = lambda t: t >= at
    else:
        series.frozen_at = at
    return Case(f"hang-{name}-{seed}", f"stall {name}", split, series, "Stall", at)


def saturation() -> Case:
    """72 hours in which work waits all the time and is done, with steps of ten seconds each hour,
    and a prompt of 60,000 tokens each seven hours that takes 25 seconds."""
    every = 7 * HOUR
    series = Series(
        duration=72 * HOUR,
        interval=5,
        load=diurnal(40, 60),
        paused=lambda t: t % HOUR < 10 or (t > every and t % every < 25),
        counters={"prompt_tokens_total": lambda t: 4000 * t + 60_000 * (t // every)},
        seed=72,
    )
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
