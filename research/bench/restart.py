"""How long a restart of the worker is felt, and a cold start.

    python -m bench.restart --name restart-h200 --model /path/to/llama-8b --small /path/to/0.6b
    python -m bench.restart --shape small --restarts 5 --loaded 2     # on a CPU
    python -m bench.restart --standby ...                             # with a standby worker
    python -m bench.restart --model ... -- --tensor-parallel-size 4

Three parts, on one engine process with real HTTP clients: ``--restarts`` restarts while one stream
runs (from the admin call to the first token that the new worker made, and to the next standby that
is prepared, ``standby_return_p50_s``; the stream's longest pause may end later, with the capture of
a graph); ``--loaded`` restarts under ``--streams`` streams of ``--context`` prompt tokens each (the
longest pause of every stream, and the tokens that the engine says it computed again); and starts of
the whole engine from nothing to ready, each the second of two, so that weights are in the page
cache and kernels are compiled. ``left_bytes`` is the most that torch had allocated, on all ranks
together, above its baseline after a worker had left; ``used_growth_mib`` how much more of any
device was in use after the last restart than after the first, ``nvml_left_mib`` after the engine
had ended than before it began. Figures of earlier runs that this one does not measure stay in the
result file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pynvml
import torch

from bench import checkpoint
from bench.result import RESULTS, earlier, publish
from bench.running import Engine, Stream, running
from plimsoll_cli.figures import compute_percentile

MIB = 1 << 20
SETTLE_S = 0.2
"""Of undisturbed streaming before each restart."""


async def standby_prepared(engine: Engine) -> None:
    """Until the worker has a standby beside it."""
    async with asyncio.timeout(120):
        while True:
            status = await asyncio.to_thread(engine.admin, "GET", "/status")
            if status["standby"]["state"] == "prepared":
                return
            await asyncio.sleep(0.05)


class Load:
    """Streams that run until the end of the block."""

    def __init__(self, engine: Engine, count: int, context: int, limit: int, vocab: int) -> None:
        draw = random.Random(0)
        self.seen = [Stream() for _ in range(count)]
        self._coroutines = [
            engine.stream([draw.randrange(2, vocab) for _ in range(context)], limit, one)
            for one in self.seen
        ]

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(coroutine) for coroutine in self._coroutines]
        await self.flows()
        return self

    async def flows(self) -> None:
        """Every stream has had several pieces since now."""
        before = [len(one.times) for one in self.seen]
        async with asyncio.timeout(120):
            while any(len(s.times) < b + 3 for s, b in zip(self.seen, before, strict=True)):
                if errors := [one.error for one in self.seen if one.error]:
                    raise RuntimeError(errors[0])
                if any(task.done() for task in self._tasks):
                    raise RuntimeError("a stream ended before its time: raise --limit")
                await asyncio.sleep(0.01)

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def device_bytes() -> list[int]:
    """Bytes in use on each visible device by all processes, by NVML. Empty where there is none."""
    found = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # others of the host may be busy
        for index in (
            map(int, visible.split(",")) if visible else range(pynvml.nvmlDeviceGetCount())
        ):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
    return found


def growth_mib(before: list[int], after: list[int]) -> float | None:
    """Return by how much the device that grew most grew; None without devices."""
    grown = [b - a for a, b in zip(before, after, strict=True)]
    return round(max(grown) / MIB, 1) if grown else None


def left_bytes(operation: dict[str, Any]) -> int | None:
    """What a worker left of its devices' memory; None where it was not told, or on a CPU."""
    stop = next(step for step in operation["steps"] if step["name"] == "stop_worker")
    if stop.get("after_bytes") is None:
        return None
    return int(stop["after_bytes"] - stop["before_bytes"])


def steps_of(operation: dict[str, Any]) -> dict[str, float]:
    """Seconds of each step of a restart, by its name."""
    return {step["name"]: step["duration_s"] for step in operation["steps"]}


