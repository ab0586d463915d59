"""Whisper with the encoder of transformers, and a decoder with the paged KV pool.

The decoder's cross-attention keys and values are kept until the request ends, because every step
attends to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import embedding, gelu, layer_norm, scaled_dot_product_attention
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from plimsoll_engine.kernels.choose import choose_ops
from plimsoll_engine.kernels.quantized import product
from plimsoll_engine.kernels.step_plan import KVShape, StepPlan
from plimsoll_engine.messages.worker_ipc import Media
from plimsoll_engine.models import media_input
from plimsoll_engine.models.decoder_parts import Part
from plimsoll_engine.models.module_parts import (
    bind_module,
    clear_tensors,
    init_buffers,
    make_module_parts,
)

ENCODER_PREFIX, DECODER_PREFIX = "model.encoder.", "model.decoder."


def get_kv_shape(config: Any) -> KVShape:
    """Return the shape of the decoder's self-attention keys and values."""
    heads = config.decoder_attention_heads
    return KVShape(config.decoder_layers, heads, config.d_model // heads)


def make_decoder_parts(config: Any) -> dict[str, Part]:
    """Return all tensors of the decoder by name in the checkpoint."""
    hidden, inner = config.d_model, config.decoder_ffn_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "embed_positions.weight": (config.max_target_positions, hidden),
    }
    shapes |= {f"layer_norm.{kind}": (hidden,) for kind in ("weight", "bias")}
    for layer in range(config.decoder_layers):
        prefix = f"layers.{layer}."
        for norm in ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"):
            shapes |= {f"{prefix}{norm}.{kind}": (hidden,) for kind in ("weight", "bias")}
        for attention in ("self_attn", "encoder_attn"):
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes[f"{prefix}{attention}.{name}.weight"] = (hidden, hidden)
                if name != "k_proj":
                    shapes[f"{prefix}{attention}.{name}.bias"] = (hidden,)
        shapes |= {f"{prefix}fc1.weight": (inner, hidden), f"{prefix}fc1.bias": (inner,)}
        shapes |= {f"{prefix}fc2.weight": (hidden, inner), f"{prefix}fc2.bias": (hidden,)}
    return {
        DECODER_PREFIX + name: Part(((DECODER_PREFIX + name, shape[0]),), shape)
        for name, shape in shapes.items()
    }


