"""What rules of ``baselines.py`` make of a recording of a real engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from bench.baselines import WARMUP_S, Array, Baseline, alarms
from bench.detection_score import Verdict
from leaklab.recording.published import Recording
from leaklab.recording.verdicts import due
from plimsoll_api import trace
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.trace import Sample

LEAST_POINTS = 3


@dataclass(frozen=True)
class Curve:
    """One memory in one life of the engine, on an even grid; times from the recording's start."""

    kind: str
    t: Array
    sizes: Array
    limit: float


def blank(recording: Recording) -> Verdict:
    """A verdict of which nothing is known yet."""
    hours = recording.about["recorded_s"] / 3600
    mechanism, leaks = recording.about["mechanism"], bool(recording.labels.leaks)
    return Verdict(recording.name, mechanism, leaks, hours)


def curves(recording: Recording) -> list[Curve]:
    """The memories that the rules are given."""
    header, samples = trace.read(recording.trace)
    limit = float(recording.about["machine"]["memory_bytes"])
    found = []
    for _, life in groupby(samples, key=lambda sample: sample.epoch):
        found += list(_of_life(list(life), header.shared_device, header.interval_s, limit))
    return found


def _of_life(
    samples: Sequence[Sample], shared: bool, interval_s: float, limit: float
) -> Iterator[Curve]:
    totals = [sum(device.total or 0 for device in sample.device) for sample in samples]
    for kind, sizes, most in (
        (IncidentKind.HOST_GROWTH.value, [host_bytes(sample) for sample in samples], limit),
        (
            IncidentKind.DEVICE_GROWTH.value,
            [device_bytes(sample, shared) for sample in samples],
            float(max(totals)),
        ),
    ):
        known = [
            (sample.t, size)
            for sample, size in zip(samples, sizes, strict=True)
            if size is not None
        ]
        if len(known) < LEAST_POINTS:
            continue
        count = int((known[-1][0] - known[0][0]) / interval_s)
        t = known[0][0] + interval_s * np.arange(count, dtype=np.float64)
        even = np.interp(t, [at for at, _ in known], [size for _, size in known])
        if len(t) >= LEAST_POINTS:
            yield Curve(kind, t, even, most)


def host_bytes(sample: Sample) -> int | None:
    """Anonymous and shared memory of the engine; None where unknown."""
    host = sample.host
    if host.cgroup_anon is not None:
        return host.cgroup_anon + (host.cgroup_shmem or 0)
    return None if host.rss_anon is None else host.rss_anon + (host.rss_shmem or 0)


def device_bytes(sample: Sample, shared: bool) -> int | None:
    """Used memory of the devices, or of devices that others use what torch reserved there."""
    if shared:
        sizes = [device.torch.reserved if device.torch else None for device in sample.device]
    else:
        sizes = [device.used for device in sample.device]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def ruled(recording: Recording, seen: Sequence[Curve], baseline: Baseline, choice: Any) -> Verdict:
    """What a rule makes of the memories of a recording."""
    verdict = blank(recording)
    leaks = recording.labels.leaks
    found: list[float] = []
    for curve in seen:
        began = curve.t[0]
        if curve.t[-1] - began <= WARMUP_S:
            continue
        for after in alarms(baseline, curve.t - began, curve.sizes, curve.limit, choice):
            if due(leaks, curve.kind, began + after):
                found.append(began + after)
            else:
                verdict.false += 1
                verdict.actions += 1
    if found and leaks:
        verdict.delay_s = min(found) - leaks[0].start_t
    return verdict
