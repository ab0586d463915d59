"""What must not change a verdict on a recording, and what must.

    python -m leaklab.recording.metamorphic [NAME...]    # the recordings that may be looked at
    python -m leaklab.recording.metamorphic --drawn   # the others

The same memory, sampled otherwise, gets the same verdict and is confirmed within :data:`LATER_S`;
so does the same run in an engine that has lived before. A run whose leak is taken away is healthy,
and a healthy run with a leak added leaks. It prints each check that fails.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from leaklab.recording import verdicts
from leaklab.recording.labels import Labels, Leak
from leaklab.recording.published import Recording, recordings
from plimsoll_api import trace
from plimsoll_api.assessment import DEVICE_SEGMENTS, Segment
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.trace import Header, Sample
from plimsoll_sidecar.replay import ReplayLine, make_memory_policy
from plimsoll_sidecar.replay import replay_samples as replayed

LATER_S = 45.0
"""A confirmation may come earlier or later by so much."""
HEALTHY_S = 120.0
"""A leak is added after so much healthy service, as the rig's own leaks are."""
SPENT_S = 600.0
"""The time in which a leak that is added spends its budget."""
COUNTERS = {
    "request": "requests_total",
    "token": "generation_tokens_total",
    "abort": "aborted_total",
}
"""What an injected leak goes by, as its label calls it, and the engine's counter of it. A fault of
our engine goes by its requests."""


class Outcome(NamedTuple):
    """What is judged of one run: the confirmation of its leak, and what was wrong."""

    confirm_s: float | None
    wrong: int
    false_actions: int


def same(one: Outcome, other: Outcome) -> bool:
    """Whether two runs got the same verdict at about the same time."""
    if (one.confirm_s is None) != (other.confirm_s is None) or one[1:] != other[1:]:
        return False
    return abs((one.confirm_s or 0.0) - (other.confirm_s or 0.0)) <= LATER_S


@dataclass(frozen=True)
class Played:
    """A recording as it can be judged again, with other samples."""

    header: Header
    memory: MemoryPolicy
    samples: Sequence[Sample]
    labels: Labels

    @classmethod
    def of(cls, recording: Recording) -> Played:
        """Read all of a recording."""
        header, samples = trace.read(recording.trace)
        memory = make_memory_policy(recording.trace, header)
        return cls(header, memory, tuple(samples), recording.labels)

    def outcome(
        self, samples: Sequence[Sample], labels: Labels, interval_s: float = 1.0, since: float = 0.0
    ) -> Outcome:
        """Judge ``samples`` by ``labels``, whose times begin ``since`` seconds later."""
        told = [
            replace(line, t=line.t - since)
            for line in replayed(
                samples, self.memory, Supervision(mode=Mode.RECOVER),
                self.header.interval_s * interval_s, self.header.name,
            )
            if isinstance(line, ReplayLine)
        ]  # fmt: skip
        begun = {line.id for line in told if line.event == "incident" and line.t < 0}
        lines = [line for line in told if line.t >= 0 and line.id not in begun]
        verdict = verdicts.judge(labels, lines)
        return Outcome(verdict.confirm_s, len(verdict.wrong), verdicts.false_actions(labels, lines))

    def plain(self) -> Outcome:
        """Judge the recording as it is."""
        return self.outcome(self.samples, self.labels)


def without_the_first(run: Played) -> Outcome:
    """Judge it without its first ten samples."""
    return run.outcome(run.samples[10:], run.labels)


def without_each_tenth(run: Played) -> Outcome:
    """Judge it without every tenth sample."""
    return run.outcome([s for n, s in enumerate(run.samples) if n % 10 != 9], run.labels)


def every_second(run: Played) -> Outcome:
    """Judge it by every second sample."""
    return run.outcome(run.samples[::2], run.labels, 2.0)


def every_second_shifted(run: Played) -> Outcome:
    """Judge it by the other half of the samples."""
    return run.outcome(run.samples[1::2], run.labels, 2.0)


def every_fifth(run: Played) -> Outcome:
    """Judge it by every fifth sample."""
    return run.outcome(run.samples[::5], run.labels, 5.0)


def busier_at_first(run: Played) -> Outcome:
    """Judge it with one more request in flight in the first sample."""
    first = run.samples[0]
    load = replace(first.load, running=(first.load.running or 0) + 1)
    if load.inflight is not None:
        load = replace(load, inflight=load.inflight + 1)
    return run.outcome((replace(first, load=load), *run.samples[1:]), run.labels)


def played_twice(run: Played) -> Outcome:
    """Judge the second of two times that it is played, in an engine that has restarted."""
    first, last = run.samples[0], run.samples[-1]
    since = last.t + run.header.interval_s - first.t
    again = [replace(s, t=s.t + since, epoch=s.epoch + last.epoch) for s in run.samples]
    return run.outcome((*run.samples, *again), run.labels, since=since)


