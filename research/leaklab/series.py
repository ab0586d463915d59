"""Generated series of samples: leaks of every rate and shape, and what only looks like one.

Deterministic: each series has its own seeded generator. Sizes in bytes, times in seconds.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from plimsoll_api.trace import (
    Device,
    Host,
    LedgerLine,
    Malloc,
    RoleRss,
    Sample,
    SampleLoad,
    Torch,
)

MIB = 1 << 20
GIB = 1 << 30
HOUR = 3600.0
DAY = 24 * HOUR
LIMIT = 6 * GIB
"""Of the host's memory of each engine."""

Curve = Callable[[float], float]


def base_of(seed: int) -> float:
    """Engines fill very different shares of their limit."""
    return (2.0, 3.2, 4.2)[seed % 3] * GIB


def seed_of(*parts: Any) -> int:
    """The same in every process, unlike hash()."""
    return sum((place + 1) * 31 * ord(c) for place, c in enumerate("/".join(map(str, parts))))


def flat(value: float) -> Curve:
    return lambda t: value


NOTHING = flat(0.0)
EIGHT = flat(8.0)


def steady(rate: float, start: float = 0.0) -> Curve:
    """``rate`` bytes a second from ``start`` on."""
    return lambda t: rate * max(0.0, t - start)


def bursty(rate: float, period: float, share: float) -> Curve:
    """The same mean rate, but only within the first ``share`` of each period."""

    def curve(t: float) -> float:
        whole, part = divmod(t, period)
        return rate * period * (whole + min(1.0, part / (share * period)))

    return curve


def sawtooth(height: float, period: float) -> Curve:
    """Garbage that grows and is collected."""
    return lambda t: height * ((t % period) / period)


def saturating(height: float, tau: float, start: float = 0.0) -> Curve:
    """A cache that fills: fast at first, then ever slower."""
    return lambda t: height * (1 - math.exp(-max(0.0, t - start) / tau))


def high_water(height: float, starts: tuple[float, ...], rise: float) -> Curve:
    """What an allocator keeps after bursts: the first raises it, the later ones hardly."""

    def curve(t: float) -> float:
        level = 0.0
        for number, start in enumerate(starts):
            level += height / (2.0 ** (2 * number)) * min(1.0, max(0.0, t - start) / rise)
        return level

    return curve


def step(height: float, at: float) -> Curve:
    return lambda t: height if t >= at else 0.0


def square_load(low: int, high: int, period: float) -> Curve:
    return lambda t: high if t % period < period / 2 else low


def diurnal(low: float, high: float, period: float = 86_400.0) -> Curve:
    return lambda t: low + (high - low) * (0.5 - 0.5 * math.cos(2 * math.pi * t / period))


