"""Throughput of the engine on one device: scheduler, model and sampling, without HTTP and text.

    python -m bench.engine --shape 06b --workload mixed256
    python -m bench.engine --shape all --workload all --name engine-h200
    python -m bench.engine --shape 8b --workload all --name engine-h200 --vllm /tmp/8b

Greedy, fixed output lengths, random token ids below 10,000, random weights. A set is: all requests
submitted at once until the last has finished. One JSON line a set; figures are medians. Figures of
earlier runs that this one does not measure stay in the result file.

With ``--vllm`` the same requests go to vLLM's offline engine, which must be importable, with a
checkpoint of the shape that bench/checkpoint.py made.

The outputs of some requests are compared with the eager torch reference. Nothing is reported when a
token's logit there is further below the best than twice what bfloat16 itself moves logits by.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.result import RESULTS, earlier, publish
from bench.shapes import SHAPES, random_decoder
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.core.warmup import warm_up
from plimsoll_engine.kernels.quantized import dequantize
from plimsoll_engine.kernels.reference import ReferenceOps
from plimsoll_engine.kernels.step_plan import StepPlan
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.pool_memory import make_pool_tensors
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.models import loader
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.decoder_parts import SCALE_SUFFIX
from plimsoll_engine.process.rules import freeze_counter
from plimsoll_engine.worker.parts import GC_THRESHOLDS

VOCABULARY = 10_000
MAX_SEQS = 256
BLOCK = 16
CHECKED = 3
CHECKED_TOKENS = 128

Request = tuple[list[int], int]


@dataclass(frozen=True)
class Workload:
    """``counts_prompt`` says that the figure is of prompt tokens, not of output."""

    requests: list[Request]
    counts_prompt: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(prompt) if self.counts_prompt else out for prompt, out in self.requests)


def workload(name: str, seed: int, scale: float = 1.0) -> Workload:
    """The requests of ``name``. ``scale`` below 1 shrinks counts and lengths, for trials."""
    rng = random.Random(seed)

    def sized(number: int) -> int:
        return max(1, int(number * scale))

    def prompt(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    def same(count: int, length: int, out: int) -> list[Request]:
        return [(prompt(length), out) for _ in range(count)]

    def uniform() -> int:
        return sized(rng.randint(100, 1024))

    if name == "mixed256":
        return Workload([(prompt(uniform()), uniform()) for _ in range(sized(256))])
    if name == "decode1":
        return Workload(same(1, sized(128), sized(512)))
    if name == "decode256":
        return Workload(same(sized(256), sized(128), sized(512)))
    if name == "prefill":
        return Workload(same(sized(64), sized(4000), 1), counts_prompt=True)
    shared = prompt(sized(3000))
    return Workload([(shared + prompt(sized(64)), sized(64)) for _ in range(sized(256))])


WORKLOADS = ("mixed256", "decode1", "decode256", "prefill", "prefix256")


def pool_blocks(model: Decoder, dtype: torch.dtype, free: int) -> int:
    """Return the blocks of the KV pool beside which the outputs can be checked.

    All sequences of mixed256 at their longest, where ``free`` bytes of the device have room for
    them, for the reference's weights in float32 and for a tenth of the device's rest: activations,
    graphs and logits.
    """
    reference = sum(4 * tensor.numel() for tensor in model.get_parameters().values())
    block_bytes = BLOCK * model.kv.compute_bytes_per_token(dtype)
    room = int(0.9 * max(0, free - reference))
    return max(1, min(MAX_SEQS * 2112 // BLOCK, room // block_bytes))


class Bench:
    """One model on one device, and the engine over it."""

    def __init__(self, shape: str, device: torch.device, seed: int, budget: int) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.config = SHAPES[shape]()
        self.model = random_decoder(self.config, self.dtype, device, seed)
        length = 4096
        blocks = 4096
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            blocks = pool_blocks(self.model, self.dtype, free)
        self.runner = Runner(self.model, blocks, BLOCK)
        scheduler = Scheduler(BlockPool(blocks, BLOCK), MAX_SEQS, budget, length)
        self.engine = EngineCore(self.runner, scheduler)
        warm_up(self.engine)
        begun = time.perf_counter()
        self.runner.capture_graphs(MAX_SEQS, length // BLOCK, max_prompt_tokens=length)
        self.first_capture_s = time.perf_counter() - begun
        while self.runner.capture_next_graph():
            pass
        self.capture_s = time.perf_counter() - begun
        # As a worker does once it is warm: a full collection takes .17 s of a set.
        freeze_counter.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    def close(self) -> None:
        self.engine.close()
        freeze_counter.unfreeze()

    def run(
        self, requests: list[Request], between_steps: Callable[[], None] | None = None
    ) -> tuple[float, dict[str, list[int]], float]:
        """Seconds for the whole set, the outputs, and the host's seconds inside ``step``."""
        engine = self.engine
        engine.pool.reset_prefix_cache()
        outputs: dict[str, list[int]] = {str(i): [] for i in range(len(requests))}
        self._synchronize()
        begun = time.perf_counter()
        for name, (prompt, out) in zip(outputs, requests, strict=True):
            refused = engine.submit(Submit(name, prompt, Sampling(out, ignore_eos=True)))
            if refused is not None:
                raise SystemExit(f"request refused: {refused}")
        while engine.has_work:
            output = engine.step()
            if between_steps is not None:
                between_steps()
            if output.dropped:
                raise SystemExit(f"request dropped: {output.dropped[0].message}")
            for token in output.tokens:
                outputs[token.request_id].append(token.token_id)
        self._synchronize()
        return time.perf_counter() - begun, outputs, engine.waited_s

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def check(self, requests: list[Request], outputs: dict[str, list[int]]) -> dict[str, float]:
        """Compare some outputs with the reference; SystemExit where one is wrong."""
        pool = None if self.runner.kv is None else self.runner.kv.dtype
        return compare(self.config, self.model, pool, requests, outputs)


