"""Greedy text and logits equal transformers' own for each architecture, on small random models.

The reference is one plain forward pass of transformers over a request's prompt and the engine's
output: where each output token is the best one after all before it, the greedy text of the two is
the same, by induction. The engine's side takes every detour that it has: prompts in chunks, shared
beginnings, requests stopped and computed again.

Tests ``models/loader.py`` and ``models/decoder.py``.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.errors import LoadError
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.models import loader
from plimsoll_engine.models.decoder import Decoder
from tests.logits import recorded
from tests.random_model import random_model

VOCABULARY, NEW_TOKENS, REQUESTS = 256, 64, 32
BLOCK, BUDGET, SEQS = 4, 24, 8
BLOCKS = 100
"""Eight requests of up to 130 tokens do not fit: some are stopped on the way."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
GQA = {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **GQA, "rope_parameters": LLAMA3},
    "llama-biased": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 2.0},
    },
    "mistral": {"model_type": "mistral", **GQA, "head_dim": 24, "sliding_window": 21},
    "qwen2": {
        "model_type": "qwen2", **GQA, "use_sliding_window": True, "sliding_window": 17,
        "max_window_layers": 1, "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 32},
    "qwen3-moe": {
        "model_type": "qwen3_moe", **GQA, "head_dim": 24, "num_experts": 11,
        "num_experts_per_tok": 4, "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    # Layer 1 alone has experts.
    "qwen3-moe-mixed": {
        "model_type": "qwen3_moe", **GQA, "head_dim": 16, "num_experts": 5,
        "num_experts_per_tok": 1, "moe_intermediate_size": 40, "norm_topk_prob": False,
        "decoder_sparse_step": 2, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 19, "tie_word_embeddings": True,
    },
}  # fmt: skip
FOREIGN: dict[str, dict[str, Any]] = {
    "gpt-neox": {"model_type": "gpt_neox"},
    "gemma3": {
        "model_type": "gemma3_text", **GQA, "head_dim": 16, "sliding_window": 19,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "olmo2": {"model_type": "olmo2", **GQA},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "cohere": {"model_type": "cohere", **GQA},
    "gemma": {"model_type": "gemma", **GQA, "head_dim": 16},
    "glm4": {"model_type": "glm4", **GQA, "head_dim": 16},
    "helium": {"model_type": "helium", **GQA, "head_dim": 16},
    "mixtral": {
        "model_type": "mixtral", **GQA, "num_local_experts": 5, "num_experts_per_tok": 2,
    },
    "olmo3": {"model_type": "olmo3", **GQA, "sliding_window": 19},
    "opt": {
        "model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64,
        "do_layer_norm_before": True,
    },
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5},
    "phi3": {"model_type": "phi3", **GQA},
    "starcoder2": {"model_type": "starcoder2", **GQA, "sliding_window": 19},
}  # fmt: skip
"""Transformers has them, too. With those above, twenty."""


def write(folder: Path, fields: dict[str, Any]) -> None:
    """A checkpoint in several files, every tensor random: norms and biases count as well."""
    asked = SIZES | fields
    config = AutoConfig.for_model(**asked)
    random_model(config).save_pretrained(folder, max_shard_size="60KB")


def prompts() -> list[list[int]]:
    """Short and long, alone and with a common beginning, some alike."""
    rng = random.Random(4)

    def some(count: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY) for _ in range(count)]

    shared = some(26)
    found = [some(count) for count in (1, 2, 3, 4, 5, 9, 16, 24, 25, 33, 48, 64)]
    found += [[*shared, *some(1 + index)] for index in range(14)]
    found += [shared[:24], shared[:20], list(shared), list(shared), found[11][:40], found[11]]
    assert len(found) == REQUESTS
    return found


def run(model: Any, helpers: Any) -> tuple[dict[str, list[int]], dict[tuple[str, int], Any]]:
    """Texts of all requests by name, and the logits of each of their tokens."""
    engine = EngineCore(
        Runner(model, BLOCKS, BLOCK), Scheduler(BlockPool(BLOCKS, BLOCK), SEQS, BUDGET, 200)
    )
    seen = recorded(engine)
    for number, prompt in enumerate(prompts()):
        submit = helpers.submit(str(number), prompt, NEW_TOKENS, ignore_eos=True)
        assert engine.submit(submit) is None
    texts = helpers.finish(engine)
    assert engine.scheduler.preemptions_total > 0
    assert engine.scheduler.prefix_hit_tokens_total > 0
    idle, _, findings = run_audit(engine, Ledger())
    assert (idle, findings) == (True, [])
    engine.close()
    return texts, seen


@pytest.mark.parametrize(
    "name", [*OWN, *FOREIGN, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
)
def test_greedy_text_and_logits_equal_transformers(name: str, tmp_path: Path, helpers: Any) -> None:
    torch.set_num_threads(1)
    write(tmp_path, (OWN | FOREIGN | MORE)[name])
    config = loader.load_config(tmp_path)
    model = loader.load_model(tmp_path, config, torch.float32, torch.device("cpu"))
    assert isinstance(model, Decoder) == (name in OWN)
    texts, seen = run(model, helpers)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    worst = 0.0
    kinds = []
    for number, prompt in enumerate(prompts()):
        text = texts[str(number)]
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
        assert text == wanted.argmax(-1).tolist(), f"request {number}"
        kinds.append(len(set(text)))
        ours = torch.stack([seen[str(number), place] for place in range(NEW_TOKENS)])
        worst = max(worst, float((ours - wanted).abs().max()))
    print(f"{name}: largest difference of logits {worst:.1e}")
    assert worst < 1e-4
    assert sum(kinds) / len(kinds) > 8, "loops: the equality would say little"


REFUSED: list[tuple[dict[str, Any], str]] = [
    # Caps its scores, which the pool's attention does not.
    ({"model_type": "gemma2", **GQA, "head_dim": 16}, r"model_type gemma2 .*softcap"),
    # Convolutions keep a state beside keys and values.
    (
        {
            "model_type": "lfm2", **GQA,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        r"config\.json: model_type lfm2 ",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_an_architecture_that_the_pool_cannot_serve_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, fields)
    config = loader.load_config(tmp_path)
    with pytest.raises(LoadError, match=message):
        loader.load_model(tmp_path, config, torch.float32, torch.device("cpu"))


def test_results_that_are_not_transformers_own_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation that is off: every result is plausible, and wrong."""
    from plimsoll_engine.models.transformers_model import TransformersModel  # takes seconds

    forward = TransformersModel.forward

    def wrong(self: Any, ids: Any, positions: Any, *rest: Any) -> Any:
        return forward(self, ids, 2 * positions, *rest)

    monkeypatch.setattr(TransformersModel, "forward", wrong)
    write(tmp_path, FOREIGN["gpt-neox"])
    config = loader.load_config(tmp_path)
    with pytest.raises(LoadError, match="differ from transformers' own"):
        loader.load_model(tmp_path, config, torch.float32, torch.device("cpu"))
