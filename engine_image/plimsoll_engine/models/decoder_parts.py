"""Sizes of a decoder, and how its tensors are assembled from those of a checkpoint.

With tensor parallelism, the ranks share heads, intermediate columns and vocabulary equally.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from plimsoll_engine.distributed.group import RANKS_FLAG, WHOLE_MODEL, Shard
from plimsoll_engine.kernels.quantized import FP8
from plimsoll_engine.models.mixture import Mixture, Sources
from plimsoll_engine.models.quantization import Quantization


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes and options of a decoder."""

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
    def from_config(cls, config: Any) -> DecoderSpec:
        """Return the spec for a transformers config that :func:`decoder.supports` accepts."""
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
            windows=tuple(_read_windows(config)),
            mixture=Mixture.from_config(config),
        )

    def take_shard(self, shard: Shard) -> DecoderSpec:
        """Return the spec for one of ``shard.size`` ranks.

        Raises ValueError, naming the field, if heads or columns are not divisible by the ranks.
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
                    f"field {field} is {count}, which is not divisible by {RANKS_FLAG} "
                    f"{shard.size}: use a value of the flag that divides {count}"
                )
        return replace(
            self,
            heads=self.heads // shard.size,
            kv_heads=self.kv_heads // shard.size,
            intermediate=self.intermediate // shard.size,
            mixture=None if mixture is None else mixture.take_shard(shard),
        )


def _read_windows(config: Any) -> list[int | None]:
    # In tokens; None for a layer with full attention. Without layer_types, only Mistral and
    # Qwen3-MoE use the config's sliding_window.
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses_window = config.model_type in ("mistral", "qwen3_moe")
        return [window if uses_window else None] * int(config.num_hidden_layers)
    return [window if kind == "sliding_attention" else None for kind in kinds]


@dataclass(frozen=True, slots=True)
class Part:
    """Tensor of the model: its shape, and the checkpoint tensors that it concatenates."""

    sources: tuple[tuple[str, int], ...]  # (name of a checkpoint tensor, number of rows)
    shape: tuple[int, ...]
    # Dimension in which the ranks split each source; None if each loads all of it.
    split: int | None = None
    shard: Shard = WHOLE_MODEL
    # None means the model's dtype.
    dtype: torch.dtype | None = None

    def get_source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the full shape of a checkpoint tensor of which this rank loads ``shape``."""
        return tuple(
            size * self.shard.size if dimension == self.split else size
            for dimension, size in enumerate(shape)
        )

    def get_source_slices(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of a checkpoint tensor that this rank loads as ``shape``."""
        return tuple(
            slice(self.shard.rank * size, (self.shard.rank + 1) * size)
            if dimension == self.split
            else slice(None)
            for dimension, size in enumerate(shape)
        )


# Suffix of the name of the tensor with a quantized matrix's scales.
SCALE_SUFFIX = "_scale"
# Matrices that are split by columns. Their products are summed over the ranks.
SUMMED_MATRICES = ("out", "down")


def make_parts(
    spec: DecoderSpec, shard: Shard = WHOLE_MODEL, quantization: Quantization | None = None
) -> dict[str, Part]:
    """Return all tensors of a rank's model by name.

    Raises ValueError if a router, or only a part of a fused matrix, is quantized.
    """

    def make_part(source: str, *shape: int) -> Part:
        return Part(((source, shape[0]),), shape)

    parts = {
        "embed": make_part("model.embed_tokens.weight", spec.vocabulary, spec.hidden),
        "norm": make_part("model.norm.weight", spec.hidden),
    }
    if not spec.tied:
        rows = spec.vocabulary // shard.size
        parts["head"] = Part((("lm_head.weight", rows),), (rows, spec.hidden), 0, shard)
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
        source_prefix, prefix = f"model.layers.{layer}.", f"layers.{layer}."
        layer_matrices = matrices
        if mixture is not None and layer in mixture.layers:
            router = f"{source_prefix}mlp.gate"
            parts[f"{prefix}router"] = make_part(f"{router}.weight", mixture.experts, spec.hidden)
            if quantization is not None:
                quantization.require_ignored(router, "a router")
            layer_matrices = matrices | {
                "gate_up": (mixture.list_gate_up_sources(), spec.hidden, False),
                "down": (mixture.list_down_sources(spec.hidden), mixture.width, False),
            }
        for name, size in (("attention_norm", spec.hidden), ("mlp_norm", spec.hidden)):
            source = "input_layernorm" if name == "attention_norm" else "post_attention_layernorm"
            parts[prefix + name] = make_part(f"{source_prefix}{source}.weight", size)
        if spec.qk_norm:
            for name in ("q_norm", "k_norm"):
                parts[prefix + name] = make_part(
                    f"{source_prefix}self_attn.{name}.weight", spec.dim
                )
        for name, (sources, columns, bias) in layer_matrices.items():
            paths = tuple((source_prefix + source, count) for source, count in sources)
            rows = sum(count for _, count in sources)
            scaled = quantization is not None and quantization.is_quantized(
                [path for path, _ in paths]
            )
            # Only one rank adds the bias of a matrix that is split by columns. Each rank has the
            # scales of all rows of its part.
            summed = name in SUMMED_MATRICES
            by_row = None if summed else 0
            matrix = Part(
                _append_suffix(paths, "weight"), (rows, columns), 1 if summed else 0, shard
            )
            parts[prefix + name] = replace(matrix, dtype=FP8) if scaled else matrix
            if scaled:
                scales = _append_suffix(paths, "weight_scale")
                parts[prefix + name + SCALE_SUFFIX] = Part(
                    scales, (rows, 1), by_row, shard, torch.float32
                )
            if bias:
                parts[prefix + name + "_bias"] = Part(
                    _append_suffix(paths, "bias"), (rows,), by_row, shard
                )
    return parts


def _append_suffix(paths: tuple[tuple[str, int], ...], kind: str) -> tuple[tuple[str, int], ...]:
    return tuple((f"{path}.{kind}", rows) for path, rows in paths)
