"""Very many short requests in one process life: what each of them leaves behind.

    python -m bench.soak --requests 1000000

Requests of 1 to 4 tokens go through the frontend's own API (no HTTP), ``--concurrency`` at a time:
text and chats with an image to a tiny LLaVA, sounds to a tiny Whisper. An engine serves one model,
so two engines live side by side in this process, each with a worker of its own; images and sounds
are files that the frontend decodes or finds in its cache. With ``--kind text`` they are texts of 1
to 24 tokens, for a model with experts and one in FP8, both with drafts. Each twentieth request has
a grammar, and two of five grammars are refused. 20 % are given up at a random point: while their
file is decoded or their grammar compiled, before their first step, while they wait, while a grammar
takes in a token, between two tokens. After each block of them the engines go idle: both sides'
ledgers are audited against each other, and the memory of all three processes is read (malloc in use
and Python objects; not RSS, which also tells what the allocator keeps for later). Growth is the
Theil-Sen slope over the idle points after the first tenth, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import theilslopes

from bench.result import publish
from bench.soak_requests import Clients
from plimsoll_engine.frontend.admin.engine_audit import run_audit
from plimsoll_engine.frontend.async_engine import AsyncEngine
from plimsoll_engine.frontend.requests.tokenizer import Tokenizer
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.messages.speculative import Speculative
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.process.collector import FullCollectionCounter
from plimsoll_engine.process.host_memory import PythonMemoryEstimator, read_malloc_bytes
from plimsoll_engine.settings import (
    WEIGHTS_SOCKET_NAME,
    WORKER_SOCKET_NAME,
    Settings,
    StandbyPolicy,
)

MEDIA_CACHE_BYTES = 1 << 20
"""Of the processor cache and of the receiver cache: 28 images or 65 sounds, so that both evict."""
ENCODER_TOKENS = 2048
"""128 images, or 40 sounds."""
WARM_UP = 0.1
"""Of the idle points: caches fill, the allocator finds its size."""
REPORT_TIMEOUT_S = 5.0
POLL_S = 0.02
IDLE_TIMEOUT_S = 60.0
SHUTDOWN_S = 10.0


@dataclass(frozen=True)
class Point:
    """One idle moment; bytes are malloc in use plus Python objects."""

    requests: int
    frontend_bytes: int
    worker_bytes: int

    @property
    def bytes(self) -> int:
        return self.frontend_bytes + self.worker_bytes


class Idle:
    """What is found and measured when nothing runs. ``findings`` are the audits'."""

    def __init__(self, engines: Sequence[AsyncEngine]) -> None:
        self._engines = engines
        self._python = PythonMemoryEstimator()
        self.points: list[Point] = []
        self.findings: list[str] = []

    async def look(self, requests: int) -> None:
        """After so many ``requests``."""
        for engine in self._engines:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                await engine.idle.wait()
            found = await run_audit(engine)
            if not found.idle:
                self.findings.append(f"after {requests} requests the engine is not idle")
            self.findings += [f"{f.rule}: {f.detail}" for f in found.findings]
        # The first report may have been under way.
        reported = await asyncio.gather(*(reports(engine, 2) for engine in self._engines))
        workers = 0
        for memory in (report.memory for report in reported):
            assert memory.malloc_in_use is not None
            assert memory.python_objects is not None
            workers += memory.malloc_in_use + memory.python_objects
        in_use, _ = read_malloc_bytes()
        assert in_use is not None
        _, objects = self._python.measure()
        self.points.append(Point(requests, in_use + objects, workers))


async def reports(engine: AsyncEngine, count: int) -> worker_ipc.Report:
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


@dataclass(frozen=True)
class Kind:
    """Engines side by side. ``serves`` has each model's kinds of request, with their shares."""

    serves: dict[str, dict[str, float]]
    tokens: int


KINDS = {
    "media": Kind(
        {"llava": {"text": 0.55, "image": 0.2, "grammar": 0.05}, "whisper": {"audio": 0.2}}, 4
    ),
    "text": Kind({"experts": {"experts": 0.5}, "fp8": {"fp8": 0.45, "grammar": 0.05}}, 24),
}
"""``text``: experts with prompt lookup, and FP8 weights with a draft model. Both keep their keys
and values in FP8 and have a standby worker."""


def make_models(folder: Path, kind: str) -> None:
    """In processes of their own: a frontend has no torch."""
    models = "plimsoll_faults.models."
    commands = [[models + "tiny_media", "all", str(folder)]]
    if kind == "text":
        commands = [
            [models + "tiny_moe", str(folder / "experts")],
            [models + "tiny", str(folder / "draft")],
            ["plimsoll_faults.models.write_fp8", str(folder / "draft"), str(folder / "fp8")],
        ]
    for command in commands:
        subprocess.run([sys.executable, "-m", *command], check=True)


