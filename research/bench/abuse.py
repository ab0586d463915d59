"""One client abuses the service in every way that we know. What do the others notice?

    python -m bench.abuse                         # everything, some 25 minutes
    python -m bench.abuse --scale 0.1             # a tenth of it, about a minute
    python -m bench.abuse --only grammars probe   # classes whose names hold one of these words

A tiny model that sees, on the CPU, beside its real supervisor in mode ``Recover``. Each class is
played from a process of its own with one API key, while clients with another key stream and ask
small things, the kubelet's probe asks the supervisor and Prometheus scrapes it. For each class:

- ``attempts_count``; ``requests_of_others_failed_count``, and the longest wait of a request of
  theirs, ``others_wait_max_s``;
- ``restarts_provoked_count``: workers and engines started beyond what the class itself asks for;
- ``loop_block_max_s``: by the engine's own metric where it has one and it rose during the class,
  but never more than the longest answer of ``/health`` (``health_max_s``), which is what counts
  without the metric. The samples say which it was;
- ``memory_returned_ratio``: of the anonymous memory that the replica's processes gained at the
  peak, what is gone within 30 s or held by one of the engine's bounded caches (``cached_mib``, by
  its ledger); 1 where they gained less than 32 MiB;
- ``unclear_errors_count``: refusals that are not in the API's shape, name neither field nor limit,
  or show the inside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import abuse_operations, abuse_supervisors
from bench.abuse_others import Others
from bench.abuse_play import CLASSES
from bench.abuse_replica import ABUSER, OTHER, Replica, restarts, started
from bench.abuse_scene import Played, Scene
from bench.result import publish
from leaklab import replicas
from leaklab.replicas import Policy

ROOT = Path(__file__).resolve().parents[2]
OF_SUPERVISORS = ("supervisor_kills", "lying_engine")
POLICY = Policy(growth_mib=256, warmup="4s", stall="15s", interval_s=0.5)
FLAGS = ("--max-num-seqs=32", "--max-queued=256", "--num-blocks=2048")
NOISE_BYTES = 32 << 20
SETTLE_S = 30.0
PLAY_S = 600.0
KILLS, KILLS_S = 50, 900.0
LIE_S = 4.0
RETURNED = 0.95


@dataclass
class Judged:
    """One class."""

    figures: Mapping[str, float | int | None]
    samples: dict[str, Any] = field(default_factory=dict)


async def abused(replica: Replica, others: Others, name: str, scale: float) -> Judged:
    """Plays the class ``name`` and says what it did."""
    epoch, incidents = await replica.epoch(), len(replica.incidents())
    block = await replica.longest_block_s()
    others.reset()
    before = replica.peak_bytes = await asyncio.to_thread(replica.anonymous_bytes)
    cached = await replica.cached_bytes()
    begin = time.monotonic()
    played = await play(name, replica.scene(ABUSER, scale))
    took = time.monotonic() - begin
    after = await replica.epoch()
    cached = max(0, await replica.cached_bytes() - cached)
    returned = await settled(replica, before + cached, replica.peak_bytes - before)
    if restarts(epoch, after):
        await replica.steady()  # a class's reference is never taken in the midst of a restart
    blocked, measured = await loop_block(replica, block, others.health_max_s)
    asked_for = abuse_operations.RESTARTS.get(name, 0)
    return Judged(
        {
            "attempts_count": played.attempts,
            "requests_of_others_failed_count": others.failures.total(),
            "others_wait_max_s": others.wait_max_s,
            "restarts_provoked_count": max(0, restarts(epoch, after) - asked_for),
            "loop_block_max_s": blocked,
            "health_max_s": others.health_max_s,
            "memory_returned_ratio": returned,
            "unclear_errors_count": len(played.unclear),
            **played.figures,
        },
        {
            "took_s": round(took, 1),
            "loop_block_by": measured,
            "others_done": others.done,
            "failures": dict(others.failures.most_common(10)),
            "unclear": sorted(set(played.unclear))[:10],
            "notes": played.notes,
            "incidents": replica.incidents()[incidents:],
            "gained_mib": (replica.peak_bytes - before) >> 20,
            "cached_mib": cached >> 20,
        },
    )


async def play(name: str, scene: Scene) -> Played:
    """The class in a process of its own, so that what it costs the client delays nobody's clock."""
    command = [sys.executable, "-m", "bench.abuse_play", name, json.dumps(asdict(scene))]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        async with asyncio.timeout(PLAY_S):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return Played(unclear=[f"the abuser was not done within {PLAY_S:g} s"])
    if process.returncode:
        raise RuntimeError(f"the class {name} ended with status {process.returncode}")
    return Played(**json.loads(out))