async def light(engine: Engine, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Restarts under one stream of a few tokens of context."""
    found = []
    for number in range(flags.restarts):
        async with Load(engine, 1, 16, flags.limit - 16, flags.vocab) as load:
            if flags.standby:
                await standby_prepared(engine)
            await asyncio.sleep(SETTLE_S)
            asked, operation = await engine.restart(number)
            await load.flows()
            steps = steps_of(operation)
            # While the successor prepares, two contexts share the GPU, and a step may take longer
            # than the pause between the workers.
            gap, ended = load.seen[0].gap(asked + steps["prepare_worker"])
            # The old worker's last token comes before the end of "stop_worker".
            until_ready = ("prepare_worker", "stop_worker", "start_worker")
            first = load.seen[0].first(asked + sum(steps[name] for name in until_ready))
            if flags.standby:
                await standby_prepared(engine)
            prepared = time.monotonic()
        print(f"restart {number}: {first - asked:.3f} s, {ended - asked:.3f} s", file=sys.stderr)
        found.append({
            "first_token_s": round(first - asked, 4), "gap_s": round(gap, 4),
            "gap_ended_s": round(ended - asked, 4), "steps_s": steps,
            "standby_s": round(prepared - asked, 4) if flags.standby else None,
            "stop": next(s.get("detail") for s in operation["steps"] if s["name"] == "stop_worker"),
            "left_bytes": left_bytes(operation), "device_bytes": device_bytes(),
        })  # fmt: skip
    return found


async def loaded(engine: Engine, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Restarts under all streams."""
    found = []
    for number in range(flags.loaded):
        async with Load(
            engine, flags.streams, flags.context, flags.limit - flags.context, flags.vocab
        ) as load:
            if flags.standby:
                await standby_prepared(engine)
            await asyncio.sleep(SETTLE_S)
            asked, operation = await engine.restart(1_000_000 + number)
            await load.flows()
            ends = [one.gap(asked) for one in load.seen]
        print(f"loaded restart {number}: {max(gap for gap, _ in ends):.3f} s", file=sys.stderr)
        found.append({
            "carried": operation["carried_requests"],
            "carried_kv": operation["carried_kv_requests"],
            "kv_handover": operation["kv_handover"],
            "prefill_tokens": operation["carried_prefill_tokens"],
            "gaps_s": [round(gap, 4) for gap, _ in ends],
            "steps_s": steps_of(operation), "left_bytes": left_bytes(operation),
            "device_bytes": device_bytes(),
        })  # fmt: skip
    return found


def cold(model: Path, folder: Path, *flags: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from nothing to ready, of the second of two starts; and its stages."""
    for number in range(2):
        with running(model, folder / f"cold-{model.name}-{number}", *flags) as engine:
            took = engine.wait_ready()
            stages = engine.stages()
        print(f"cold start {model.name} {number}: {took:.3f} s", file=sys.stderr)
    return took, stages


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--name", default="restart", help="of the result file")
    add("--model", type=Path, help="checkpoint; without it one of --shape is made")
    add("--shape", default="small", choices=checkpoint.SHAPES)
    add("--small", type=Path, help="a 0.6B checkpoint for its cold start")
    add("--restarts", type=int, default=100)
    add("--loaded", type=int, default=10)
    add("--streams", type=int, default=32)
    add("--context", type=int, default=1024)
    add("--limit", type=int, default=16_384, help="tokens of a stream, its prompt included")
    add("--standby", action="store_true", help="restarts with a standby worker, once it is there")
    add("--no-cold", action="store_true", help="no cold starts")
    add("flags", nargs="*", help="for the engine, after --")
    flags = parser.parse_args()
    figures, samples = earlier(RESULTS / f"{flags.name}.json")
    with tempfile.TemporaryDirectory(prefix="plb-") as temporary:
        folder = Path(temporary)
        if flags.model is None:
            flags.model = folder / flags.shape
            device = "cuda" if torch.cuda.is_available() else "cpu"
            checkpoint.write(flags.model, flags.shape, device)
        flags.vocab = checkpoint.SHAPES[flags.shape]["vocab_size"]
        standby = ["--standby-worker", "always"] if flags.standby else []
        before = device_bytes()
        with running(flags.model, folder / "run", *standby, *flags.flags) as engine:
            engine.wait_ready()
            quiet = asyncio.run(light(engine, flags))
            busy = asyncio.run(loaded(engine, flags))
            stages = engine.stages()[-6:]
        cycles = quiet + busy
        left = [one["left_bytes"] for one in cycles if one["left_bytes"] is not None]
        kind = "standby_" if flags.standby else ""
        samples |= {f"{kind}light": quiet, f"{kind}loaded": busy, f"{kind}stages": stages}
        first = [one["first_token_s"] for one in quiet]
        back = [one["standby_s"] for one in quiet if one["standby_s"] is not None]
        gaps = [gap for one in busy for gap in one["gaps_s"]]
        figures |= {
            f"{kind or 'restart_'}first_token_p50_s": compute_percentile(first, 0.5),
            f"{kind or 'restart_'}first_token_p99_s": compute_percentile(first, 0.99),
            f"{kind or 'restart_'}first_token_max_s": max(first, default=None),
            f"{kind}return_p50_s": compute_percentile(back, 0.5),
            f"{kind}return_max_s": max(back, default=None),
            f"{kind}restarts_count": len(first),
            f"{kind}cycles_count": len(cycles),
            f"{kind}left_bytes": max(left) if len(left) == len(cycles) else None,
            f"{kind}used_growth_mib": growth_mib(
                cycles[0]["device_bytes"], cycles[-1]["device_bytes"]
            ),
            f"{kind}nvml_left_mib": growth_mib(before, device_bytes()),
            f"{kind}light_stream_gap_p50_s": compute_percentile(
                [one["gap_s"] for one in quiet], 0.5
            ),
            f"{kind}stream_gap_p50_s": compute_percentile(gaps, 0.5),
            f"{kind}stream_gap_p99_s": compute_percentile(gaps, 0.99),
            f"{kind}carried_prefill_tokens_count": (
                round(statistics.mean(one["prefill_tokens"] for one in busy)) if busy else None
            ),
        }
        if not flags.no_cold:
            name = {"llama-8b": "8b", "qwen3-0.6b": "06b"}.get(flags.shape, flags.shape)
            took, samples["cold"] = cold(flags.model, folder, *flags.flags)
            figures[f"cold_start_{name}_s"] = round(took, 3)
            if flags.small is not None:
                took, samples["cold_06b"] = cold(flags.small, folder, *flags.flags)
                figures["cold_start_06b_s"] = round(took, 3)
    publish(flags.name, figures, samples)


if __name__ == "__main__":
    main()
