"""Compute the inverse frequencies of a rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import torch

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


def get_rope_type(config: Any) -> str:
    """Return the RoPE type in a transformers config, for example ``default`` or ``llama3``."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def compute_inverse_frequencies(config: Any, dim: int) -> torch.Tensor:
    """Return the inverse frequencies float32 [dim / 2], for one of :data:`SUPPORTED_ROPE_TYPES`.

    Raises ValueError, naming the field, if a field is missing.
    """
    parameters = config.rope_parameters
    kind = get_rope_type(config)
    needed = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "linear": ("factor",)}
    for name in ("rope_theta", *needed.get(kind, ())):
        if not isinstance(parameters.get(name), int | float):
            value = parameters.get(name)
            raise ValueError(f"field rope_parameters.{name} must be a number, got {value!r}")
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    inverse: torch.Tensor = 1.0 / float(parameters["rope_theta"]) ** exponents
    if kind == "linear":
        inverse = inverse / float(parameters["factor"])
    if kind == "llama3":
        return _scale_llama3(inverse, parameters, config.max_position_embeddings)
    return inverse


def _scale_llama3(
    inverse: torch.Tensor, parameters: dict[str, Any], original_positions: int
) -> torch.Tensor:
    # As in Llama 3.1: low frequencies are divided by ``factor``, high ones stay, and those in
    # between are interpolated.
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original: int = parameters.get("original_max_position_embeddings") or original_positions
    turns = original * inverse / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return ramp * inverse + (1 - ramp) * inverse / factor
