"""Latency and throughput through the HTTP server under an open load, compared with vLLM's.

    python -m bench.checkpoint --shape llama-8b /tmp/8b
    python -m bench.online --label 8b --model /tmp/8b
    python -m bench.online --label 8b --model /tmp/8b --vllm "python -m vllm.entrypoints.cli.main"
    python -m bench.online --label 8b --model /tmp/8b --rates --streams 1 4 8 16 32 --in-process 8b
    python -m bench.online --shape small --rates 20 --seconds 3 --streams 1 4   # on a CPU

Requests arrive as a Poisson process at each of ``--rates``, whether or not the server keeps up;
lengths of prompts and outputs are lognormal; every answer is streamed and ends at its length. The
same requests, from the same client, go to both servers, each with its defaults beside
``--max-model-len``. ``--streams`` measures the served step instead: the median wait for a token
with so many streams, and with ``--in-process`` the step of an engine of that shape without a
server, frontend and text. ``--idle`` measures the time to the first token of one prompt at a time,
and how long it takes there without the server, on the host until the step is launched, and on the
device. Figures of earlier runs that this one does not measure stay in the
result file. ``vllm bench serve`` has the same open load, but no lognormal lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench import checkpoint
from bench.engine import Bench
from bench.result import RESULTS, earlier, publish
from bench.running import Engine, Stream, running, stream
from plimsoll_cli.figures import compute_percentile

PROMPT = (600, 0.9, 16, 6000)
OUTPUT = (150, 0.7, 8, 1000)
"""Median, sigma of the logarithm, least and most tokens: long right tails, as chats have them."""
VOCABULARY = 10_000
STEADY = 64
"""Tokens of a stream before its waits count as those of a steady step."""
STREAM_TOKENS = 320
IDLE_PROMPTS, IDLE_WARM_UP = 30, 5
SETTLE_S = 10.0
"""An idle engine captures the graphs that it did not capture before it served."""
DRAIN_S = 120.0
"""Time after the last arrival for the answers that are still running."""
START_S = 400.0
MAX_MODEL_LEN = 8192

Request = tuple[float, list[int], int]
"""Second of arrival, prompt, tokens of output."""


def length(draw: random.Random, law: tuple[int, float, int, int]) -> int:
    """Return a lognormal length within its bounds."""
    median, sigma, least, most = law
    return min(most, max(least, round(median * draw.lognormvariate(0, sigma))))


def requests(rate: float, seconds: float, vocabulary: int, scale: float) -> list[Request]:
    """Return the arrivals of ``seconds`` at ``rate`` a second: the same for every server."""
    draw, at, found = random.Random(f"online {rate}"), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        prompt = max(2, int(length(draw, PROMPT) * scale))
        output = max(2, int(length(draw, OUTPUT) * scale))
        found.append((at, [draw.randrange(2, vocabulary) for _ in range(prompt)], output))
    return found


async def load(port: int, asked: list[Request]) -> list[tuple[float, int, Stream]]:
    """Send each request at its second; return (when it was sent, tokens asked for, its pieces)."""
    began, found, tasks = time.monotonic() + 0.5, [], []
    for at, prompt, output in asked:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        seen = Stream()
        found.append((time.monotonic(), output, seen))
        tasks.append(asyncio.create_task(stream(port, prompt, output, seen)))
    _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def figures_of(answers: list[tuple[float, int, Stream]]) -> dict[str, float | int | None]:
    """Return the latencies, and output tokens a second from the first request to the last token.

    A piece may contain several tokens; ``itl`` is the wait for a piece, ``tpot`` the time per
    token. A short answer or one with an error counts as failed, and is left out of the latencies.
    """
    whole = [(sent, output, one.times) for sent, output, one in answers if one.tokens == output]
    first = [times[0] - sent for sent, _, times in whole]
    waits = [b - a for *_, times in whole for a, b in itertools.pairwise(times)]
    each = [(times[-1] - times[0]) / (output - 1) for _, output, times in whole]
    took = max(times[-1] for *_, times in whole) - min(sent for sent, *_ in whole) if whole else 0
    found: dict[str, float | int | None] = {
        "failed_count": len(answers) - len(whole),
        "requests_count": len(answers),
        "output_tok_s": round(sum(output for _, output, _ in whole) / took, 1) if whole else None,
    }
    for name, values in (("ttft", first), ("itl", waits), ("tpot", each)):
        for share in (0.5, 0.99):
            found[f"{name}_p{share * 100:.0f}_s"] = compute_percentile(values, share)
    return found


async def served_step(port: int, count: int, vocabulary: int, tokens: int) -> float:
    """Return the median wait for a token in ``count`` steady streams, in seconds."""
    draw = random.Random(count)
    seen = [Stream() for _ in range(count)]
    prompts = [[draw.randrange(2, vocabulary) for _ in range(128)] for _ in seen]
    await asyncio.gather(*(stream(port, p, tokens, s) for p, s in zip(prompts, seen, strict=True)))
    if errors := [one.error for one in seen if one.error]:
        raise RuntimeError(errors[0])
    begins = max(one.times[min(STEADY, tokens // 2)] for one in seen)
    ends = min(one.times[-1] for one in seen)
    waits = [
        b - a for one in seen for a, b in itertools.pairwise(one.times) if begins <= a and b <= ends
    ]
    return statistics.median(waits)


async def idle_ttft(port: int, length: int, vocabulary: int) -> float:
    """Return the median time to the first token of prompts of ``length``, one after the other."""
    draw, found = random.Random(length), []
    for _ in range(IDLE_PROMPTS + IDLE_WARM_UP):
        seen, sent = Stream(), time.monotonic()
        await stream(port, [draw.randrange(2, vocabulary) for _ in range(length)], 2, seen)
        if seen.error:
            raise RuntimeError(seen.error)
        found.append(seen.times[0] - sent)
    return statistics.median(found[IDLE_WARM_UP:])


def covered(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of ``spans`` (start, end) lasts: kernels overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def prefill_times(bench: Bench, length: int) -> dict[str, float]:
    """Return the median seconds of a prompt of ``length`` without a server.

    ``whole`` is until its token is known, ``launch`` the host's work before it waits for the
    device, and ``device`` how long any kernel runs.
    """
    draw, whole, launch = random.Random(length), [], []

    def once() -> None:
        asked = [([draw.randrange(2, VOCABULARY) for _ in range(length)], 1)]
        waited_s = bench.engine.waited_s
        took, _, after_s = bench.run(asked)
        whole.append(took)
        launch.append(took - (after_s - waited_s))

    for _ in range(IDLE_WARM_UP + IDLE_PROMPTS):
        once()
    found = {"whole": statistics.median(whole[IDLE_WARM_UP:]),
             "launch": statistics.median(launch[IDLE_WARM_UP:])}  # fmt: skip
    if bench.device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(IDLE_WARM_UP):
                once()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if str(event.device_type) == "DeviceType.CUDA"
        ]
        found["device"] = covered(spans) / 1e6 / IDLE_WARM_UP
    return found


def in_process_steps(bench: Bench, counts: list[int]) -> dict[int, float]:
    """Return the median step with each of ``counts`` sequences, without a server, in seconds."""
    found = {}
    for count in counts:
        draw, ends = random.Random(count), list[float]()
        asked = [([draw.randrange(2, VOCABULARY) for _ in range(128)], STREAM_TOKENS)
                 for _ in range(count)]  # fmt: skip
        bench.run(asked, lambda ends=ends: ends.append(time.monotonic()))  # type: ignore[misc]
        steady = ends[STEADY:-2]
        found[count] = statistics.median(b - a for a, b in itertools.pairwise(steady))
    return found


@contextlib.contextmanager
def vllm(command: str, model: Path, folder: Path) -> Iterator[int]:
    """Start vLLM's server; yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "vllm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*shlex.split(command), "serve", str(model), "--served-model-name", "bench", "--port",
             str(port), "--host", "127.0.0.1", "--max-model-len", str(MAX_MODEL_LEN)],
            stdout=out, stderr=out,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM is not ready:\n{log.read_text()[-6000:]}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Return ours over vLLM's for each figure in seconds or tokens a second that both have."""
    found = {}
    for key, value in figures.items():
        stem = key.removeprefix("plimsoll_")
        peer = figures.get(f"vllm_{stem}")
        if stem != key and key.endswith("_s") and peer and value:
            stem = stem.removesuffix("_s").removesuffix("_tok")
            found[f"{stem}_over_vllm_ratio"] = round(value / peer, 3)
    # A key begins with a letter, and a label may not.
    return {f"online_{key}": ratio for key, ratio in found.items()}


