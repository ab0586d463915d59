"""In bf16 on the GPU the engine's logits are no farther from the exact ones than those of
transformers' own attention backends, for each architecture.

The backends are nearer to each other than the engine is to either, by a fifth on an H200: they
share every rounding outside the attention, and the engine's fused kernels do without many of them.
Exact is float32. Teacher-forced: the engine's own greedy text is what every backend is given, so
that one token that rounds the other way does not end the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.models import loader
from tests.generated import generate
from tests.logits import recorded

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: these tests need one GPU"
)
VOCABULARY, NEW_TOKENS = 2048, 32
BLOCK, BLOCKS, BUDGET, SEQS = 16, 1024, 2048, 8
LENGTHS = (1800, 1, 7, 16, 100, 333, 700, 1600)
"""Prompts: the first is whole and long enough for the library's attention, the last is cut."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 200},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    "olmo2": {"model_type": "olmo2"},
}
BACKENDS = ("eager", "sdpa")
INDEPENDENT = 1.05
"""Of the distance between two results whose roundings have nothing in common."""


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Every tensor random, norms and biases as well, with activations of order one."""
    config = AutoConfig.for_model(**(SIZES | ARCHITECTURES[request.param]))
    generator = torch.Generator().manual_seed(8)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def greedy(folder: Path) -> Iterator[tuple[list[int], list[int], torch.Tensor]]:
    """Each prompt, its greedy text, and the logits [text, vocabulary] that chose it."""
    config = loader.load_config(folder)
    model: Any = loader.load_model(folder, config, torch.bfloat16, torch.device("cuda", 0))
    engine = EngineCore(
        Runner(model, BLOCKS, BLOCK), Scheduler(BlockPool(BLOCKS, BLOCK), SEQS, BUDGET, 2048)
    )
    seen = recorded(engine)
    sampling = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
    texts = generate(engine, (Submit(str(n), ids, sampling) for n, ids in enumerate(prompts())))
    for number, prompt in enumerate(prompts()):
        rows = [seen[str(number), place].float() for place in range(NEW_TOKENS)]
        yield prompt, texts[str(number)], torch.stack(rows)
    engine.close()


@torch.inference_mode()
def expected(folder: Path, backend: str, dtype: torch.dtype, ids: list[int]) -> torch.Tensor:
    """The logits [text, vocabulary] of transformers for the same tokens."""
    key = (folder, backend, dtype)
    if key not in loaded:
        loaded[key] = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=backend
        ).to("cuda")
    out = loaded[key](torch.tensor([ids], device="cuda"), use_cache=False)
    logits: torch.Tensor = out.logits[0, -NEW_TOKENS:].float()
    return logits


loaded: dict[tuple[Path, str, torch.dtype], Any] = {}


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    loaded.clear()


def rms(distances: list[torch.Tensor]) -> float:
    return float(torch.cat(distances).square().mean().sqrt())


@pytest.mark.parametrize("checkpoint", ARCHITECTURES, indirect=True)
def test_logits_are_within_the_noise_of_the_backends(checkpoint: Path) -> None:
    between: list[torch.Tensor] = []
    ours: dict[str, list[torch.Tensor]] = {backend: [] for backend in BACKENDS}
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in ("engine", *BACKENDS)}
    for prompt, text, found in greedy(checkpoint):
        ids = prompt + text[:-1]
        exact = expected(checkpoint, "eager", torch.float32, ids)
        theirs = {b: expected(checkpoint, b, torch.bfloat16, ids) for b in BACKENDS}
        between += [theirs[a] - theirs[b] for a, b in combinations(BACKENDS, 2)]
        for backend in BACKENDS:
            ours[backend].append(found - theirs[backend])
        for name, logits in {"engine": found, **theirs}.items():
            errors[name].append(logits - exact)
    noise = rms(between)
    distance = {backend: rms(rows) for backend, rows in ours.items()}
    error = {name: rms(rows) for name, rows in errors.items()}
    spread = float(exact.std())
    print(
        f"backends {noise:.4f} apart, engine {distance}, from float32 {error}; logits {spread:.2f}"
    )
    assert error["engine"] <= max(error[backend] for backend in BACKENDS)
    for backend in BACKENDS:
        assert distance[backend] <= INDEPENDENT * math.hypot(error["engine"], error[backend])
