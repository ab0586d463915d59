"""Models of transformers with random weights, for tests that compare tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def random_model(config: Any) -> Any:
    """In float32, every tensor random: norms and biases count as well. Always the same."""
    generator = torch.Generator().manual_seed(8)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                # The newest token alone must not decide: a text would soon be a loop.
                gain = 0.1 if "embed" in name else 2.0
                parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)
    return model