@dataclass
class Series:
    """One engine. ``leak`` grows where ``segment`` says; ``other`` is memory that is no leak, where
    ``other_in`` says: a segment, or ``retained`` for what malloc keeps of freed memory;
    ``device_other`` and ``device_other_in`` are the same on the device. Its allocator keeps
    ``cached`` bytes for later use, above all that is allocated or, with ``fills_cache``, above what
    was allocated at the begin: then what grows fills that room first.

    ``per_request`` is what each request in flight holds, with ``noise`` on top: half of it white,
    half wandering (an Ornstein-Uhlenbeck process of ``wander_s``), as real engines have.
    ``leak_per_request`` leaks with each finished request from ``leak_from`` on, and ``leaked`` is
    the truth: what had leaked at the sample that was made last. ``counters`` are further counters
    of the engine's load, by field, as functions of time. While ``paused`` the engine works on one
    long step. A full garbage collection comes every ``collects`` seconds. ``file`` is the page
    cache of its group, half of it mapped by the engine; by default nobody looked.

    A new ``epoch`` is a restart: the engine's own totals begin again, and for its first
    ``ready_at`` seconds it says that it starts, and of its load nothing. While ``silent`` its
    status does not answer, though its serving port does; while ``unresponsive`` its frontend
    answers nobody.

    With ``fine`` a pause that is shorter than an interval counts for as much as it lasts, and no
    request ends in it. ``cpu_s`` is the processor time of all processes but the frontend, in total.
    With ``read_every`` the load is that of a page of metrics, which is read that often.
    """

    duration: float = 600.0
    interval: float = 1.0
    leak: Curve = NOTHING
    leak_per_request: float = 0.0
    leak_from: float = 0.0
    other: Curve = NOTHING
    other_in: str = "malloc_in_use"
    file: Curve | None = None
    device_other: Curve = NOTHING
    device_other_in: str = "torch_reserved_unused"
    ledger: Curve | None = None
    ledger_bound: int | None = None
    ledger_kind: str = "host"
    load: Curve = EIGHT
    segment: str = "malloc_in_use"
    per_request: float = 2 * MIB
    noise: float = 8 * MIB
    wander_s: float = 30.0
    base: float = 2 * GIB
    requests_per_s: float = 5.0
    role: str = "worker"
    device: bool = False
    cached: float = 1 * GIB
    fills_cache: bool = False
    frozen_at: float = math.inf
    paused: Callable[[float], bool] = lambda t: False
    silent: Callable[[float], bool] = lambda t: False
    unresponsive: Callable[[float], bool] = lambda t: False
    malloc: bool = True
    seed: int = 1
    ready_at: float = 0.0
    collects: float = 600.0
    counters: dict[str, Curve] = field(default_factory=dict)
    epoch: Callable[[float], int] = lambda t: 1
    fine: bool = False
    cpu_s: Curve | None = None
    read_every: float = 0.0
    leaked: float = field(default=0.0, init=False)
    _wander: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False)
    _page: tuple[float, SampleLoad] | None = field(default=None, init=False)

    def samples(self) -> Iterator[Sample]:
        rng = random.Random(self.seed)
        done = driven = 0.0
        steps = 0
        self._wander = self._began = 0.0
        self._page = None
        epoch = self.epoch(0.0)
        for number in range(int(self.duration / self.interval)):
            t = number * self.interval
            if self.epoch(t) != epoch:
                epoch, self._began, self._page = self.epoch(t), t, None
                done = driven = 0.0
                steps = 0
            mean = self.load(min(t, self.frozen_at))
            load = max(0, round(rng.gauss(mean, math.sqrt(mean) / 2))) if mean > 0 else 0
            if t < self.frozen_at:
                busy = load > 0
                worked = self._worked(t)
                finished = self.requests_per_s * self.interval * (load / 8)
                finished *= worked if self.fine else 1.0
                done += finished
                driven += self.leak_per_request * finished if t >= self.leak_from else 0.0
                steps += int(20 * self.interval * worked) if busy else 0
            self.leaked = self.leak(t) + driven
            yield self._sample(rng, t, load, int(done), steps)

    def _worked(self, t: float) -> float:
        """The share of the interval before ``t`` in which the engine was not paused."""
        looks = math.ceil(self.interval) if self.fine else 1
        paused = sum(self.paused(t - part * self.interval / looks) for part in range(looks))
        return 1 - paused / looks

    def _sample(self, rng: random.Random, t: float, load: int, done: int, steps: int) -> Sample:
        decay = math.exp(-self.interval / self.wander_s)
        self._wander = self._wander * decay + rng.gauss(0, self.noise / 2) * math.sqrt(
            1 - decay * decay
        )
        held = load * self.per_request + abs(rng.gauss(0, self.noise / 2)) + self._wander
        on_host = 0.0 if self.device else self.leaked
        parts: defaultdict[str, float] = defaultdict(float)
        parts[self.segment] += on_host
        parts[self.other_in] += self.other(t)
        shared = parts["shared"]
        anon = self.base + held + sum(parts.values()) - shared
        worker = anon - 300 * MIB
        frontend = 300.0 * MIB
        if self.role == "frontend":
            worker, frontend = worker - on_host, frontend + on_host
        unresponsive = self.unresponsive(t)
        answered = not (unresponsive or self.silent(t))
        sample = Sample(
            t=t,
            epoch=self.epoch(t),
            host=Host(
                rss_anon=int(anon + 100 * MIB),
                rss_shmem=int(shared + 32 * MIB),
                processes=3,
                cgroup_anon=int(anon),
                cgroup_shmem=int(shared + 32 * MIB),
                by_process=[
                    RoleRss("worker", int(worker)),
                    RoleRss("frontend", int(frontend)),
                ],
            ),
            scrape_ok=answered,
        )
        if self.cpu_s is not None:
            sample.host.cpu_s = self.cpu_s(t)
        if self.file is not None:
            file = self.file(t)
            sample.host.cgroup_file, sample.host.rss_file = int(file), int(file / 2)
            sample.host.cgroup_current = int(anon + shared + 32 * MIB + file)
        if not answered:
            sample.serving = not unresponsive
            return sample
        if self.malloc:
            sample.malloc = Malloc(
                in_use=int(0.6 * self.base + held + parts["malloc_in_use"]),
                retained=int(0.05 * self.base + parts["retained"]),
                python_objects=int(200 * MIB + parts["python_objects"]),
                full_collections=int((t - self._began) // self.collects),
            )
        if self.device:
            sample.device = [self._device(self.device_other(t))]
        if self.ledger is not None:
            sample.ledger = [
                LedgerLine("cache", self.ledger_kind, int(self.ledger(t)), self.ledger_bound)
            ]
        sample.ready = t - self._began >= self.ready_at
        if not sample.ready:
            return sample
        sample.load = SampleLoad(
            running=load,
            waiting=0,
            inflight=load,
            requests_total=done,
            generation_tokens_total=steps * 4,
            steps_total=steps,
        )
        for name, total in self.counters.items():
            value = total(t)
            setattr(sample.load, name, value if name.endswith("_ratio") else int(value))
        if self.read_every:
            if self._page is None or t - self._page[0] >= self.read_every:
                self._page = t, sample.load
            sample.load_age_s, sample.load = t - self._page[0], self._page[1]
        return sample

    def _device(self, kept: float) -> Device:
        parts: defaultdict[str, float] = defaultdict(float)
        parts[self.segment] += self.leaked
        parts[self.device_other_in] += kept
        allocated = 40 * GIB + parts["torch_allocated"]
        room = 40 * GIB + self.cached if self.fills_cache else allocated + self.cached
        reserved = max(allocated, room) + parts["torch_reserved_unused"]
        other = 2 * GIB + parts["non_torch"]
        return Device(
            index=0,
            used=int(reserved + other),
            total=80 * GIB,
            torch=Torch(allocated=int(allocated), reserved=int(reserved)),
        )


Build = Callable[[int], Series]
"""A healthy series from its seed."""
