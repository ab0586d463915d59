"""What FP8 changes in the logits of a trained model, beside what bfloat16 changes.

    python -m bench.fp8_accuracy

No trained model is at hand without a network, so one is made: a Qwen3 of four layers learns the
bytes of this repository's documents. On pages that it has not seen, the formats are compared with
bfloat16 and with float32, token by token with all tokens before it given: logits, the best token
and perplexity. All of it runs on a CPU, by the operations that say what each format means.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from bench.engine import reference_logits
from bench.result import arguments_of, publish
from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.models import loader
from plimsoll_faults.models.write_fp8 import write_fp8

DOCS = Path(__file__).resolve().parents[2] / "docs"
HELD_OUT = 8
"""Every so many pages one is not learned."""
WINDOW, WINDOWS = 256, 24
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 256, "hidden_size": 192, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
FORMATS: dict[str, tuple[str, torch.dtype, torch.dtype | None]] = {
    "float32": ("exact", torch.float32, None),
    "bf16": ("exact", torch.bfloat16, None),
    "fp8": ("fp8", torch.bfloat16, None),
    "fp8_kv": ("fp8", torch.bfloat16, FP8),
    "kv": ("exact", torch.bfloat16, FP8),
}
"""Checkpoint, type of the activations, and type of keys and values where it is another one."""


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes that are learned, and those that are not."""
    learned, held = bytearray(), bytearray()
    for number, page in enumerate(sorted(DOCS.glob("*.md"))):
        (held if number % HELD_OUT == 0 else learned).extend(page.read_bytes())
    return tuple(torch.frombuffer(part, dtype=torch.uint8).long() for part in (learned, held))  # type: ignore[return-value]


def train(text: torch.Tensor, steps: int, batch: int) -> Any:
    """A model of :data:`SIZES` in float32 after so many steps of AdamW."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    begun = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(text) - WINDOW, (batch,)).tolist()
        rows = torch.stack([text[start : start + WINDOW] for start in starts])
        loss = model(rows, labels=rows, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(
                f"step {step} loss {loss.item():.3f} {time.monotonic() - begun:.0f} s", flush=True
            )
    return model.eval()


@torch.inference_mode()
def logits_of(folder: Path, kind: str, windows: list[list[int]]) -> torch.Tensor:
    """float32 [windows * (WINDOW - 1), 256]: the scores of each next byte."""
    name, dtype, pool = FORMATS[kind]
    config = loader.load_config(folder / name)
    model: Any = loader.load_model(folder / name, config, dtype, CPU)
    return torch.cat([reference_logits(model, ids[:1], ids[1:], pool) for ids in windows])


def compare(found: torch.Tensor, wanted: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """How far two sets of logits are apart; differences are over the deviation of ``wanted``."""
    difference = (found - wanted).abs() / wanted.std()
    return {
        "mean_difference_ratio": float(difference.mean()),
        "max_difference_ratio": float(difference.max()),
        "norm_ratio": float((found - wanted).norm() / wanted.norm()),
        "top1_agreement_ratio": float((found.argmax(-1) == wanted.argmax(-1)).float().mean()),
        "perplexity_ratio": perplexity(found, target) / perplexity(wanted, target),
    }


def perplexity(logits: torch.Tensor, target: torch.Tensor) -> float:
    """Of the bytes ``target`` [rows] by ``logits`` [rows, 256]."""
    return math.exp(float(cross_entropy(logits, target)))


def main() -> None:
    parser = arguments_of(__doc__, "fp8-accuracy")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    learned, held = texts()
    model = train(learned, flags.steps, flags.batch)
    starts = torch.linspace(0, len(held) - WINDOW - 1, WINDOWS).long().tolist()
    windows = [held[start : start + WINDOW].tolist() for start in starts]
    target = torch.cat([torch.tensor(ids[1:]) for ids in windows])
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(Path(folder) / "exact")
        write_fp8(Path(folder) / "exact", Path(folder) / "fp8")
        found = {kind: logits_of(Path(folder), kind, windows) for kind in FORMATS}
    figures: dict[str, float] = {
        "learned_bytes": len(learned), "steps_count": flags.steps, "tokens_count": len(target),
    }  # fmt: skip
    for kind in ("bf16", "fp8", "fp8_kv", "kv"):
        for base in ("float32", "bf16"):
            if kind != base:
                for name, value in compare(found[kind], found[base], target).items():
                    figures[f"{kind}_to_{base}_{name}"] = value
    for name, value in figures.items():
        print(f"{name:40} {value:.5f}")
    samples = {
        "perplexity": {kind: perplexity(logits, target) for kind, logits in found.items()},
        "deviation_of_logits": float(found["float32"].std()),
    }
    publish(flags.name, figures, samples, folder=flags.out)


if __name__ == "__main__":
    main()
