"""Causal language model of transformers on the paged KV pool, through its attention interface."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from plimsoll_engine.kernels.choose import choose_ops
from plimsoll_engine.kernels.step_plan import KVShape, StepPlan

NAME = "plimsoll_paged"


def kv_shape(config: Any) -> KVShape:
    """Return the shape of a transformers config's keys and values."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(config.num_hidden_layers, heads, dim)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    plan: StepPlan | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention of one layer, [1, tokens, heads, dim].

    Tensors are [1, heads, tokens, dim], as transformers passes them; the result has their dtype.
    Raises NotImplementedError for an option that the KV pool does not support.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise NotImplementedError(f"attention option {name} is not supported by the KV pool")
    if plan is None:
        raise NotImplementedError("the model does not pass keyword arguments to its attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    ops = choose_ops(query.device)
    rows = query[0].transpose(0, 1)
    ops.store(key[0].transpose(0, 1), value[0].transpose(0, 1), plan, layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    if window is not None and not isinstance(window, int):
        raise NotImplementedError(f"sliding_window {window!r}: expected a number of tokens")
    out = ops.attend(rows.contiguous(), plan, layer, scale, window)
    return out.unsqueeze(0), None


def register() -> None:
    """Register :data:`NAME` with transformers. Idempotent."""
    AttentionInterface.register(NAME, paged_attention)


class TransformersModel:
    """Model around a loaded transformers ``module``, which it owns.

    It implements :class:`plimsoll_engine.models.model.Model`.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.kv = kv_shape(module.config)
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [tokens, hidden] of ``ids`` [tokens]."""
        embeds: torch.Tensor = self.module.get_input_embeddings()(ids)
        return embeds

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of ``ids`` int64 [tokens].

        Tokens are at ``positions`` int64 [tokens]; the module gets a batch of one. The result has
        the model's dtype, and only the rows that ``plan`` needs.
        """
        inputs = {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
        out = self.module.base_model(
            **{name: tensor.unsqueeze(0) for name, tensor in inputs.items()},
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            plan=plan,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        if plan.needed is not None:
            hidden = choose_ops(hidden.device).gather_rows(hidden.contiguous(), plan.needed.rows)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of ``hidden`` [rows, hidden].

        They are scaled and capped as the config says.
        """
        scores: torch.Tensor = self.module.get_output_embeddings()(hidden)
        config = self.module.config
        # Post-processing of causal heads: Cohere, Granite, Gemma 2.
        if (factor := getattr(config, "logit_scale", None)) is not None:
            scores = scores * factor
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            scores = scores / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            scores = (scores / cap).tanh() * cap
        return scores

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by the module's names."""
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def close(self) -> None:
        """Remove the tensors from every module, because the modules are in reference cycles."""
        for module in self.module.modules():
            module._parameters.clear()
            module._buffers.clear()
