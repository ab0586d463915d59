"""Run a causal language model of transformers with the paged KV pool."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from plimsoll_engine.kernels.choose import choose_ops
from plimsoll_engine.kernels.step_plan import KVShape, StepPlan

ATTENTION_NAME = "plimsoll_paged"


def get_kv_shape(config: Any) -> KVShape:
    """Return the shape of keys and values in a transformers config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(config.num_hidden_layers, heads, dim)


def compute_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    plan: StepPlan | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention output of one layer, [1, tokens, heads, dim], and None.

    ``query``, ``key`` and ``value`` are [1, heads, tokens, dim]. transformers defines this
    interface. Raises NotImplementedError if the KV pool does not support an option.
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
        raise NotImplementedError(f"sliding_window must be a number of tokens, got {window!r}")
    out = ops.attend(rows.contiguous(), plan, layer, scale, window)
    return out.unsqueeze(0), None


def register_attention() -> None:
    """Register :func:`compute_paged_attention` with transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, compute_paged_attention)


class TransformersModel:
    """Causal language model that runs a transformers ``module``."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.kv = get_kv_shape(module.config)
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        embeds: torch.Tensor = self.module.get_input_embeddings()(ids)
        return embeds

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
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

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.module.get_output_embeddings()(hidden)
        config = self.module.config
        # The heads of Cohere, Granite and Gemma 2 post-process the logits like this.
        if (factor := getattr(config, "logit_scale", None)) is not None:
            scores = scores * factor
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            scores = scores / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            scores = (scores / cap).tanh() * cap
        return scores

    def get_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def close(self) -> None:
        # Reference cycles may keep the modules in memory.
        for module in self.module.modules():
            module._parameters.clear()
            module._buffers.clear()
