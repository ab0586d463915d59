"""Each kind of growth that ends, in a process of its own: how high it comes, and where it ends.

Tests ``leaklab/bounded_caches.py`` and ``leaklab/ended_growth.py``, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque

import pytest

from leaklab import bounded_caches, bounded_growth, ended_growth
from leaklab.recording.run import Injection
from leaklab.recording.runs import RUNS

MIB = 1 << 20
PROGRAM = """
import json, sys, time
from pathlib import Path
from leaklab import bounded_caches, bounded_growth, ended_growth
HEALTHY = bounded_growth.HEALTHY | ended_growth.HEALTHY
name, seconds = sys.argv[1], int(sys.argv[2])
def resident():
    kept = Path("/proc/self/task").glob("*/children")
    pids = ["self", *(pid for file in kept for pid in file.read_text().split())]
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    fields = "RssAnon:", "RssShmem:"
    return sum(1024 * int(t.split(field)[1].split()[0]) for t in texts for field in fields)
if name in bounded_caches.BOUNDED:
    take = bounded_caches.BOUNDED[name]()
    tick = lambda t: take(1 << 20)
else:
    tick = HEALTHY[name]()
before, sizes = resident(), []
for second in range(seconds):
    tick(float(second))
    if name in ("arena_spread", "short_programs"):
        time.sleep(0.01)
    sizes.append(resident() - before)
print(json.dumps(sizes))
"""
SECONDS, LAST_S = 480, 160
GOES_BACK = {
    "night_jobs": 90, "weight_reload": 112, "flushed_log": 45, "short_programs": 44,
    "generational_cache": 96, "drained_backlog": 108, "deferred_frees": 102,
}  # fmt: skip
"""What does not stay: the most of it, in MiB."""
STAYS = {
    "prompt_cache": 170, "large_cache": 300, "even_cache": 110, "doubling_table": 128,
    "high_water": 96, "compile_cache": 84, "resized_dict": 100, "lazy_models": 112,
    "arena_spread": 80, "answer_cache": 72, "known_users": 230, "audit_ring": 80,
    "two_caches": 130, "refilled_cache": 90, "open_sessions": 72, "pool_crumbs": 84,
    "touched_table": 110, "staircase": 96, "uneven_stairs": 104, "object_spikes": 80,
    "seen_words": 70, "pooled_buffers": 54, "report_builds": 72, "expiring_entries": 64,
    "recent_prefixes": 75, "segmented_cache": 144, "clock_frames": 112, "filter_layers": 120,
    "message_buffers": 155, "merged_runs": 104, "shared_ring": 120, "first_fill": 64,
    "late_burst": 140,
}  # fmt: skip
"""What is held at the end, in MiB. A table that doubles holds the old one beside the new one."""
UNSTEADY = ("known_users", "open_sessions", "touched_table", "seen_words", "merged_runs")
"""What goes up and down at its bound, or comes ever closer to it."""
BOUNDS = {
    run.mechanism: run.cause.bound
    for run in RUNS
    if isinstance(run.cause, Injection) and run.cause.bound is not None
}
"""What the labels of a recording state as the most, in bytes."""
NOISE = 2 * MIB
"""Of a Python process beside what its mechanism holds."""


def sizes(name: str) -> list[int]:
    # By itself, glibc raises the threshold when large blocks are freed, and may keep later ones.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(SECONDS)],
        env=env, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", STAYS)
def test_it_grows_to_its_bound_and_stays_there(name: str) -> None:
    found = sizes(name)
    assert found[-1] == pytest.approx(STAYS[name] * MIB, rel=0.15)
    assert max(found) <= 1.7 * found[-1]
    assert max(found) <= BOUNDS.get(name, max(found)) + NOISE
    if name not in UNSTEADY:
        assert max(found[-LAST_S:]) - min(found[-LAST_S:]) <= 4 * MIB


@pytest.mark.parametrize("name", GOES_BACK)
def test_it_goes_back_each_time(name: str) -> None:
    found = sizes(name)
    assert max(found) == pytest.approx(GOES_BACK[name] * MIB, rel=0.15)
    assert max(found) <= BOUNDS.get(name, max(found)) + NOISE
    last = found[-LAST_S:]
    assert max(last) - min(last) >= 0.4 * max(found)
    assert max(last) <= 1.05 * max(found[:-LAST_S])


def test_an_entry_goes_when_it_is_too_old() -> None:
    now, held = 0.0, []
    take = bounded_caches.expiring_entries(bound=64 * MIB, lives_s=75.0, clock=lambda: now)
    entries = next(
        cell.cell_contents
        for cell in take.__closure__ or ()
        if isinstance(cell.cell_contents, deque)
    )
    for second in range(200):
        now = float(second)
        take(MIB // 2)
        held.append(sum(len(entry) for _, entry in entries))
    assert held[74] == held[-1] - MIB // 2 == 75 * MIB // 2
    assert max(held) == held[-1]


def test_every_kind_has_its_bound_here() -> None:
    every = bounded_growth.HEALTHY | ended_growth.HEALTHY | bounded_caches.BOUNDED
    assert every.keys() == GOES_BACK.keys() | STAYS.keys()
