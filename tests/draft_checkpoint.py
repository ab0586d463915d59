"""A draft model for the tiny checkpoint: mostly right, and wrong now and then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MORE_TOKENS = 24
NOISE = 1.0
"""Of the head's own deviation. With half of it the draft model guessed all 217 tokens of a test: it
draws with the noise of the large one."""


def write_draft_checkpoint(source: Path, folder: Path) -> None:
    """Copy the tiny checkpoint, with noise in its head, and with tokens that ``source`` lacks."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"]
    head += NOISE * head.std() * torch.randn(head.shape, generator=torch.Generator().manual_seed(4))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        # Large, so that they would be drawn if nobody forbade it.
        tensors[name] = torch.cat([tensors[name], 9.0 * tensors[name][:MORE_TOKENS]])
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    config["vocab_size"] += MORE_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
