"""Sample from a softmax by the Gumbel-max trick, which is robust to rounding errors.

The sampled token is the column with the largest sum of logit / temperature and Gumbel noise. The
noise depends only on the index of the column and the key of the row, so it is the same on any
device and in any batch.
"""

from __future__ import annotations

import torch

# From Chris Wellons' search for unbiased 32-bit hashes (lowbias32).
HASH_MULTIPLIER_1 = 0x7FEB352D
HASH_MULTIPLIER_2 = 0x846CA68B - (1 << 32)
LOW_31_BITS = 0x7FFFFFFF
# Random numbers in (0, 1) have 62 bits, so that even the least likely token can be sampled.
UNIFORM_STEP = 2.0**-31
# Largest float32 less than 1.
LARGEST_BELOW_ONE = 1 - 2.0**-24
# More float32 elements do not fit into a core's cache, and take twice as long per element.
MAX_CPU_ELEMENTS = 1 << 17


def compute_noise(keys: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the negated Gumbel noise float32 [rows, columns] of ``keys`` int32 [rows, 2]."""
    x = torch.arange(num_columns, dtype=torch.int32, device=keys.device) ^ keys[:, :1]
    x ^= (x >> 16) & 0xFFFF
    x *= HASH_MULTIPLIER_1
    low = (x & LOW_31_BITS).float().add_(0.5).mul_(UNIFORM_STEP)
    x ^= keys[:, 1:]
    x ^= (x >> 15) & 0x1FFFF
    x *= HASH_MULTIPLIER_2
    x ^= (x >> 16) & 0xFFFF
    x &= LOW_31_BITS
    # Small numbers win the argmax. They keep all their bits.
    uniform = x.float().add_(low).mul_(UNIFORM_STEP).clamp_(max=LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_()


def draw(logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sample a column of each row from the row's softmax, as int64 [rows].

    ``logits`` is [rows, columns]. ``scales`` float32 [rows] are the inverse temperatures, and
    ``keys`` int32 [rows, 2] the noise keys.
    """
    rows, columns = logits.shape
    at_once = max(1, MAX_CPU_ELEMENTS // columns) if logits.device.type == "cpu" else rows
    parts = []
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        scores = logits[part].float() * scales[part].unsqueeze(-1)
        parts.append(scores.sub_(compute_noise(keys[part], columns)).argmax(dim=-1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
