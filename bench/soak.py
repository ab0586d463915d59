"""Very many short requests in one process life: what each of them leaves behind.

    python bench/soak.py --requests 1000000

Requests of 1 to 4 tokens go through the frontend's own API (no HTTP) to a worker with a tiny model,
``--concurrency`` at a time; 20 % are given up at a random point: before their first step, while
they wait, between two tokens. After each block of them the engine goes idle: both sides' ledgers
are audited against each other, and the memory of both processes is read (malloc in use and Python
objects; not RSS, which also tells what the allocator keeps for later). Growth is the Theil-Sen
slope over the idle points after the first tenth, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result import publish
from scipy.stats import theilslopes

from plimsoll_engine import ipc
from plimsoll_engine.frontend.audit import audit
from plimsoll_engine.frontend.engine import Engine
from plimsoll_engine.frontend.requests import Generation
from plimsoll_engine.frontend.tokenizer import Tokenizer
from plimsoll_engine.host_memory import PythonObjects, malloc
from plimsoll_engine.settings import Settings

VOCABULARY = 500
"""Of the tiny model's 512 tokens, the special ones left out."""
ABORTED = 0.2
WARM_UP = 0.1
"""Of the idle points: caches fill, the allocator finds its size."""
REPORT_TIMEOUT_S = 5.0
POLL_S = 0.02
IDLE_TIMEOUT_S = 60.0
STALL_S = 120.0


@dataclass(frozen=True)
class Point:
    """One idle moment; bytes are malloc in use plus Python objects."""

    requests: int
    frontend_bytes: int
    worker_bytes: int

    @property
    def bytes(self) -> int:
        return self.frontend_bytes + self.worker_bytes


class Soak:
    """The clients of one engine."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.done = 0
        self.aborted = 0
        self.failed = 0
        self.python = PythonObjects()
        self.points: list[Point] = []
        self.findings: list[str] = []

    async def run(self, requests: int, block: int, concurrency: int) -> None:
        for begin in range(0, requests, block):
            left = iter(range(begin, min(begin + block, requests)))
            await asyncio.gather(*(self._client(left) for _ in range(concurrency)))
            await self._idle_point()

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._request(number)

    async def _request(self, number: int) -> None:
        rng = self.rng
        # One in four shares its beginning with others, so that cached blocks are shared, too.
        shared = [5] * 32 if rng.random() < 0.25 else []
        prompt = shared + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 24))]
        sampling = ipc.Sampling(
            max_tokens=rng.randint(1, 4),
            temperature=rng.choice((0.0, 0.0, 0.0, 1.0)),
            seed=number,
            ignore_eos=True,
        )
        generation = Generation(f"soak-{number}", prompt, sampling, self.engine.tokenizer.decode)
        aborted = rng.random() < ABORTED
        async with asyncio.timeout(STALL_S):
            with self.engine.running(generation):
                if aborted:
                    await self._leave(generation)
                else:
                    while (await generation.delta()).finish_reason is None:
                        pass
        self.done += 1
        self.aborted += aborted

    async def _leave(self, generation: Generation) -> None:
        match self.rng.randrange(3):
            case 0:
                pass  # between its registration and its submission's arrival
            case 1:
                await asyncio.sleep(self.rng.random() * 0.02)
            case 2:
                await generation.delta()

    async def _idle_point(self) -> None:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            await self.engine.idle.wait()
        found = await audit(self.engine)
        if not found.idle:
            self.findings.append(f"after {self.done} requests the engine is not idle")
        self.findings += [f"{f.rule}: {f.detail}" for f in found.findings]
        worker = await reports(self.engine, 2)  # the first may have been under way
        in_use, _ = malloc()
        _, objects = self.python.measure()
        memory = worker.memory
        assert in_use is not None
        assert memory.malloc_in_use is not None
        assert memory.python_objects is not None
        self.points.append(
            Point(self.done, in_use + objects, memory.malloc_in_use + memory.python_objects)
        )


async def reports(engine: Engine, count: int) -> ipc.Report:
    """The ``count``-th report of the worker from now on."""
    for _ in range(count):
        before = engine.report
        for _ in range(int(REPORT_TIMEOUT_S / POLL_S)):
            if engine.report is not before:
                break
            await asyncio.sleep(POLL_S)
    assert engine.report is not None
    return engine.report


def growth(points: list[Point]) -> tuple[float, float, float]:
    """Bytes a request: (slope, low, high) by Theil-Sen with its 95 % interval."""
    steady = points[int(len(points) * WARM_UP) :]
    slope, _, low, high = theilslopes(
        [point.bytes for point in steady], [point.requests for point in steady]
    )
    return float(slope), float(low), float(high)


def make_model(folder: Path) -> None:
    """In a process of its own: a frontend has no torch."""
    subprocess.run([sys.executable, "-m", "plimsoll_engine.models.tiny", folder], check=True)


async def soak(
    requests: int, block: int, concurrency: int, seed: int, inject: str = ""
) -> dict[str, Any]:
    """The figures and samples of one run; ``inject`` as in ``PLIMSOLL_INJECT``."""
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        model = Path(folder) / "model"
        await asyncio.to_thread(make_model, model)
        settings = Settings(
            model=model,
            served_model_name="tiny",
            run_dir=Path(folder),
            dtype="float32",
            device="cpu",
            max_num_seqs=concurrency,
            max_model_len=128,
            num_blocks=16 * concurrency,
            max_queued=2 * concurrency,
            inject=inject,
        )
        engine = Engine(settings, Tokenizer(model))
        try:
            await engine.start()
            client = Soak(engine, seed)
            begun = time.monotonic()
            await client.run(requests, block, concurrency)
            took_s = time.monotonic() - begun
            collected = await _garbage(engine)
            await engine.shutdown(10)
        finally:
            await engine.workers.close()
    slope, low, high = growth(client.points)
    return {
        "figures": {
            "requests_count": client.done,
            "aborted_count": client.aborted,
            "requests_per_s": client.done / took_s,
            "growth_bytes_per_request": slope,
            "growth_low_bytes_per_request": low,
            "growth_high_bytes_per_request": high,
            "gen2_collected_count": collected,
            "audit_violations_count": len(client.findings),
        },
        "samples": {
            "findings": client.findings[:20],
            "points": [[p.requests, p.frontend_bytes, p.worker_bytes] for p in client.points],
        },
    }


async def _garbage(engine: Engine) -> int:
    """Objects that full collections found in both processes since the start, the last one now."""
    in_frontend = engine.collections.collected + gc.collect()
    operation = "soak-trim"
    await engine.ask(ipc.Trim(operation), operation, ipc.Trimmed, 30)
    in_worker = (await reports(engine, 1)).memory.full_collected
    assert in_worker is not None
    return in_frontend + in_worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=10_000, help="requests between idle points")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    done = asyncio.run(
        soak(arguments.requests, arguments.block, arguments.concurrency, arguments.seed)
    )
    publish("soak", done["figures"], done["samples"])


if __name__ == "__main__":
    main()
