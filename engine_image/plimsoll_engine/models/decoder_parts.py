"""Sizes of a decoder, and the mapping from checkpoint tensors to its own.

A rank has a share of the heads, of the inner columns and of the output's rows. A matrix whose
output is that share is split by rows. One whose input is the share is split by columns; its
products are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from plimsoll_engine.distributed.group import FLAG, WHOLE, Shard
from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.models.mixture import Mixture, Sources
from plimsoll_engine.models.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes and switches of one decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    mixture: Mixture | None = None

    @classmethod
    def from_config(cls, config: Any) -> Spec:
        """Return the spec of a transformers config of the :data:`FAMILY`."""
        attention_bias = bool(getattr(config, "attention_bias", False))
        qwen2 = config.model_type == "qwen2"
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            eps=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=qwen2 or attention_bias,
            out_bias=not qwen2 and attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=config.model_type in ("qwen3", "qwen3_moe"),
            windows=tuple(_windows(config)),
            mixture=Mixture.from_config(config),
        )

    def for_shard(self, shard: Shard) -> Spec:
        """Return the spec of one rank.

        It has a share of the heads, of the inner columns and of the output's rows, and the whole
        embedding. Raises ValueError with a field that cannot be divided.
        """
        mixture = self.mixture
        dense = mixture is None or len(mixture.layers) < self.layers
        for field, count in (
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("intermediate_size", self.intermediate if dense else 0),
            ("vocab_size", self.vocabulary),
        ):
            if count % shard.size:
                raise ValueError(
                    f"field {field}: {count} is not divisible by {FLAG} {shard.size}; use a"
                    " smaller size that divides it"
                )
        return replace(
            self,
            heads=self.heads // shard.size,
            kv_heads=self.kv_heads // shard.size,
            intermediate=self.intermediate // shard.size,
            mixture=None if mixture is None else mixture.for_shard(shard),
        )


def _windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer.

    Without ``layer_types``, only the configs of Mistral and Qwen3-MoE apply the window.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        meant = config.model_type in ("mistral", "qwen3_moe")
        return [window if meant else None] * int(config.num_hidden_layers)
    return [window if kind == "sliding_attention" else None for kind in kinds]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the model: the checkpoint tensors that it concatenates, and its shape.

    ``sources`` has their names and numbers of rows. With ``split`` it is one rank's: it has the
    share of ``shard`` of each source, by rows (0) or columns (1).
    """

    sources: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    split: int | None = None
    shard: Shard = WHOLE
    dtype: torch.dtype | None = None
    """Dtype; None for the model's."""

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the checkpoint of a source that has ``shape`` here."""
        return tuple(
            size * self.shard.size if dimension == self.split else size
            for dimension, size in enumerate(shape)
        )

    def source_slices(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of a source that has ``shape`` here."""
        return tuple(
            slice(self.shard.rank * size, (self.shard.rank + 1) * size)
            if dimension == self.split
            else slice(None)
            for dimension, size in enumerate(shape)
        )


SCALE = "_scale"
"""Suffix of the name of a quantized matrix's scales."""
SUMMED = ("out", "down")
"""Matrices whose products are sums over all heads or all inner columns."""


def parts(
    spec: Spec, shard: Shard = WHOLE, quantization: Quantization | None = None
) -> dict[str, Part]:
    """Return every tensor of the model by its name. ``spec`` is that of ``shard``.

    Raises ValueError if ``quantization`` covers part of a matrix, or a router.
    """

    def whole(source: str, *shape: int) -> Part:
        return Part(((source, shape[0]),), shape)

    found = {
        "embed": whole("model.embed_tokens.weight", spec.vocabulary, spec.hidden),
        "norm": whole("model.norm.weight", spec.hidden),
    }
    if not spec.tied:
        rows = spec.vocabulary // shard.size
        found["head"] = Part((("lm_head.weight", rows),), (rows, spec.hidden), 0, shard)
    query, kv = spec.heads * spec.dim, spec.kv_heads * spec.dim
    matrices: dict[str, tuple[Sources, int, bool]] = {
        "qkv": (
            (("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)),
            spec.hidden,
            spec.qkv_bias,
        ),
        "out": ((("self_attn.o_proj", spec.hidden),), query, spec.out_bias),
        "gate_up": (
            (("mlp.gate_proj", spec.intermediate), ("mlp.up_proj", spec.intermediate)),
            spec.hidden,
            spec.mlp_bias,
        ),
        "down": ((("mlp.down_proj", spec.hidden),), spec.intermediate, spec.mlp_bias),
    }
    mixture = spec.mixture
    for layer in range(spec.layers):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        own = matrices
        if mixture is not None and layer in mixture.layers:
            router = f"{theirs}mlp.gate"
            found[f"{ours}router"] = whole(f"{router}.weight", mixture.experts, spec.hidden)
            if quantization is not None:
                quantization.must_ignore(router, "a router")
            own = matrices | {
                "gate_up": (mixture.gate_up(), spec.hidden, False),
                "down": (mixture.down(spec.hidden), mixture.width, False),
            }
        for name, size in (("attention_norm", spec.hidden), ("mlp_norm", spec.hidden)):
            source = "input_layernorm" if name == "attention_norm" else "post_attention_layernorm"
            found[ours + name] = whole(f"{theirs}{source}.weight", size)
        if spec.qk_norm:
            for name in ("q_norm", "k_norm"):
                found[ours + name] = whole(f"{theirs}self_attn.{name}.weight", spec.dim)
        for name, (sources, columns, bias) in own.items():
            paths = tuple((theirs + source, count) for source, count in sources)
            rows = sum(count for _, count in sources)
            scaled = quantization is not None and quantization.covers([path for path, _ in paths])
            # A matrix whose product is summed over the ranks is split by columns. Its bias is
            # added once, and each rank has the scales of all rows.
            summed = name in SUMMED
            by_row = None if summed else 0
            matrix = Part(_append_kind(paths, "weight"), (rows, columns), 1 if summed else 0, shard)
            found[ours + name] = replace(matrix, dtype=FP8) if scaled else matrix
            if scaled:
                scales = _append_kind(paths, "weight_scale")
                found[ours + name + SCALE] = Part(scales, (rows, 1), by_row, shard, torch.float32)
            if bias:
                found[ours + name + "_bias"] = Part(
                    _append_kind(paths, "bias"), (rows,), by_row, shard
                )
    return found


def _append_kind(paths: tuple[tuple[str, int], ...], kind: str) -> tuple[tuple[str, int], ...]:
    return tuple((f"{path}.{kind}", rows) for path, rows in paths)