async def loop_block(
    replica: Replica, before: float | None, health_max_s: float
) -> tuple[float, str]:
    """Seconds, and what measured them."""
    after = await replica.longest_block_s()
    if before is None or after is None:
        return health_max_s, "/health"
    # The metric holds the last minute or two: an equal value may be an earlier class's.
    return min(after, health_max_s), "metric" if after > before else "metric, or /health"


async def settled(replica: Replica, expected: int, gained: int) -> float:
    """The share of the ``gained`` bytes that is given back, so that ``expected`` bytes are left."""
    if gained < NOISE_BYTES:
        return 1.0
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = await asyncio.to_thread(replica.anonymous_bytes) - expected
        returned = min(1.0, max(0.0, 1 - left / gained))
        if returned >= RETURNED or left < NOISE_BYTES or time.monotonic() > deadline:
            return 1.0 if left < NOISE_BYTES else returned
        await asyncio.sleep(0.5)


async def measure(names: list[str], scale: float, root: Path) -> dict[str, Judged]:
    await asyncio.to_thread(make_model, root)
    found: dict[str, Judged] = {}
    common = [name for name in names if name in CLASSES]
    if common:
        plan = replicas.engine("abused", root / "a", root / "llava", POLICY, os.environ, "", FLAGS)
        async with started(plan) as replica:
            others = Others(replica.scene(OTHER))
            watching = asyncio.create_task(replica.watch())
            async with others.busy():
                await replica.steady()  # caches and the allocator find their size
                for name in common:
                    found[name] = await abused(replica, others, name, scale)
                    print(name, json.dumps(asdict(found[name])), file=sys.stderr, flush=True)
            watching.cancel()
    if "supervisor_kills" in names:
        kills = max(5, round(KILLS * scale))
        played, others, provoked = await abuse_supervisors.killed(
            root / "k", root / "llava", kills, KILLS_S
        )
        found["supervisor_kills"] = _of_supervisor(
            played, others.failures.total(), provoked, {"failures": dict(others.failures)}
        )
    if "lying_engine" in names:
        played, failed, orders = await abuse_supervisors.lied_to(
            root / "l", root / "llava", max(1.0, LIE_S * scale)
        )
        found["lying_engine"] = _of_supervisor(played, failed, orders, {})
    return found


def _of_supervisor(played: Played, failed: int, provoked: int, samples: dict[str, Any]) -> Judged:
    figures = {
        "attempts_count": played.attempts,
        "requests_of_others_failed_count": failed,
        "restarts_provoked_count": provoked,
        "unclear_errors_count": len(played.unclear),
        **played.figures,
    }
    return Judged(figures, samples | {"unclear": sorted(set(played.unclear))[:10]})


def make_model(root: Path) -> None:
    """The tiny checkpoint that sees; in a process of its own, for this one has no torch."""
    module = "plimsoll_faults.models.tiny_media"
    subprocess.run([sys.executable, "-m", module, "llava", root / "llava"], check=True, timeout=300)


def summed_up(found: dict[str, Judged]) -> dict[str, float | int | None]:
    """The figures of each class by its name, and the worst of all."""
    figures: dict[str, float | int | None] = {}
    for key, worst in (
        ("attempts_count", sum), ("requests_of_others_failed_count", sum),
        ("restarts_provoked_count", sum), ("unclear_errors_count", sum),
        ("loop_block_max_s", max), ("memory_returned_ratio", min),
    ):  # fmt: skip
        values = [v for one in found.values() if (v := one.figures.get(key)) is not None]
        figures[key] = worst(values) if values else None
    figures["classes_count"] = len(found)
    for name, one in found.items():
        figures |= {f"{name}_{key}": value for key, value in one.figures.items()}
    return figures


def chosen(words: list[str]) -> list[str]:
    every = [*CLASSES, *OF_SUPERVISORS]
    return [name for name in every if not words or any(word in name for word in words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the whole abuse")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="some classes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="abuse-") as folder:
        found = asyncio.run(measure(chosen(given.only), given.scale, Path(folder)))
    publish("abuse", summed_up(found), {name: one.samples for name, one in found.items()})


if __name__ == "__main__":
    main()
