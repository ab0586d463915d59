"""A random Qwen3 with heads of the size that engines have CPU kernels for; and the mere description
of larger ones, for engines on a device, which make up their weights (``--load-format=dummy``).

    python -m tests.conformance.checkpoint FOLDER    # FOLDER/checkpoint, FOLDER/large
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import Qwen3Config

from plimsoll_faults.models import tiny_text
from tests.random_model import random_model

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
REAL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""The shape of Qwen3 0.6B, without its vocabulary."""
LARGE = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""That of Qwen3 32B."""


def make(folder: Path) -> None:
    """Writes weights, configuration and the tests' own tokenizer."""
    tokenizer = tiny_text.train_tokenizer()
    random_model(_config(tokenizer, SMALL)).save_pretrained(folder)
    tiny_text.write_tokenizer(tokenizer, folder)


def describe(folder: Path, shape: dict[str, int]) -> None:
    """Writes configuration and tokenizer, and no weights."""
    tokenizer = tiny_text.train_tokenizer()
    config = _config(tokenizer, shape)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    tiny_text.write_tokenizer(tokenizer, folder)


def _config(tokenizer: Any, shape: dict[str, int]) -> Qwen3Config:
    end = tokenizer.token_to_id(tiny_text.EOS)
    return Qwen3Config(
        **shape,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.token_to_id(tiny_text.BOS),
        eos_token_id=end,
        pad_token_id=end,
    )


if __name__ == "__main__":
    for name, shape in (("checkpoint", REAL), ("large", LARGE)):
        describe(Path(sys.argv[1]) / name, shape)
