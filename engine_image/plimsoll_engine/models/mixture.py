"""Mixture of experts: its config, and its tensors in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from plimsoll_engine.distributed.group import RANKS_FLAG, Shard

MIXTURE_MODEL_TYPES = ("qwen3_moe",)
# Kernels process all experts in one block. Published models have far fewer.
MAX_EXPERTS = 1024
MAX_EXPERTS_PER_TOKEN = 64

# Pairs (name of a checkpoint tensor without the layer's prefix, number of its rows).
Sources = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a model, and the layers that have experts."""

    experts: int
    top_k: int  # experts of each row
    width: int  # intermediate size of an expert
    normalised: bool  # whether the weights of a row's experts add up to 1
    layers: frozenset[int]

    @classmethod
    def from_config(cls, config: Any) -> Mixture | None:
        """Return the mixture in a transformers config; None if no layer has experts.

        Raises ValueError, naming the field, if a field is invalid.
        """
        if config.model_type not in MIXTURE_MODEL_TYPES:
            return None
        experts = _read_int(config, "num_experts", 0, MAX_EXPERTS)
        step = _read_int(config, "decoder_sparse_step", 1)
        dense = set(config.mlp_only_layers or ())
        layers = frozenset(
            layer
            for layer in range(config.num_hidden_layers)
            if experts and layer not in dense and (layer + 1) % step == 0
        )
        if not layers:
            return None
        top_k = _read_int(config, "num_experts_per_tok", 1, MAX_EXPERTS_PER_TOKEN)
        if top_k > experts:
            raise ValueError(
                f"field num_experts_per_tok must be at most num_experts ({experts}), got {top_k}"
            )
        return cls(
            experts=experts,
            top_k=top_k,
            width=_read_int(config, "moe_intermediate_size", 1),
            normalised=bool(config.norm_topk_prob),
            layers=layers,
        )

    def take_shard(self, shard: Shard) -> Mixture:
        """Return the mixture for one of ``shard.size`` ranks.

        Raises ValueError if ``width`` is not divisible by the number of ranks.
        """
        if self.width % shard.size:
            raise ValueError(
                f"field moe_intermediate_size is {self.width}, which is not divisible by "
                f"{RANKS_FLAG} {shard.size}: use a value of the flag that divides "
                f"{self.width}"
            )
        return replace(self, width=self.width // shard.size)

    def list_gate_up_sources(self) -> Sources:
        """Return the checkpoint tensors that form the stacked gate and up projections."""
        return tuple(
            (f"mlp.experts.{expert}.{name}", self.width)
            for expert in range(self.experts)
            for name in ("gate_proj", "up_proj")
        )

    def list_down_sources(self, hidden: int) -> Sources:
        """Return the checkpoint tensors that form the stacked down projections."""
        return tuple((f"mlp.experts.{expert}.down_proj", hidden) for expert in range(self.experts))


def _read_int(config: Any, field: str, minimum: int, maximum: int | None = None) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int) or value < minimum or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"field {field} must be {bounds}, got {value!r}")
    return value