SAMPLED: tuple[Callable[[Played], Outcome], ...] = (
    without_the_first,
    without_each_tenth,
    every_second,
    every_second_shifted,
    every_fifth,
    busier_at_first,
    played_twice,
)


def leak_taken_away(run: Played) -> Outcome:
    """Judge what is left of a leaking run without its leak."""
    samples = list(run.samples)
    for leak in run.labels.leaks:
        share = _progress(leak, run.labels.note, samples)
        samples = [
            _with(sample, Segment(leak.segment), -int(leak.counted_bytes * done))
            for sample, done in zip(samples, share, strict=True)
        ]
    return run.outcome(samples, Labels([], True, run.labels.note))


def leak_added(run: Played) -> Outcome:
    """Judge a healthy run in which the engine keeps a budget in ten minutes."""
    assert run.memory.host is not None
    rate = run.memory.host.growth_bytes / SPENT_S
    begun = run.samples[0].t + HEALTHY_S
    samples, since, epoch = [], begun, run.samples[0].epoch
    for sample in run.samples:
        if sample.epoch != epoch:
            since, epoch = max(begun, sample.t), sample.epoch
        leaked = int(rate * max(0.0, sample.t - since))
        samples.append(_with(sample, Segment.MALLOC_IN_USE, leaked))
    kind, segment = IncidentKind.HOST_GROWTH.value, Segment.MALLOC_IN_USE.value
    leak = Leak(begun, run.samples[-1].t, kind, segment, rate, "added", 0)
    return run.outcome(samples, Labels([leak], False, run.labels.note))


def failures(recording: Recording) -> Iterable[tuple[str, Outcome, Outcome]]:
    """Yield each check that this recording fails: its name, the plain outcome, and its own."""
    run = Played.of(recording)
    plain = run.plain()
    for check in SAMPLED:
        found = check(run)
        if not same(plain, found):
            yield check.__name__, plain, found
    if run.labels.leaks:
        found = leak_taken_away(run)
        if found.wrong:
            yield leak_taken_away.__name__, plain, found
    elif run.memory.host is not None:
        found = leak_added(run)
        if found.confirm_s is None:
            yield leak_added.__name__, plain, found


def _progress(leak: Leak, note: str, samples: Sequence[Sample]) -> list[float]:
    """Return which share of a leak has leaked at each sample, by what its label says it goes by."""
    said = re.search(r"per (\w+), (\w+)", note)
    counter = COUNTERS.get(said[1]) if said else "requests_total"
    if counter is not None:
        known, last = [], 0
        for sample in samples:
            value = getattr(sample.load, counter)
            last = last if value is None else int(value)
            known.append(last)
        before = max(
            (n for s, n in zip(samples, known, strict=True) if s.t <= leak.start_t), default=0
        )
        most = max(known) - before
        if most > 0:
            return [max(0, n - before) / most for n in known]
    power = 2 if said and said[2] == "accelerating" else 1
    lasts = max(1.0, leak.end_t - leak.start_t)
    return [min(1.0, max(0.0, (s.t - leak.start_t) / lasts)) ** power for s in samples]


def _with(sample: Sample, segment: Segment, size: int) -> Sample:
    """Return the sample with ``size`` bytes more, or less, in one segment of its memory."""
    if not size:
        return sample
    if segment in DEVICE_SEGMENTS:
        first, *others = sample.device
        torch = first.torch
        if torch is not None and segment is not Segment.NON_TORCH:
            reserved = _plus(torch.reserved, size)
            allocated = torch.allocated
            if segment is Segment.TORCH_ALLOCATED:
                allocated = _plus(allocated, size)
            torch = replace(torch, reserved=reserved, allocated=allocated)
        return replace(
            sample, device=[replace(first, used=_plus(first.used, size), torch=torch), *others]
        )
    host, kind = sample.host, "shmem" if segment is Segment.SHARED else "anon"
    names = [f"rss_{kind}", f"cgroup_{kind}", "cgroup_current"]
    host = replace(host, **{name: _plus(getattr(host, name), size) for name in names})
    malloc, field = sample.malloc, segment.value.removeprefix("malloc_")
    if malloc is not None and hasattr(malloc, field):
        malloc = replace(malloc, **{field: _plus(getattr(malloc, field), size)})
    return replace(sample, host=host, malloc=malloc)


def _plus(size: int | None, more: int) -> int | None:
    return None if size is None else max(0, size + more)


def main() -> int:
    """Print the checks that fail."""
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parse.add_argument("names", nargs="*", metavar="NAME")
    parse.add_argument("--drawn", action="store_true")
    options = parse.parse_args()
    for one in recordings():
        if one.name in options.names or (not options.names and one.seen is not options.drawn):
            for check, plain, found in failures(one):
                print(
                    one.name, one.about["mechanism"], check, tuple(plain), tuple(found), flush=True
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
