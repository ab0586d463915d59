"""Leaks of engines whose load is read from a page: one moment of what changes within milliseconds.

The figures are SGLang's on a CPU, three clients with short requests: a page shows none of them
or all, and its memory is 20 MiB lower at the first request than ever after.

Tests ``detect/detector.py``.
"""

from __future__ import annotations

import random

import pytest

from leaklab.series import MIB
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.trace import Host, Malloc, Sample, SampleLoad
from plimsoll_sidecar.detect.detector import Detector

POLICY = MemoryPolicy(host=MemoryBudget(256 * MIB, 3600.0), warmup_s=60.0)
LEAK_BYTES_S = 2 * MIB


def sample(t: float, in_flight: int, page_t: float, leaked: float) -> Sample:
    malloc = int((900 if t > 2 else 880) * MIB + leaked)
    return Sample(
        t=t,
        epoch=1,
        host=Host(rss_anon=1100 * MIB + malloc, rss_shmem=0, processes=4),
        malloc=Malloc(in_use=malloc, retained=30 * MIB, python_objects=700 * MIB),
        load=SampleLoad(
            running=in_flight, waiting=0, inflight=in_flight, requests_total=int(8 * t)
        ),
        ready=True,
        load_age_s=t - page_t,
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("served_s", [100.0, 110.0, 130.0])
def test_a_leak_is_believed_soon_whatever_the_pages_show(seed: int, served_s: float) -> None:
    detector, draw = Detector(POLICY, 120.0, 1.0), random.Random(seed)
    in_flight, page_t = 1, 0.0
    for second in range(int(served_s) + 90):
        if second - page_t >= 2:
            in_flight, page_t = draw.choice([0, 3, 4, 6]), float(second)
        leaked = max(0.0, second - served_s) * LEAK_BYTES_S
        suspicions = detector.update(sample(second, in_flight, page_t, leaked)).suspicions
        assert not suspicions or second > served_s
        if suspicions and suspicions[0].unconfirmed is None:
            break
    assert suspicions, "it is suspected"
    assert (second - served_s) * LEAK_BYTES_S <= 0.7 * 256 * MIB
