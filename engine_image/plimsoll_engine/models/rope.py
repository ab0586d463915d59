"""Rotary position embedding: inverse frequencies of a config."""

from __future__ import annotations

import math
from typing import Any

import torch

KNOWN = ("default", "linear", "llama3")


def rope_type(config: Any) -> str:
    """Return how the config scales its rotation, for example ``default`` or ``llama3``."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def inverse_frequencies(config: Any, dim: int) -> torch.Tensor:
    """Return the inverse frequencies, float32 [dim / 2], for a ``rope_type`` in :data:`KNOWN`.

    Raises ValueError with a missing field.
    """
    parameters = config.rope_parameters
    kind = rope_type(config)
    needed = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "linear": ("factor",)}
    for name in ("rope_theta", *needed.get(kind, ())):
        if not isinstance(parameters.get(name), int | float):
            raise ValueError(f"field rope_parameters.{name} is missing or not a number")
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    inverse: torch.Tensor = 1.0 / float(parameters["rope_theta"]) ** exponents
    if kind == "linear":
        inverse = inverse / float(parameters["factor"])
    if kind == "llama3":
        return _llama3(inverse, parameters, config.max_position_embeddings)
    return inverse


def _llama3(inverse: torch.Tensor, parameters: dict[str, Any], positions: int) -> torch.Tensor:
    """Return Llama 3.1's scaling: slow long waves by ``factor``, keep short ones, ramp between."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original: int = parameters.get("original_max_position_embeddings") or positions
    turns = original * inverse / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return ramp * inverse + (1 - ramp) * inverse / factor
