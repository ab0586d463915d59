"""Where each weight lies in one flat buffer. Pure.

A model's tensors are laid one behind the other, each aligned as ``cudaMalloc`` aligns, so that
every kernel takes a view of the buffer as it would take a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from plimsoll_engine.messages.weight_ipc import Manifest, Place

ALIGNMENT = 256
"""Bytes; what ``cudaMalloc`` guarantees for each allocation (CUDA C++ Programming Guide)."""


def lay_out(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Return the manifest of ``tensors``, which may be on ``meta``.

    A tensor under two names (tied weights) has one place.
    """
    places: dict[str, Place] = {}
    seen: dict[int, Place] = {}
    end = 0
    for name, tensor in tensors.items():
        place = seen.get(id(tensor))
        if place is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            place = Place(end, list(tensor.shape), dtype)
            seen[id(tensor)] = place
            end = _aligned(end + max(1, tensor.nbytes))
        places[name] = place
    return Manifest(places, max(end, ALIGNMENT))


def views(flat: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return the tensors of ``manifest`` as views of ``flat``, a one-dimensional uint8 tensor."""
    if flat.numel() != manifest.nbytes:
        raise ValueError(f"a buffer of {flat.numel()} bytes; the manifest needs {manifest.nbytes}")
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, place in manifest.places.items():
        if place.offset not in made:
            made[place.offset] = _view(flat, place)
        found[name] = made[place.offset]
    return found


def checksums(flat: torch.Tensor, manifest: Manifest) -> dict[str, int]:
    """Return a sum modulo 2**64 of each tensor's bytes, padding included: one pass at memory speed.

    It finds stray writes, not an adversary's: two equal and opposite changes cancel out.
    """
    ends = sorted({place.offset for place in manifest.places.values()} | {manifest.nbytes})
    end_of = dict(pairwise(ends))
    words = flat.view(torch.int64)
    sums = [
        words[place.offset // 8 : end_of[place.offset] // 8].sum()
        for place in manifest.places.values()
    ]
    return dict(zip(manifest.places, torch.stack(sums).tolist(), strict=True)) if sums else {}


def _view(flat: torch.Tensor, place: Place) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, place.dtype)
    count = 1
    for size in place.shape:
        count *= size
    part = flat[place.offset : place.offset + count * dtype.itemsize]
    return part.view(dtype).view(place.shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
