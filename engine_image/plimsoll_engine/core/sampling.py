"""From logits to the next token of each row.

The random number of output token i of a request depends on (seed, i) alone: not on the batch, the
device, or how often the request was preempted or carried to another worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from plimsoll_engine.ipc import Sampling


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for output token ``position``, with 53 random bits."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / (1 << 53)


def sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> torch.Tensor:
    """The next token of each row of ``logits`` [rows, vocabulary], as int64 [rows] on its device.

    ``positions`` are the numbers of output tokens that the rows' requests already have.
    """
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    tokens = logits.argmax(dim=-1)
    if drawn:
        tokens[drawn] = _draw(
            logits[drawn], [samplings[row] for row in drawn], [positions[row] for row in drawn]
        )
    return tokens


def _draw(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> torch.Tensor:
    size = logits.shape[-1]
    knobs = torch.tensor(
        [
            (s.temperature, s.top_k or size, s.top_p, s.min_p, uniform(s.seed, position))
            for s, position in zip(samplings, positions, strict=True)
        ],
        dtype=torch.float64,
    ).to(logits.device)
    temperature, top_k, top_p, min_p, draw = knobs.unsqueeze(-1).unbind(dim=1)
    ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(ordered / temperature, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    rank = torch.arange(size, device=logits.device)
    keep = (rank < top_k) & (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    keep[:, 0] = True
    kept = probabilities * keep
    cumulative = kept.cumsum(dim=-1)
    chosen = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)
    last = keep.sum(dim=-1, keepdim=True) - 1  # the kept ranks are always the first ones
    return tokens.gather(-1, chosen.minimum(last)).squeeze(-1)
