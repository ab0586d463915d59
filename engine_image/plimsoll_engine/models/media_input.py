"""Convert the media in messages to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from plimsoll_engine.messages.worker_ipc import Media


def stack_media(
    media: Sequence[Media], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return ``media`` as a tensor [items, *shape].

    Raises ValueError if an item is not float32 or has another shape.
    """
    tensors = []
    for item in media:
        if list(item.shape) != list(shape) or item.dtype != "float32" or item.data is None:
            raise ValueError(
                f"the {item.kind} is {item.dtype} {item.shape}; the model expects float32 "
                f"{list(shape)}"
            )
        # Copy, because torch warns about read-only memory.
        tensors.append(torch.frombuffer(bytearray(item.data), dtype=torch.float32).view(*shape))
    return torch.stack(tensors).to(device=device, dtype=dtype)


def make_dummy_media(
    kind: Literal["image", "audio"], shape: Sequence[int], placeholders: int, tokens: int
) -> Media:
    """Return a media item whose data are zeros, for the warm-up."""
    size = 4
    for length in shape:
        size *= length
    return Media(kind, b"example", 0, placeholders, tokens, list(shape), data=bytes(size))
