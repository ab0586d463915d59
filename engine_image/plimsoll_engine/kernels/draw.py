"""A draw from a softmax that is as sensitive as the distribution, and no more.

The token is the column with the largest sum of logit over temperature and Gumbel noise, and the
noise of a column is made of the row's key and the column's number alone. Rounding that moves a
distribution by a share of 1e-6 so changes one token in a million, on whichever device, beside
whatever load. (A walk over the running sum of the probabilities is a thousand times as sensitive:
each step of the sum can lie across the drawn number.)

The hash is two rounds of multiply and xor-shift, with one word of the key before each of them
(the constants are those of Chris Wellons' search for unbiased 32-bit hashes, "lowbias32"). 62 bits
make a number in (0, 1), so that the least likely token has noise large enough to be drawn.
"""

from __future__ import annotations

import torch

FIRST = 0x7FEB352D
SECOND = 0x846CA68B - (1 << 32)
LOW_31 = 0x7FFFFFFF
STEP = 2.0**-31
BELOW_ONE = 1 - 2.0**-24
"""The largest float32 below 1."""
ELEMENTS = 1 << 17
"""Of float32 that are worked on at once: more than a core's cache holds takes twice as long."""


def noise(keys: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the logarithms of exponentially distributed numbers: Gumbel noise, negative.

    ``keys`` are int32 [rows, 2], the result is float32 [rows, columns].
    """
    x = torch.arange(columns, dtype=torch.int32, device=keys.device) ^ keys[:, :1]
    x ^= (x >> 16) & 0xFFFF
    x *= FIRST
    low = (x & LOW_31).float().add_(0.5).mul_(STEP)
    x ^= keys[:, 1:]
    x ^= (x >> 15) & 0x1FFFF
    x *= SECOND
    x ^= (x >> 16) & 0xFFFF
    x &= LOW_31
    # Small numbers, which are the ones that win, keep all of their bits.
    uniform = x.float().add_(low).mul_(STEP).clamp_(max=BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_()


def draw(logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw a column of each row, int64 [rows].

    ``logits`` are [rows, columns], ``scales`` float32 [rows] one over the temperatures, ``keys``
    int32 [rows, 2].
    """
    rows, columns = logits.shape
    at_once = max(1, ELEMENTS // columns) if logits.device.type == "cpu" else rows
    parts = []
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        scores = logits[part].float() * scales[part].unsqueeze(-1)
        parts.append(scores.sub_(noise(keys[part], columns)).argmax(dim=-1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
