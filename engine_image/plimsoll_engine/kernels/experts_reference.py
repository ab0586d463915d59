"""Mixture of experts in plain torch, which computes one expert at a time."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from plimsoll_engine.kernels.quantized import Quantized, Weight, product


def route(
    x: torch.Tensor, router: torch.Tensor, top_k: int, normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the weights of each row's best experts, both [tokens, top_k].

    ``x`` is [tokens, hidden]. The weights have its dtype.
    """
    likely = product(x, router, None).softmax(dim=-1, dtype=torch.float32)
    shares, experts = likely.topk(top_k, dim=-1)
    if normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return experts, shares.to(x.dtype)


def get_expert_matrix(weight: Weight, expert: int, num_matrices: int) -> Weight:
    """Return the matrix of ``expert`` in ``weight``, which stacks ``num_matrices`` matrices."""
    if isinstance(weight, Quantized):
        return Quantized(*(_take_matrix(tensor, expert, num_matrices) for tensor in weight))
    return _take_matrix(weight, expert, num_matrices)


def _take_matrix(tensor: torch.Tensor, index: int, num_matrices: int) -> torch.Tensor:
    rows = len(tensor) // num_matrices
    return tensor[index * rows : (index + 1) * rows]


def compute_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    top_k: int,
    normalised: bool,
) -> torch.Tensor:
    """Return the weighted sum of each row's ``top_k`` best experts, as [tokens, hidden]."""
    tokens, hidden = x.shape
    numbers, shares = route(x, router, top_k, normalised)
    parts = x.new_empty(tokens, top_k, hidden)
    for expert in numbers.unique().tolist():
        token, place = torch.where(numbers == expert)
        gate_up_rows = product(x[token], get_expert_matrix(gate_up, expert, len(router)), None)
        gate, up = gate_up_rows.chunk(2, dim=-1)
        result = product(silu(gate) * up, get_expert_matrix(down, expert, len(router)), None)
        parts[token, place] = result * shares[token, place, None]
    return parts.sum(dim=1)