def own_settings(kind: str, model: Path) -> dict[str, Any]:
    """Those of one model's worker beside the common ones."""
    if kind == "media":
        return {"media_cache_bytes": MEDIA_CACHE_BYTES, "encoder_cache_tokens": ENCODER_TOKENS}
    drafts = Speculative("draft_model", 4, model=str(model.parent / "draft"))
    return {
        "kv_cache_dtype": "fp8",
        "speculative": Speculative("ngram", 4, 4, 1) if model.name == "experts" else drafts,
    }


def settings(kind: str, model: Path, concurrency: int, inject: str) -> Settings:
    """Those of the engine that serves the checkpoint in ``model``."""
    run_dir = model.parent / f"run-{model.name}"
    run_dir.mkdir()
    worker = WorkerConfig(
        model=str(model),
        run_dir=str(run_dir),
        socket=str(run_dir / WORKER_SOCKET_NAME),
        weights=str(run_dir / WEIGHTS_SOCKET_NAME),
        dtype="float32",
        device="cpu",
        max_num_seqs=concurrency,
        max_model_len=128,
        num_blocks=16 * concurrency,
        inject=inject,
        **own_settings(kind, model),
    )
    return Settings(
        worker=worker,
        served_model_name=model.name,
        max_queued=2 * concurrency,
        standby_worker=StandbyPolicy.ALWAYS if kind == "text" else StandbyPolicy.NEVER,
    )


@asynccontextmanager
async def serving(kind: str, concurrency: int, inject: str) -> AsyncIterator[list[AsyncEngine]]:
    """The engines of ``kind``."""
    with tempfile.TemporaryDirectory(prefix="soak") as name:
        folder = Path(name)
        await asyncio.to_thread(make_models, folder, kind)
        engines = [
            AsyncEngine(
                settings(kind, folder / model, concurrency, inject), Tokenizer(folder / model)
            )
            for model in KINDS[kind].serves
        ]
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            yield engines
        finally:
            await asyncio.gather(*(engine.shut_down(SHUTDOWN_S) for engine in engines))
            await asyncio.gather(*(engine.workers.close() for engine in engines))


def clients_of(kind: str, engines: list[AsyncEngine], seed: int) -> Clients:
    """Clients of the engines of ``kind``."""
    serves = KINDS[kind].serves.values()
    return Clients(
        {name: engine for engine, own in zip(engines, serves, strict=True) for name in own},
        {name: share for own in serves for name, share in own.items()},
        KINDS[kind].tokens,
        seed,
    )


async def soak(
    requests: int, block: int, concurrency: int, seed: int, inject: str = "", kind: str = "media"
) -> dict[str, Any]:
    """The figures and samples of one run; ``inject`` as in ``PLIMSOLL_INJECT``."""
    async with serving(kind, concurrency, inject) as engines:
        clients, idle, collections = (
            clients_of(kind, engines, seed),
            Idle(engines),
            FullCollectionCounter(),
        )
        gc.collect()
        collections.start()
        begun = time.monotonic()
        for begin in range(0, requests, block):
            end = min(begin + block, requests)
            await clients.run(range(begin, end), concurrency)
            await idle.look(end)
        took_s = time.monotonic() - begun
        gc.collect()
        collections.stop()
        in_workers = [await _garbage(engine) for engine in engines]
    slope, low, high = growth(idle.points)
    return {
        "figures": {
            "requests_count": clients.done.total(),
            **{f"{kind}_requests_count": count for kind, count in sorted(clients.done.items())},
            "aborted_count": clients.aborted,
            "refused_count": clients.refused,
            "requests_per_s": clients.done.total() / took_s,
            "growth_bytes_per_request": slope,
            "growth_low_bytes_per_request": low,
            "growth_high_bytes_per_request": high,
            "gen2_collected_count": collections.collected + sum(in_workers),
            "audit_violations_count": len(idle.findings),
        },
        "samples": {
            "engines": KINDS[kind].serves,
            "drafted": [
                {"drafts": report.draft_tokens_total, "accepted": report.accepted_tokens_total}
                for engine in engines
                if (report := engine.report) is not None
            ],
            "findings": idle.findings[:20],
            "points": [[p.requests, p.frontend_bytes, p.worker_bytes] for p in idle.points],
        },
    }


async def _garbage(engine: AsyncEngine) -> int:
    """Objects that full collections found in the worker since its start, the last one now."""
    operation = "soak-trim"
    await engine.query_worker(worker_ipc.Trim(operation), operation, worker_ipc.TrimResult, 30)
    collected = (await reports(engine, 1)).memory.full_collected
    assert collected is not None
    return collected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=10_000, help="requests between idle points")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, default="media", help="of the engines")
    flags = parser.parse_args()
    done = asyncio.run(
        soak(flags.requests, flags.block, flags.concurrency, flags.seed, kind=flags.kind)
    )
    name = "soak" if flags.kind == "media" else f"soak-{flags.kind}"
    publish(name, done["figures"], done["samples"])


if __name__ == "__main__":
    main()
