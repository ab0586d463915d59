"""A mixture of experts in plain torch, expert by expert."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu


def route(
    x: torch.Tensor, router: torch.Tensor, chosen: int, normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts int64 of each row of ``x``, and their shares; both [tokens, chosen].

    The softmax is in float32, the shares have the dtype of ``x``.
    """
    likely = linear(x, router).softmax(dim=-1, dtype=torch.float32)
    shares, experts = likely.topk(chosen, dim=-1)
    if normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return experts, shares.to(x.dtype)


def experts(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: int,
    normalised: bool,
) -> torch.Tensor:
    """Return the sum of the ``chosen`` best experts of each row of ``x`` [tokens, hidden].

    See :meth:`plimsoll_engine.kernels.ops.Ops.experts`.
    """
    tokens, hidden = x.shape
    first = gate_up.view(len(router), -1, hidden)
    second = down.view(len(router), hidden, -1)
    numbers, shares = route(x, router, chosen, normalised)
    parts = x.new_empty(tokens, chosen, hidden)
    for expert in numbers.unique().tolist():
        token, place = torch.where(numbers == expert)
        gate, up = linear(x[token], first[expert]).chunk(2, dim=-1)
        product = linear(silu(gate) * up, second[expert])
        parts[token, place] = product * shares[token, place, None]
    return parts.sum(dim=1)
