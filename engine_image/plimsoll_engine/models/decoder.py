"""Decoder of Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE, with the paged KV pool."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from plimsoll_engine.distributed.group import SINGLE_RANK_GROUP, WHOLE_MODEL, Group, Shard
from plimsoll_engine.kernels.choose import choose_ops
from plimsoll_engine.kernels.ops import Ops
from plimsoll_engine.kernels.quantized import Quantized, Weight, slice_rows
from plimsoll_engine.kernels.step_plan import KVShape, RowAdapters, StepPlan
from plimsoll_engine.models import lora, mixture, rope
from plimsoll_engine.models.decoder_layer import Layer
from plimsoll_engine.models.decoder_parts import (
    SCALE_SUFFIX,
    SUMMED_MATRICES,
    DecoderSpec,
    make_parts,
)
from plimsoll_engine.models.quantization import Quantization

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", *mixture.MIXTURE_MODEL_TYPES)


def supports(config: Any) -> bool:
    """Report whether :class:`Decoder` implements the model with the transformers ``config``."""
    return (
        config.model_type in SUPPORTED_MODEL_TYPES
        and getattr(config, "hidden_act", "silu") == "silu"
        and rope.get_rope_type(config) in rope.SUPPORTED_ROPE_TYPES
        and (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) == 1
    )


class Decoder:
    """Decoder-only model.

    Its tensors are on the meta device until :meth:`bind` is called. With tensor parallelism, each
    rank has a ``shard`` of the attention heads and of the intermediate columns.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        shard: Shard = WHOLE_MODEL,
        quantization: Quantization | None = None,
    ) -> None:
        self.spec = spec = DecoderSpec.from_config(config).take_shard(shard)
        self.shard = shard
        self.group: Group = SINGLE_RANK_GROUP
        self.parts = make_parts(spec, shard, quantization)
        self.kv = KVShape(spec.layers, spec.kv_heads, spec.dim)
        self._inverse = rope.compute_inverse_frequencies(config, spec.dim)
        self._tensors: dict[str, torch.Tensor] = {}
        self._layers: list[Layer] = []
        self._ops: Ops = choose_ops(torch.device("meta"))
        self.bind(
            {
                name: torch.empty(part.shape, dtype=part.dtype or dtype, device="meta")
                for name, part in self.parts.items()
            }
        )

    @property
    def ignored_tensors(self) -> frozenset[str]:
        """Names of checkpoint tensors that are not loaded: the output head, if it is tied."""
        return frozenset({"lm_head.weight"} if self.spec.tied else ())

    @staticmethod
    def normalize_name(name: str) -> str:
        """Return ``name`` unchanged, because :attr:`parts` uses the names in checkpoints."""
        return name

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._tensors["embed"].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and of all weights that are not quantized."""
        return self._tensors["embed"].dtype

    def get_parameters(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name in ``parts``, without a tied output head."""
        return {name: self._tensors[name] for name in self.parts if name in self._tensors}

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Use ``tensors`` as weights, without copying them.

        Raises ValueError, naming the first tensor that does not match ``parts``.
        """
        if unmatched := sorted(tensors.keys() ^ self.parts.keys()):
            raise ValueError(f"tensor {unmatched[0]} is missing, or does not belong to this model")
        embed = tensors["embed"]
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != self.parts[name].shape:
                shape = self.parts[name].shape
                raise ValueError(
                    f"tensor {name} must have shape {shape}, got {tuple(tensor.shape)}"
                )
            dtype = self.parts[name].dtype or embed.dtype
            if (tensor.dtype, tensor.device) != (dtype, embed.device):
                raise ValueError(
                    f"tensor {name} must be {dtype} on {embed.device}, got {tensor.dtype} on "
                    f"{tensor.device}"
                )
        self._tensors = dict(tensors)
        if self.spec.tied:
            self._tensors["head"] = embed.chunk(self.shard.size)[self.shard.rank]
        self._layers = []
        for layer in range(self.spec.layers):
            prefix = f"layers.{layer}."
            layer_tensors = {
                k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)
            }
            if self.shard.rank:
                for name in SUMMED_MATRICES:
                    layer_tensors.pop(f"{name}_bias", None)
            fields: dict[str, Any] = dict(layer_tensors)
            for name in [name for name in layer_tensors if name + SCALE_SUFFIX in layer_tensors]:
                fields[name] = Quantized(layer_tensors[name], fields.pop(name + SCALE_SUFFIX))
            self._layers.append(Layer(**fields))
        self._ops = choose_ops(embed.device)
        if embed.device.type != "meta":
            self._inverse = self._inverse.to(embed.device)

    @property
    def num_representative_layers(self) -> int:
        """Number of first layers that include every kind of layer; at least two."""
        kinds = [
            (window, layer.router is None)
            for window, layer in zip(self.spec.windows, self._layers, strict=True)
        ]
        return min(len(kinds), max(2, *(1 + kinds.index(kind) for kind in set(kinds))))

    def truncate(self, num_layers: int) -> Decoder:
        """Return a model of the first ``num_layers`` layers, which shares tensors and group."""
        model = copy.copy(self)
        model.spec = replace(self.spec, layers=num_layers, windows=self.spec.windows[:num_layers])
        model.kv = KVShape(num_layers, self.kv.heads, self.kv.dim)
        model._layers = self._layers[:num_layers]
        return model

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [tokens, hidden] of ``ids`` [tokens], in the model's dtype."""
        return self._ops.gather_rows(self._tensors["embed"], ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of ``hidden`` [rows, hidden], from all ranks."""
        return self.group.all_gather(self._compute_own_logits(hidden))

    def compute_best_tokens(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's likeliest token, int64 [rows], and this rank's part of the logits."""
        logits = self._compute_own_logits(hidden)
        return self.group.compute_argmax(self._ops, logits), logits

    def _compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        ops, head = self._ops, self._tensors["head"]
        if 0 < len(hidden) <= ops.get_max_projection_rows(head):
            return ops.project(hidden, head, None)
        return ops.linear(hidden, head, None)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the final normalised hidden states [tokens, hidden] of ``ids`` int64 [tokens].

        See :meth:`plimsoll_engine.models.model.Model.forward`.
        """
        if plan.adapters is None and self._is_small_step(len(ids), plan):
            return self._forward_small_step(ids, positions, plan, embeds)
        stream, x, rotary = self.begin_forward(ids, positions, embeds)
        for index in range(self.spec.layers - 1):
            query = self.compute_query(x, rotary, index, plan)
            x = self._add_attention(stream, query, index, plan)
            x = self._add_mlp(stream, x, index, plan.adapters)
        return self.run_last_layer(x, stream, rotary, plan)

    def begin_forward(
        self, ids: torch.Tensor, positions: torch.Tensor, embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the residual stream, the first layer's normalised input, and the rotary table.

        The stream and the input are [tokens, hidden] in the model's dtype.
        """
        stream = self.embed(ids) if embeds is None else embeds.clone()
        x = self._ops.rms_norm(stream, self._layers[0].attention_norm, self.spec.eps)
        return stream, x, self._ops.compute_rotary_table(positions, self._inverse)

    def compute_query(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor,
        index: int,
        plan: StepPlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the queries [tokens, heads, dim] of layer ``index``, and store keys and values.

        ``x`` is the layer's normalised input. Queries are written to ``out`` if given.
        """
        ops, layer, adapters = self._ops, self._layers[index], plan.adapters
        qkv = lora.apply_linear(x, layer.qkv, layer.qkv_bias, adapters, index, "qkv", ops.linear)
        return ops.rotate_and_store(qkv, rotary, layer.norms, self.spec.eps, plan, index, out)

    def attend(
        self, query: torch.Tensor, index: int, plan: StepPlan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention output of layer ``index`` in the shape of ``query``.

        Write it to ``out`` if given.
        """
        window = self.spec.windows[index]
        return self._ops.attend(query, plan, index, self.spec.dim**-0.5, window, out)

    def finish_layer(
        self, stream: torch.Tensor, attended: torch.Tensor, index: int
    ) -> torch.Tensor:
        """Add the output projection and the MLP of layer ``index`` to ``stream`` in place.

        Return the normalised input of the next layer. LoRA adapters are not applied.
        """
        x = self._add_output_projection(stream, attended.flatten(1), index, None)
        return self._add_mlp(stream, x, index, None)

    def run_last_layer(
        self, x: torch.Tensor, stream: torch.Tensor, rotary: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        """Return the final normalised hidden states of the rows that the step needs.

        ``x`` is the last layer's normalised input.
        """
        ops, needed, index = self._ops, plan.needed, self.spec.layers - 1
        if needed is None:
            query = self.compute_query(x, rotary, index, plan)
        else:
            rows, adapters, plan = needed.rows, plan.adapters, needed.plan
            layer = self._layers[index]
            self._store_last(x, rotary, layer, adapters, plan)
            if not len(rows):
                return x[:0]
            x, rotary = ops.gather_rows(x, rows), ops.gather_rows(rotary, rows)
            stream = self.group.get_residual_rows(ops, stream, rows)
            query = self._compute_last_query(x, rotary, layer, plan.adapters)
        x = self._add_attention(stream, query, index, plan)
        return self._add_mlp(stream, x, index, plan.adapters)

    def _store_last(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor,
        layer: Layer,
        adapters: RowAdapters | None,
        plan: StepPlan,
    ) -> None:
        ops, index, inner = self._ops, self.spec.layers - 1, self.spec.heads * self.spec.dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[inner:]
        weight = slice_rows(layer.qkv, inner, None)
        pairs = lora.apply_linear(x, weight, bias, adapters, index, "qkv", ops.linear, inner)
        ops.rotate_and_store(pairs, rotary, layer.norms, self.spec.eps, plan, index)

    def _compute_last_query(
        self, x: torch.Tensor, rotary: torch.Tensor, layer: Layer, adapters: RowAdapters | None
    ) -> torch.Tensor:
        ops, spec, inner = self._ops, self.spec, self.spec.heads * self.spec.dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[:inner]
        weight = slice_rows(layer.qkv, 0, inner)
        query = lora.apply_linear(x, weight, bias, adapters, spec.layers - 1, "qkv", ops.linear)
        return ops.normalize_and_rotate(query, rotary, layer.q_norm, spec.eps, spec.dim)

    def _add_attention(
        self, stream: torch.Tensor, query: torch.Tensor, index: int, plan: StepPlan
    ) -> torch.Tensor:
        # Returns the RMSNorm of the sum.
        layer, adapters = self._layers[index], plan.adapters
        if isinstance(layer.out, torch.Tensor) and self._can_add_in_place(
            stream, layer.out_bias, adapters
        ):
            scale, window = self.spec.dim**-0.5, self.spec.windows[index]
            self._ops.add_attention(query, plan, index, scale, window, layer.out, stream)
            return self._ops.rms_norm(stream, layer.mlp_norm, self.spec.eps)
        attended = self.attend(query, index, plan)
        return self._add_output_projection(stream, attended.flatten(1), index, adapters)

    def _add_output_projection(
        self, stream: torch.Tensor, x: torch.Tensor, index: int, adapters: RowAdapters | None
    ) -> torch.Tensor:
        layer = self._layers[index]
        return self._add_product(
            stream, x, layer.out, layer.out_bias, index, "out", adapters, layer.mlp_norm
        )

    def _add_mlp(
        self, stream: torch.Tensor, x: torch.Tensor, index: int, adapters: RowAdapters | None
    ) -> torch.Tensor:
        # Returns the input of the next layer.
        ops, layer, norm = self._ops, self._layers[index], self._get_norm_after_layer(index)
        if layer.router is not None:
            x = self._compute_experts(x, layer, layer.router)
            return self.group.add_norm(ops, x, stream, norm, self.spec.eps)
        bias = layer.gate_up_bias
        if adapters is None:
            x = ops.gated_linear(x, layer.gate_up, bias)
        else:
            x = lora.apply_linear(x, layer.gate_up, bias, adapters, index, "gate_up", ops.linear)
            x = ops.silu_mul(x)
        return self._add_product(
            stream, x, layer.down, layer.down_bias, index, "down", adapters, norm
        )

    def _add_product(
        self,
        stream: torch.Tensor,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        index: int,
        matrix: str,
        adapters: RowAdapters | None,
        norm: torch.Tensor,
    ) -> torch.Tensor:
        # Returns the RMSNorm of the sum.
        ops, eps = self._ops, self.spec.eps
        if isinstance(weight, torch.Tensor) and self._can_add_in_place(stream, bias, adapters):
            ops.add_product(x, weight, stream)
            return ops.rms_norm(stream, norm, eps)
        x = lora.apply_linear(x, weight, bias, adapters, index, matrix, ops.linear)
        return self.group.add_norm(ops, x, stream, norm, eps)

    def _can_add_in_place(
        self, stream: torch.Tensor, bias: torch.Tensor | None, adapters: RowAdapters | None
    ) -> bool:
        plain = self.group is SINGLE_RANK_GROUP and bias is None and adapters is None
        return plain and stream.shape[0] >= self._ops.min_add_rows

    def _is_small_step(self, num_rows: int, plan: StepPlan) -> bool:
        # Several rows need a CUDA graph: without one, it takes longer to launch the fused kernels.
        if num_rows == 1:
            return self._ops.get_max_projection_rows(self._layers[0].qkv) > 0
        if plan.decodes < num_rows or self.spec.mixture is not None:
            return False
        matrices = ((layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self._layers)
        return num_rows <= min(
            self._ops.get_max_projection_rows(weight) for weights in matrices for weight in weights
        )

    def _forward_small_step(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        # With one rank, the kernel of a product also normalises its input, and adds its result to
        # the stream. With several ranks, the all-reduce between two products does both.
        ops, eps, scale, group = self._ops, self.spec.eps, self.spec.dim**-0.5, self.group
        is_single_rank = group is SINGLE_RANK_GROUP
        rotary = ops.compute_rotary_table(positions, self._inverse)
        stream = self.embed(ids) if embeds is None else embeds.clone()
        x = stream if is_single_rank else ops.rms_norm(stream, self._layers[0].attention_norm, eps)

        def add_norm(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
            return group.add_norm(ops, x, stream, norm, eps)

        def add_product(
            x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, norm: torch.Tensor
        ) -> torch.Tensor:
            if is_single_rank:
                return ops.project(x, weight, bias, into=stream)
            return add_norm(ops.project(x, weight, bias), norm)

        for index, layer in enumerate(self._layers):
            after = self._get_norm_after_layer(index)
            norm = layer.attention_norm if is_single_rank else None
            qkv = ops.project(x, layer.qkv, layer.qkv_bias, norm, eps)
            query = ops.rotate_and_store(qkv, rotary, layer.norms, eps, plan, index)
            x = ops.attend(query, plan, index, scale, self.spec.windows[index]).flatten(1)
            x = add_product(x, layer.out, layer.out_bias, layer.mlp_norm)
            if layer.router is not None:
                x = ops.rms_norm(x, layer.mlp_norm, eps) if is_single_rank else x
                x = self._compute_experts(x, layer, layer.router)
                x = stream.add_(x) if is_single_rank else add_norm(x, after)
                continue
            norm = layer.mlp_norm if is_single_rank else None
            x = ops.project(x, layer.gate_up, layer.gate_up_bias, norm, eps, silu=True)
            x = add_product(x, layer.down, layer.down_bias, after)
        return ops.rms_norm(x, self._tensors["norm"], eps) if is_single_rank else x

    def _get_norm_after_layer(self, index: int) -> torch.Tensor:
        following = index + 1
        if following < len(self._layers):
            return self._layers[following].attention_norm
        return self._tensors["norm"]

    def _compute_experts(self, x: torch.Tensor, layer: Layer, router: torch.Tensor) -> torch.Tensor:
        # Only this rank's part. The sum over all ranks is the output.
        mixed = self.spec.mixture
        assert mixed is not None
        return self._ops.compute_experts(
            x, router, layer.gate_up, layer.down, mixed.top_k, mixed.normalised
        )

    def close(self) -> None:
        """Release all tensors."""
        self._tensors = {}
        self._layers = []
        self._ops = choose_ops(torch.device("meta"))
        self._inverse = self._inverse.to("meta")  # it may also be on the device
