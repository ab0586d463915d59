"""Logits of a checkpoint over a few texts, for tests of what FP8 changes in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.distributed.group import Shard
from plimsoll_engine.kernels import quantized
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.models import loader
from plimsoll_engine.models.decoder import Decoder
from tests.logits import recorded

LENGTHS = (3, 57, 90)


def load(folder: Path, shard: Shard | None = None) -> Decoder:
    """The model in float32 on the CPU, computed by one thread."""
    torch.set_num_threads(1)
    config = loader.load_config(folder)
    cpu = torch.device("cpu")
    model = loader.load_model(folder, config, torch.float32, cpu, shard or Shard())
    assert isinstance(model, Decoder)
    return model


def texts(lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    """Random tokens, always the same."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, 256, (length,), generator=generator) for length in lengths]


def logits_of(folder: Path, helpers: Any, lengths: Sequence[int] = LENGTHS) -> torch.Tensor:
    """[sum of lengths, vocabulary]: after each token of each text, in one engine's batches."""
    engine = EngineCore(Runner(load(folder), 400, 8), Scheduler(BlockPool(400, 8), 8, 64, 200))
    seen = recorded(engine)
    names = []
    for number, text in enumerate(texts(lengths)):
        for cut in range(1, len(text) + 1):
            names.append(f"{number}-{cut}")
            asked = helpers.submit(names[-1], text[:cut].tolist(), 1, ignore_eos=True)
            assert engine.submit(asked) is None
    helpers.finish(engine)
    engine.close()
    return torch.stack([seen[name, 0].float() for name in names])


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the rows of ``x`` are once they are in e4m3."""
    return quantized.dequantize(*quantized.quantize(x))


def round_linear_layers(model: torch.nn.Module) -> None:
    """Put the rounding of both factors before each linear layer of transformers' ``model``."""

    def rounds(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (rounded(inputs[0]), *inputs[1:])

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data.copy_(rounded(module.weight.data))
            module.register_forward_pre_hook(rounds)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over that of ``wanted``."""
    return float((found - wanted).norm() / wanted.norm())