@torch.inference_mode()
def compare(
    config: Any,
    model: Decoder,
    pool: torch.dtype | None,
    requests: list[Request],
    outputs: dict[str, list[int]],
) -> dict[str, float]:
    """Compare some outputs of ``model`` with the reference; SystemExit where one is wrong."""
    wide = Decoder(config, torch.float32)
    wide.bind(exact_tensors(model))
    narrow = Decoder(config, model.dtype, quantization=loader.read_quantization(config))
    narrow.bind(model.get_parameters())
    equal = total = 0
    worst_noise = worst_gap = 0.0
    for index in range(0, len(requests), max(1, len(requests) // CHECKED)):
        prompt, _ = requests[index]
        out = outputs[str(index)][:CHECKED_TOKENS]
        exact = reference_logits(wide, prompt, out)
        rounded = reference_logits(narrow, prompt, out, pool)
        noise = float((exact - rounded).abs().max())
        chosen = torch.tensor(out, device=model.device).unsqueeze(-1)
        gap = exact.max(dim=-1).values - exact.gather(-1, chosen).squeeze(-1)
        worst_noise, worst_gap = max(worst_noise, noise), max(worst_gap, float(gap.max()))
        equal += int((exact.argmax(dim=-1, keepdim=True) == chosen).sum())
        total += len(out)
        if not float(gap.max()) <= 2 * noise + 1e-4:
            raise SystemExit(
                f"request {index}: a token's logit is {float(gap.max()):.4f} below the best of"
                f" the reference, the noise is {noise:.4f}: no figure is reported"
            )
    return {"checked": total, "equal": equal, "noise": worst_noise, "worst_gap": worst_gap}


def exact_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """The weights in float32, quantized ones as what they mean."""
    tensors = model.get_parameters()
    return {
        name: dequantize(tensor, tensors[name + SCALE_SUFFIX])
        if name + SCALE_SUFFIX in tensors
        else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith(SCALE_SUFFIX)
    }


def reference_logits(
    model: Decoder, prompt: list[int], out: list[int], pool: torch.dtype | None = None
) -> torch.Tensor:
    """float32 [len(out), vocabulary]: the scores that each token of ``out`` was chosen from, with
    all tokens before it given, by plain torch in one pass. ``pool`` is the dtype of keys and
    values, None for the model's."""
    model._ops = ReferenceOps()
    ids = torch.tensor(prompt + out[:-1], device=model.device)
    count = len(ids)
    blocks = -(-count // BLOCK)
    kv, scales = make_pool_tensors(model.kv, blocks * BLOCK, pool or model.dtype, model.device)
    positions = torch.arange(count, device=model.device)

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=model.device)

    step = StepPlan(
        kv[0], kv[1], BLOCK, positions, ints([list(range(blocks))]), ints([count]),
        ints([0, count]), decodes=0, longest=count, scales=scales,
    )  # fmt: skip
    hidden = model.forward(ids, positions, step)
    return model.compute_logits(hidden[len(prompt) - 1 :]).float()


def measure(bench: Bench, shape: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The sets of one workload, each printed as a line."""
    work = workload(name, arguments.seed, arguments.scale)
    sets = []
    for number in range(arguments.sets + 1):  # the first one warms up and is not counted
        before = bench.engine.counters.steps
        bench.engine.waited_s = 0.0
        seconds, outputs, waited_s = bench.run(work.requests)
        if any(len(outputs[str(i)]) != out for i, (_, out) in enumerate(work.requests)):
            raise SystemExit(f"{name}: a request has too few tokens")
        if number == 0 and not arguments.no_warm_up:
            continue
        steps = bench.engine.counters.steps - before
        line = {
            "shape": shape, "workload": name, "seconds": seconds,
            "tok_s": work.tokens / seconds, "steps": steps, "step_ms": 1e3 * seconds / steps,
            "host_ms": 1e3 * (seconds - waited_s) / steps,
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        sets.append(line)
        if len(sets) == arguments.sets:
            break
    if arguments.profile:
        profile(bench, work.requests)
    check = bench.check(work.requests, outputs)
    print(json.dumps({"workload": name, **check}), flush=True)
    return {"sets": sets, "check": check}


def profile(bench: Bench, requests: list[Request]) -> None:
    """Where the device's time goes in one more set, by kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        bench.run(requests)
    rows = profiler.key_averages()
    total = sum(row.self_device_time_total for row in rows)
    for row in sorted(rows, key=lambda row: -row.self_device_time_total)[:25]:
        share = row.self_device_time_total / total
        each_us = row.self_device_time_total / row.count
        print(f"{share:6.1%} {row.count:7} x {each_us:8.1f} us  {row.key[:90]}")
    print(f"device busy {total / 1e6:.3f} s", flush=True)


def add_measuring(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the flags that :func:`measure` reads, and where the result goes; ``name`` is its name."""
    add = parser.add_argument
    add("--sets", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--budget", type=int, default=8192, help="tokens of one step")
    add("--scale", type=float, default=1.0, help="below 1: a trial, not written")
    add("--no-warm-up", action="store_true", help="count the first set too")
    add("--profile", action="store_true", help="print where the device's time goes, of rank 0")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--name", default=name)
    add("--out", type=Path, default=RESULTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--shape", default="06b", choices=[*SHAPES, "all"])
    parser.add_argument("--workload", default="mixed256", choices=[*WORKLOADS, "all"])
    add_measuring(parser, "engine")
    parser.add_argument("--vllm", type=Path, help="measure vLLM with this checkpoint of --shape")
    arguments = parser.parse_args()
    shapes = ["06b", "8b"] if arguments.shape == "all" else [arguments.shape]
    names = list(WORKLOADS if arguments.workload == "all" else (arguments.workload,))
    figures, samples = earlier(arguments.out / f"{arguments.name}.json")
    for shape in shapes:
        label = shape.replace("-", "_")
        # No figure of prefix256 in the 8B shape: no goal is set for it.
        own = [name for name in names if (shape, name) != ("8b", "prefix256")]
        if arguments.vllm:
            found = measured_by_vllm(arguments, own)
        else:
            found = measured(arguments, shape, own, figures)
        by = "_vllm" if arguments.vllm else ""
        for name, sets in found.items():
            rates = [line["tok_s"] for line in sets["sets"]]
            figures[f"{name}_{label}{by}_tok_s"] = statistics.median(rates)
            samples[f"{name}_{label}{by}"] = sets
    if arguments.scale == 1.0:
        publish(arguments.name, with_ratios(figures), samples, folder=arguments.out)


def measured(
    arguments: argparse.Namespace, shape: str, names: list[str], figures: dict[str, Any]
) -> dict[str, Any]:
    """Return the sets of each workload, and add the times of graph capture to ``figures``."""
    bench = Bench(shape, torch.device(arguments.device), arguments.seed, arguments.budget)
    label = shape.replace("-", "_")
    figures[f"first_graphs_{label}_s"] = bench.first_capture_s
    figures[f"all_graphs_{label}_s"] = bench.capture_s
    found = {name: measure(bench, shape, name, arguments) for name in names}
    bench.close()
    del bench
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def measured_by_vllm(arguments: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Return the sets of each workload by vLLM."""
    from bench.tensor_parallel import vllms  # it imports this module

    flags = argparse.Namespace(**(vars(arguments) | {"workload": names}))
    return vllms(arguments.vllm, 1, "auto", flags)


def with_ratios(figures: dict[str, Any]) -> dict[str, Any]:
    """Return ``figures`` with the ratios to vLLM's throughput that they allow."""
    ratios = {
        key.replace("_vllm_tok_s", "_over_vllm_ratio"): figures[key.replace("_vllm", "")] / rate
        for key, rate in figures.items()
        if key.endswith("_vllm_tok_s") and key.replace("_vllm", "") in figures
    }
    return figures | ratios


if __name__ == "__main__":
    main()
