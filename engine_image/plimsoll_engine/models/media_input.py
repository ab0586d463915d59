"""Convert images and audio in messages to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from plimsoll_engine.messages.worker_ipc import Media


def stack_media(
    media: Sequence[Media], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the data of all ``media`` as one tensor [items, *shape] of ``dtype``.

    Raises ValueError if an item is not float32, or does not have this ``shape``.
    """
    tensors = []
    for item in media:
        if list(item.shape) != list(shape) or item.dtype != "float32" or item.data is None:
            raise ValueError(
                f"the {item.kind} is {item.dtype} with shape {item.shape}, but the model expects"
                f" float32 with shape {list(shape)}"
            )
        # Copy, because torch warns about read-only memory.
        tensors.append(torch.frombuffer(bytearray(item.data), dtype=torch.float32).view(*shape))
    return torch.stack(tensors).to(device=device, dtype=dtype)


def make_dummy_media(
    kind: Literal["image", "audio"], shape: Sequence[int], num_placeholders: int, num_tokens: int
) -> Media:
    """Return an image or audio clip of zeros for the warm-up.

    ``num_tokens`` is the number of the encoder's output tokens.
    """
    size = 4
    for length in shape:
        size *= length
    return Media(kind, b"example", 0, num_placeholders, num_tokens, list(shape), data=bytes(size))
