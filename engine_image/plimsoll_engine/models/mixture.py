"""Mixture of experts: what a config says of it, and where its tensors are in a checkpoint.

A layer's experts lie in two matrices below each other: the gate and up projections of the first
expert, those of the second and so on, and in the other one their down projections. With several
ranks, each has some of the inner columns of every expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from plimsoll_engine.distributed.group import FLAG, Shard

FAMILY = ("qwen3_moe",)
MAX_EXPERTS = 1024
"""Several times as many as published models have; the kernels count them in one block."""
MAX_CHOSEN = 64

Sources = tuple[tuple[str, int], ...]
"""Tensors of a checkpoint, without the layer's name, with the rows of each."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Which layers have experts instead of one MLP, how many, and how a row chooses among them.

    ``width`` are the inner columns of one expert. With ``normalised``, the shares of the ``chosen``
    experts of a row sum up to one.
    """

    experts: int
    chosen: int
    width: int
    normalised: bool
    layers: frozenset[int]

    @classmethod
    def of(cls, config: Any) -> Mixture | None:
        """Return what a transformers config says; None where no layer has experts.

        ValueError names a field that cannot be.
        """
        if config.model_type not in FAMILY:
            return None
        experts = _number(config, "num_experts", 0, MAX_EXPERTS)
        step = _number(config, "decoder_sparse_step", 1)
        dense = set(config.mlp_only_layers or ())
        layers = frozenset(
            layer
            for layer in range(config.num_hidden_layers)
            if experts and layer not in dense and (layer + 1) % step == 0
        )
        if not layers:
            return None
        chosen = _number(config, "num_experts_per_tok", 1, MAX_CHOSEN)
        if chosen > experts:
            raise ValueError(
                f"field num_experts_per_tok: {chosen} is more than num_experts, which is {experts}"
            )
        return cls(
            experts=experts,
            chosen=chosen,
            width=_number(config, "moe_intermediate_size", 1),
            normalised=bool(config.norm_topk_prob),
            layers=layers,
        )

    def part(self, shard: Shard) -> Mixture:
        """Return what one rank has. ValueError where the width cannot be shared out."""
        if self.width % shard.size:
            raise ValueError(
                f"field moe_intermediate_size: {self.width} cannot be divided by {FLAG}"
                f" {shard.size}; give a smaller one that divides it"
            )
        return replace(self, width=self.width // shard.size)

    def gate_up(self) -> Sources:
        """Return what lies in the matrix of the first products."""
        return tuple(
            (f"mlp.experts.{expert}.{name}", self.width)
            for expert in range(self.experts)
            for name in ("gate_proj", "up_proj")
        )

    def down(self, hidden: int) -> Sources:
        """Return what lies in the matrix of the second products."""
        return tuple((f"mlp.experts.{expert}.down_proj", hidden) for expert in range(self.experts))


def _number(config: Any, field: str, least: int, most: int | None = None) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"field {field}: {value!r} is not supported; it must be {bounds}")
    return value