def plot(figures: dict[str, Any], label: str, rates: list[float], out: Path) -> None:
    """Draw both servers' latencies and throughput by the rate of requests."""
    from matplotlib import pyplot as plt

    panels = {"ttft": "time to first token, ms", "itl": "wait between tokens, ms",
              "output_tok": "output tokens per second"}  # fmt: skip
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for server, name, color in (("plimsoll", "Plimsoll", "C0"), ("vllm", "vLLM", "C1")):
            for part, style in (
                (("_p50", "-o"), ("_p99", ":o")) if metric != "output_tok" else (("", "-o"),)
            ):
                keys = [f"{server}_{label}_{rate:g}rps_{metric}{part}_s" for rate in rates]
                scale = 1.0 if metric == "output_tok" else 1e3
                values = [scale * figures[key] for key in keys]
                axis.plot(rates, values, style, color=color, label=f"{name} {part[1:]}".strip())
        axis.set(title=title, xlabel="requests per second", xscale="log", yscale="log")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(out, dpi=110)


def measure(flags: argparse.Namespace, figures: dict[str, Any], samples: dict[str, Any]) -> None:
    """Run what ``flags`` ask for, against the one server that they name."""
    name, label = ("vllm" if flags.vllm else "plimsoll"), flags.label
    with tempfile.TemporaryDirectory(prefix="plo-") as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        if flags.model is None:
            flags.model = folder / flags.shape
            checkpoint.write(flags.model, flags.shape, "cpu")
        vocabulary = min(VOCABULARY, checkpoint.SHAPES[flags.shape]["vocab_size"])
        if flags.vllm:
            port = stack.enter_context(vllm(flags.vllm, flags.model, folder))
        else:
            more = ["--max-model-len", str(MAX_MODEL_LEN), *flags.flags]
            engine: Engine = stack.enter_context(running(flags.model, folder / "run", *more))
            engine.wait_ready()
            port = engine.port
        # Of every length that the loads have, so that no server compiles or plans in what counts.
        asyncio.run(load(port, requests(4.0, flags.warm_up, vocabulary, flags.scale)))
        for count in flags.streams:
            step_s = asyncio.run(served_step(port, count, vocabulary, flags.stream_tokens))
            figures[f"{name}_{label}_served_step_{count}_rows_s"] = step_s
        if flags.idle:
            time.sleep(SETTLE_S)
        for tokens in flags.idle:
            ttft_s = asyncio.run(idle_ttft(port, tokens, vocabulary))
            figures[f"{name}_{label}_idle_{tokens}_tokens_ttft_s"] = ttft_s
        for rate in flags.rates:
            asked = requests(rate, flags.seconds, vocabulary, flags.scale)
            found = figures_of(asyncio.run(load(port, asked)))
            print(f"{label} {name} {rate:g}/s: {found}", file=sys.stderr, flush=True)
            figures |= {f"{name}_{label}_{rate:g}rps_{key}": found[key] for key in found}
    if flags.in_process:
        bench = Bench(flags.in_process, torch.device(flags.device), 0, 8192)
        steps = in_process_steps(bench, flags.streams)
        for tokens in flags.idle:
            for part, seconds in prefill_times(bench, tokens).items():
                figures[f"in_process_{label}_idle_{tokens}_tokens_{part}_s"] = seconds
        bench.close()
        gc.collect()
        for count, step_s in steps.items():
            figures[f"in_process_{label}_step_{count}_rows_s"] = step_s
            served_s = figures[f"plimsoll_{label}_served_step_{count}_rows_s"]
            key = f"served_step_{label}_{count}_rows_over_in_process_ratio"
            figures[key] = round(served_s / step_s, 3)
            alone_s = steps.get(1)
            if alone_s:
                figures[f"step_{label}_{count}_rows_over_1_row_ratio"] = round(step_s / alone_s, 3)
    samples[f"{name}_{label}"] = {"lengths": {"prompt": PROMPT, "output": OUTPUT},
                                  "seconds": flags.seconds}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--name", default="online")
    add("--label", default="small", help="of the figures: the shape")
    add("--model", type=Path, help="checkpoint; without it one of --shape is made")
    add("--shape", default="small", choices=checkpoint.SHAPES)
    add("--rates", type=float, nargs="*", default=[1.0, 4.0, 16.0, 24.0, 40.0])
    add("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    add("--streams", type=int, nargs="*", default=[])
    add("--idle", type=int, nargs="*", default=[], help="tokens of prompts to an idle server")
    add("--stream-tokens", type=int, default=STREAM_TOKENS)
    add("--in-process", help="shape of bench.engine whose step is measured without a server")
    add("--warm-up", type=float, default=8.0, help="seconds of a load that does not count")
    add("--scale", type=float, default=1.0, help="of all lengths, for trials")
    add("--vllm", help="command of vLLM's command line; without it this engine is measured")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--plot", type=Path, help="draw the result file's figures to this file, measure nothing")
    add("flags", nargs="*", help="for this engine, after --")
    flags = parser.parse_args()
    figures, samples = earlier(RESULTS / f"{flags.name}.json")
    if flags.plot:
        return plot(figures, flags.label, flags.rates, flags.plot)
    measure(flags, figures, samples)
    publish(flags.name, figures | ratios(figures), samples)
    return None


if __name__ == "__main__":
    main()