class WhisperModel:
    """Speech recognition model: an audio encoder and a text decoder.

    Its tensors are on the meta device until :meth:`bind` is called.
    """

    is_encoder_decoder = True

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        if config.activation_function != "gelu":
            raise ValueError(
                f"field activation_function must be gelu, got {config.activation_function}"
            )
        self.kv = get_kv_shape(config)
        with torch.device("meta"):
            self._encoder: Any = WhisperEncoder._from_config(config, dtype=dtype)
        self._encoder.eval()
        self._scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self._tokens = config.max_source_positions
        self._shape = [config.num_mel_bins, 2 * config.max_source_positions]
        self.output_bytes = self.kv.compute_bytes_per_token(dtype)
        decoder_parts = make_decoder_parts(config)
        self.parts = make_module_parts(self._encoder, ENCODER_PREFIX) | decoder_parts
        self._tensors = {
            name: torch.empty(part.shape, dtype=dtype, device="meta")
            for name, part in decoder_parts.items()
        }

    @property
    def ignored_tensors(self) -> frozenset[str]:
        # The output head is tied.
        return frozenset({"proj_out.weight"})

    @staticmethod
    def normalize_name(name: str) -> str:
        """Return ``name`` unchanged, because ``parts`` uses the names in checkpoints."""
        return name

    @property
    def device(self) -> torch.device:
        return self._tensors[f"{DECODER_PREFIX}embed_tokens.weight"].device

    @property
    def dtype(self) -> torch.dtype:
        return self._tensors[f"{DECODER_PREFIX}embed_tokens.weight"].dtype

    def get_parameters(self) -> dict[str, torch.Tensor]:
        encoder = {ENCODER_PREFIX + name: t.data for name, t in self._encoder.named_parameters()}
        return encoder | self._tensors

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, part in self.parts.items():
            if name not in tensors or tuple(tensors[name].shape) != part.shape:
                raise ValueError(f"tensor {name} is missing, or its shape is not {part.shape}")
        self._tensors = {name: tensors[name] for name in self._tensors}
        bind_module(self._encoder, tensors, ENCODER_PREFIX)
        init_buffers(self._encoder, self.device)

    def encode(self, media: Sequence[Media]) -> list[torch.Tensor]:
        """Return the decoder's cross-attention keys and values for each audio clip.

        They are [tokens, layers, 2, heads, dim] in the model's dtype, and stored in the order in
        which attention reads them.
        """
        mel = media_input.stack_media(media, self._shape, self.dtype, self.device)
        states = self._encoder(mel).last_hidden_state
        layers, heads, dim = self.kv
        size = (len(media), layers, 2, heads, self._tokens, dim)
        outputs = torch.empty(size, dtype=self.dtype, device=self.device)
        for layer in range(layers):
            for index, name in enumerate(("k_proj", "v_proj")):
                rows = self._project(states, layer, f"encoder_attn.{name}")
                outputs[:, layer, index] = rows.view(*rows.shape[:2], heads, dim).transpose(1, 2)
        return [output.clone().permute(3, 0, 1, 2, 4) for output in outputs]

    def make_dummy_media(self) -> Media:
        return media_input.make_dummy_media("audio", self._shape, 0, self._tokens)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids, self._tensors[f"{DECODER_PREFIX}embed_tokens.weight"]) * self._scale

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the final normalised hidden states, like Model.forward.

        ``plan.attended`` must contain the results of :meth:`encode`.
        """
        x = self.embed(ids) if embeds is None else embeds
        x = x + embedding(positions, self._tensors[f"{DECODER_PREFIX}embed_positions.weight"])
        for layer in range(self.kv.layers):
            normed = self._normalize(x, f"layers.{layer}.self_attn_layer_norm")
            x = x + self._attend_self(normed, plan, layer)
            normed = self._normalize(x, f"layers.{layer}.encoder_attn_layer_norm")
            x = x + self._attend_audio(normed, plan, layer)
            normed = self._normalize(x, f"layers.{layer}.final_layer_norm")
            x = x + self._project(gelu(self._project(normed, layer, "fc1")), layer, "fc2")
        if plan.needed is not None:
            x = choose_ops(x.device).gather_rows(x, plan.needed.rows)
        return self._normalize(x, "layer_norm")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return product(hidden, self._tensors[f"{DECODER_PREFIX}embed_tokens.weight"], None)

    def close(self) -> None:
        self._tensors = {}
        clear_tensors(self._encoder)

    def _attend_self(self, x: torch.Tensor, plan: StepPlan, layer: int) -> torch.Tensor:
        heads, dim = self.kv.heads, self.kv.dim
        query, key, value = (
            self._project(x, layer, f"self_attn.{name}").view(-1, heads, dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        ops = choose_ops(x.device)
        ops.store(key, value, plan, layer)
        out = ops.attend(query, plan, layer, dim**-0.5, None)
        return self._project(out.flatten(1), layer, "self_attn.out_proj")

    def _attend_audio(self, x: torch.Tensor, plan: StepPlan, layer: int) -> torch.Tensor:
        assert plan.attended is not None
        query = self._project(x, layer, "encoder_attn.q_proj")
        query = query.view(-1, self.kv.heads, self.kv.dim).transpose(0, 1)
        parts = []
        first = 0
        for count, output in plan.attended:
            keys, values = output[:, layer].permute(1, 2, 0, 3)
            rows = query[:, first : first + count]
            part = scaled_dot_product_attention(rows[None], keys[None], values[None])
            parts.append(part[0].transpose(0, 1).flatten(1))
            first += count
        return self._project(torch.cat(parts), layer, "encoder_attn.out_proj")

    def _normalize(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._tensors[f"{DECODER_PREFIX}{name}.weight"]
        return layer_norm(x, weight.shape, weight, self._tensors[f"{DECODER_PREFIX}{name}.bias"])

    def _project(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        path = f"{DECODER_PREFIX}layers.{layer}.{name}"
        return product(x, self._tensors[f"{path}.weight"], self._tensors.get(f"{path}.bias"))
