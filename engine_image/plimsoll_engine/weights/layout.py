"""Layout of a model's weights in one flat buffer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch

from plimsoll_engine.messages.weight_ipc import Manifest, TensorLocation

# cudaMalloc guarantees this alignment (CUDA C++ Programming Guide).
TENSOR_ALIGNMENT_BYTES = 256


def create_manifest(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Return the manifest of a buffer that has space for all ``tensors``.

    Tied tensors are stored once. The tensors may be on the meta device.
    """
    places: dict[str, TensorLocation] = {}
    stored: dict[int, TensorLocation] = {}
    end = 0
    for name, tensor in tensors.items():
        place = stored.get(id(tensor))
        if place is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            place = TensorLocation(end, list(tensor.shape), dtype)
            stored[id(tensor)] = place
            end = _align_size(end + max(1, tensor.nbytes))
        places[name] = place
    return Manifest(places, max(end, TENSOR_ALIGNMENT_BYTES))


def make_views(flat: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return the tensors of ``manifest`` by name, as views of the buffer ``flat`` uint8 [bytes].

    Raises ValueError if the buffer has the wrong size.
    """
    if flat.numel() != manifest.nbytes:
        raise ValueError(
            f"the buffer has {flat.numel()} bytes, but the manifest needs {manifest.nbytes}"
        )
    view_at: dict[int, torch.Tensor] = {}
    views: dict[str, torch.Tensor] = {}
    for name, place in manifest.places.items():
        if place.offset not in view_at:
            view_at[place.offset] = _make_view(flat, place)
        views[name] = view_at[place.offset]
    return views


def compute_checksums(flat: torch.Tensor, manifest: Manifest) -> dict[str, int]:
    """Return a checksum of each tensor by name: the sum of its int64 words modulo 2**64.

    It detects accidental writes only.
    """
    offsets = sorted({place.offset for place in manifest.places.values()} | {manifest.nbytes})
    end_of = dict(pairwise(offsets))
    words = flat.view(torch.int64)
    sums = [
        words[place.offset // 8 : end_of[place.offset] // 8].sum()
        for place in manifest.places.values()
    ]
    return dict(zip(manifest.places, torch.stack(sums).tolist(), strict=True)) if sums else {}


def _make_view(flat: torch.Tensor, location: TensorLocation) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, location.dtype)
    count = 1
    for size in location.shape:
        count *= size
    part = flat[location.offset : location.offset + count * dtype.itemsize]
    return part.view(dtype).view(location.shape)


def _align_size(size: int) -> int:
    return -(-size // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
